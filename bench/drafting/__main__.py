"""What draft workers with a model give, through the whole stack: `python -m bench.drafting`.

    python -m bench.drafting --gpus 0,1                      shapes of Llama 3.1 8B and 3.2 1B, each on a GPU of its own
    python -m bench.drafting --gpus 0 --ways off,shared      both on one GPU
    python -m bench.drafting --gpus 0 --ways off,idle --streams 1,64,256 --kv-mb 16000
    python -m bench.drafting --gpus 0 --ways off,timed --percent 80 --timed "--draft-ms=0.62,0.85 --submit-ms=0.05,0.0125"
    python -m bench.drafting --streams 1,4 --target dummy:smollm2-135m-6-layers-counting \\
        --draft dummy:smollm2-135m-1-layers-counting         in small, on a CPU

Both models count (`common/models/shapes.py`): all of their layers are computed, and the answer is known, whatever is rounded. A
draft model is right behind a share of the tokens, by its weights; behind half of the others its second choice is. Ways:

    off      no speculation
    apart    the draft worker on the last GPU, the target on the first
    shared   both on the first
    timed    a draft worker whose engine only takes time (`timed_draft.py`, which --timed is for): the target's side alone
    idle     lookup in the target's steps and a draft worker without a model, and nothing to propose, since no text repeats

Each way and share is a system of its own, as `penstock up` starts it; all run at the same time, and take turns. Per way:
tokens per second of all streams, each after its first token, and its ratio to off in the same turn; medians of the turns.
"accepted": of the proposed tokens that were verified, and how many of a proposal.

The second table has the two sides of each: steps of the target and their time, how many of a stream's steps verify a proposal;
steps of the draft model and their time, in milliseconds; from an update to the proposal that answers it, as the decode worker
sees it; proposals that came too late; failed proposals whose outcome table had what came instead; steps without draft workers.

vLLM with the same models, on one GPU, which drafts between its steps (bench/peer/README.md); without --draft its own pace:

    python -m bench.peer.model_folder dummy:llama-3.1-8b-counting /tmp/target
    python -m bench.peer.model_folder dummy:llama-3.2-1b-counting-80 /tmp/draft
    PYTHONPATH=SITE python -m bench.peer.vllm_cells --weights --folder /tmp/target --draft /tmp/draft --cells 1x128x256
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import NamedTuple
from urllib.parse import urlsplit

import anyio
import httpx
import msgspec

from bench.common.machine import describe
from bench.common.stack import ROOT, free_ports
from bench.common.table import markdown
from bench.cpu.up import Starting, model_of, starting
from bench.serve.client import Outcome, TimedStream
from common.cli.speculation_counts import DRAFT_WORKER, Reading, found_by_gateway, growth, read
from common.cli.speculation_report import between
from common.models.config import load_config
from common.models.source import resolve
from common.runtime.nats_server import find_binary
from common.runtime.parent_death import PARENT_VARIABLE

IDLE, TIMED = "idle", "timed"
WAYS = ("off", "apart", "shared", TIMED, IDLE)
PATH = "/v1/completions"
DRAFT_STEPS, RECEIVED = "penstock_draft_model_steps_total", "penstock_speculation_received_proposals_total"
DRAFT_READY_S = 180.0
"""How long a draft worker may take to draft behind the time at which `penstock up` is ready."""
SPELT_FROM = 256
"""Ids below stand for single bytes; those from here on are words, a blank and the number (`shapes.byte_tokenizer`)."""


class Way(NamedTuple):
    """percent: of the tokens behind which the draft model is right; 0: there is no draft model."""

    name: str
    percent: int

    def __str__(self) -> str:
        return f"{self.name}, {self.percent} %" if self.percent else self.name


class System(NamedTuple):
    """A running one."""

    way: Way
    url: str
    model: str


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.drafting", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="dummy:llama-3.1-8b-counting", help="a dummy model that counts")
    parser.add_argument("--draft", default="dummy:llama-3.2-1b-counting", help="another; the share of right tokens is appended")
    parser.add_argument("--percent", default="80,30", help="of tokens behind which the draft model is right")
    parser.add_argument("--ways", default="", help="between commas; all that --gpus allow without")
    parser.add_argument("--gpus", default="", help="0 or 0,1; none: this machine's CPU")
    parser.add_argument("--streams", default="1,8,64")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--timed", default="", help="flags of `bench.drafting.timed_draft`, with blanks between")
    parser.add_argument("--kv-mb", type=int, default=0, help="of each engine; 0: what all streams need")
    parser.add_argument("--up", action="append", default=[], metavar="--NAME=VALUE", help="a setting for every `penstock up`")
    options = parser.parse_args(argv)
    options.gpus = [gpu for gpu in options.gpus.split(",") if gpu]
    options.streams = [int(count) for count in options.streams.split(",")]
    names = options.ways.split(",") if options.ways else ["off", *(["apart"] if len(options.gpus) != 1 else []), "shared"]
    if names[0] != "off" or not set(names) <= set(WAYS):
        parser.error("--ways begin with off, which others are compared with")
    if not options.ways and not options.gpus:
        names.remove("shared")  # a CPU is one device
    options.ways = [Way("off", 0)]
    for name in names[1:]:
        options.ways += [Way(name, int(part)) for part in options.percent.split(",")] if name != IDLE else [Way(IDLE, 0)]
    return options


def flags_of(way: Way, options: argparse.Namespace) -> list[str]:
    """Of `penstock up`. Guesses of others than the draft worker are left out."""
    model = load_config(resolve(options.target, weights=False))
    tokens = max(options.streams) * (options.prompt + options.output + 64)
    needed = 2 * 2 * tokens * model.num_layers * model.num_kv_heads * model.head_dim >> 20
    flags = [
        f"--model={options.target}",
        f"--lookup={'on' if way.name == IDLE else 'off'}",
        "--head=off",
        "--prefill=0",
        "--kvstore=0",
        f"--max-running={max(options.streams) + 8}",
    ]
    flags += [f"--kv-cache-mb={options.kv_mb or 512 + 2 * needed}", *options.up]
    if not options.gpus:
        flags.append("--device=cpu")
    if way.name == TIMED:
        flags.append("--draft=0")
    elif way.percent:
        flags += ["--draft=1", f"--draft-model={options.draft}-{way.percent}"]
    elif way.name == IDLE:
        flags.append("--draft=1")
    else:
        flags.append("--speculation-tokens=0")
    return flags


def environ_of(way: Way, gpus: Sequence[str]) -> dict[str, str]:
    """`penstock up` gives engines GPUs in turn: the target the first that it sees, the draft worker the next."""
    if not gpus:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus if way.name == "apart" else gpus[:1])}


@contextmanager
def timed_draft_on_a_bus(way: Way, options: argparse.Namespace) -> Iterator[str]:
    """A NATS server, whose URL this is, and on it a draft worker that only takes time."""
    (port,) = free_ports(1)
    bus, guard = f"nats://127.0.0.1:{port}", [sys.executable, "-m", "common.runtime.parent_death", "SIGKILL"]
    draft = [sys.executable, "-m", "bench.drafting.timed_draft", f"--nats={bus}", f"--target={options.target}"]
    commands = [str(find_binary()), "-a=127.0.0.1", f"-p={port}"], [*draft, f"--percent={way.percent}", *options.timed.split()]
    env = os.environ | {PARENT_VARIABLE: str(os.getpid())}
    children = [subprocess.Popen([*guard, *command], cwd=ROOT, env=env, stdout=subprocess.DEVNULL) for command in commands]
    try:
        yield bus
    finally:
        for child in children:
            child.kill()
            child.wait()


async def check(system: System, start: int, count: int) -> None:
    """:raises SystemExit: if an answer is not the known one."""
    body = {"model": system.model, "prompt": [start - 2, start - 1], "max_tokens": count, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=system.url, timeout=300) as http:
        said = (await http.post(PATH, json=body)).raise_for_status().json()["choices"][0]["text"]
    expected = "".join(f" {token}" for token in range(start, start + count))
    if said != expected:
        raise SystemExit(f"{system.way}: the answer behind {start - 1} is {said[:200]!r}, not {expected[:200]!r}")


async def rate(system: System, streams: int, options: argparse.Namespace, draws: random.Random, vocab: int) -> float:
    """Tokens per second of all streams, which begin at the same time. :raises SystemExit: if one fails."""
    parts = urlsplit(system.url)
    outcomes: list[Outcome] = []

    async def one(prompt: list[int]) -> None:
        body = {"model": system.model, "prompt": prompt, "max_tokens": options.output, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        stream = TimedStream(parts.hostname or "", parts.port or 0)
        answer = await stream.post(PATH, msgspec.json.encode(body), timeout_s=600)
        stream.close()
        outcomes.append(Outcome.of(answer, stream.times, len(prompt)))

    async with anyio.create_task_group() as group:
        for _ in range(streams):
            last = draws.randrange(SPELT_FROM, vocab - options.output)
            group.start_soon(one, [*(draws.randrange(10, vocab) for _ in range(options.prompt - 1)), last])
    failed = [
        outcome.error or "an answer is short" for outcome in outcomes if outcome.error or outcome.tokens != options.output
    ]
    if failed:
        raise SystemExit(f"{system.way}: {len(failed)} of {streams} requests failed: {failed[0]}")
    return sum(1 / outcome.tpot_s for outcome in outcomes)


async def accepted(system: System) -> list[Reading]:
    """:raises SystemExit: if a worker can't be read."""
    async with httpx.AsyncClient(base_url=system.url, timeout=30) as http:
        readings, failures = await read(await found_by_gateway(http))
    if failures:
        raise SystemExit("\n".join(failures.values()))
    return readings


async def drafting(system: System) -> None:
    """Ask until the draft worker drafts: `penstock up` is ready before that is.

    :raises SystemExit: if it has drafted nothing after `DRAFT_READY_S`.
    """
    deadline = anyio.current_time() + DRAFT_READY_S
    told = RECEIVED if system.way.name == TIMED else DRAFT_STEPS  # a timed draft worker has no /metrics
    while not any(count for one in await accepted(system) for key, count in one.counts.items() if key.name == told):
        if anyio.current_time() > deadline:
            raise SystemExit(f"{system.way}: its draft worker has drafted nothing; is there memory for all? See --kv-mb")
        await anyio.sleep(1)
        await check(system, SPELT_FROM + 300, 64)


async def opened(way: Way, url: str) -> System:
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        return System(way, url, await model_of(http))


def sides(before: Sequence[Reading], after: Sequence[Reading]) -> list[str]:
    """Return a line of the second table, of what was counted between two readings of a system."""
    earlier = {reading.source.worker: reading.counts for reading in before}
    counted: Counter[str] = Counter()
    for reading in after:
        for key, count in growth(earlier.get(reading.source.worker, Counter()), reading.counts).items():
            if key.drafter in ("", DRAFT_WORKER):
                counted[key.name.removeprefix("penstock_")] += count

    def part(name: str, of: str, shown: str = ".0%", times: float = 1.0) -> str:
        return format(times * counted[name] / counted[of], shown) if counted[of] else "-"

    failed = "speculation_table_hits_total", "speculation_table_misses_total"
    counted["failed"] = sum(counted[name] for name in failed)
    return [
        f"{counted['engine_step_seconds_count']:,.0f}",
        part("engine_step_seconds_sum", "engine_step_seconds_count", ".2f", 1e3),
        part("speculation_drafts_total", "speculation_sequence_steps_total"),
        f"{counted['draft_model_steps_total']:,.0f}",
        part("draft_model_step_seconds_total", "draft_model_steps_total", ".2f", 1e3),
        part("speculation_round_trip_seconds_sum", "speculation_round_trip_seconds_count", ".2f", 1e3),
        part("speculation_late_proposals_total", "speculation_received_proposals_total"),
        part(failed[0], "failed"),
        part("speculation_quiet_steps_total", "engine_step_seconds_count"),
    ]


SIDES = ["steps", "ms", "verify", "draft steps", "ms", "round trip, ms", "late", "table hits", "quiet"]


async def measure(options: argparse.Namespace, urls: Sequence[str], vocab: int) -> tuple[list[list[str]], list[list[str]]]:
    """Return the rows of both tables. urls: of the systems, in the order of `options.ways`."""
    systems = [await opened(way, url) for way, url in zip(options.ways, urls, strict=True)]
    rows: list[list[str]] = []
    more: list[list[str]] = []
    for system in systems:
        await check(system, SPELT_FROM + 300, 64)
        if system.way.percent:
            await drafting(system)
    for streams in options.streams:
        rates: dict[Way, list[float]] = {system.way: [] for system in systems}
        before = {system.way: await accepted(system) for system in systems}
        for turn in range(options.turns + 1):
            for system in systems:
                found = await rate(system, streams, options, random.Random(f"{turn} {streams}"), vocab)
                if turn:  # shapes and rates of acceptance are new to the first
                    rates[system.way].append(found)
                print(f"{streams} streams, turn {turn}, {system.way}: {found:,.1f}", file=sys.stderr, flush=True)
        for system in systems:
            after = await accepted(system)
            workers = between(before[system.way], after, system.model).decode
            every = [worker.drafters[DRAFT_WORKER] for worker in workers if DRAFT_WORKER in worker.drafters]
            drafts, verified, held = (sum(getattr(one, name) for one in every) for name in ("drafts", "verified", "accepted"))
            ratios = [one / off for one, off in zip(rates[system.way], rates[systems[0].way], strict=True)]
            share = f"{held / verified:.0%}, {held / drafts:.2f}" if verified else "-"
            row = [str(streams), str(system.way), f"{median(rates[system.way]):,.1f}", f"{median(ratios):.2f}"]
            rows.append([*row, f"{min(ratios):.2f}-{max(ratios):.2f}", share])
            more.append([str(streams), str(system.way), *sides(before[system.way], after)])
    return rows, more


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    vocab = load_config(resolve(options.target, weights=False)).vocab_size
    with ExitStack() as running:
        started: list[Starting] = []
        for way in options.ways:
            bus = running.enter_context(timed_draft_on_a_bus(way, options)) if way.name == TIMED else ""
            started.append(running.enter_context(starting(flags_of(way, options), environ_of(way, options.gpus), bus=bus)))
        for system in started:
            system.wait()
        rows, more = anyio.run(measure, options, [system.url for system in started], vocab)
    print(f"{describe()}\n\n{options.target}; {options.draft}-N\n")
    print(markdown(["streams", "way", "tokens/s", "of off", "least-most", "accepted, of a proposal"], rows))
    print(f"\n{markdown(['streams', 'way', *SIDES], more)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
