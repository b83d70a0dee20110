"""Draft workers are disposable: what it costs to lose them, to have none, and to talk to them.

    python -m bench.disposable chaos          SmolLM2 on the CPU: workers come, die and come again under steady load
    python -m bench.disposable idle           simulated engine: speculation on with nothing to propose, against off

`chaos`: one `penstock up`, and --streams answers at a time, greedy, the same prompts in each phase: without a draft worker,
with one, with two, with two of which one is killed and started again the whole time. A pause is the time between two pieces of
one answer; the longest is told beside the median, and beside the longest that there was without draft workers. An answer must
be the same in every phase. What draft workers and decode workers said is counted on the way (`bench/common/relay.py`).

`idle`: the same streams through two systems in turns, one with `--speculation-tokens 0` and one with --on.
The simulated engine's text repeats nothing, so that there is nothing to propose. Ratios are of each turn; their median is told.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import anyio
import httpx
import msgspec

from bench.common.draft_workers import draft_worker, draft_workers_ready, running
from bench.common.machine import describe
from bench.common.relay import Faults, is_message, payload_of, relayed
from bench.common.stack import free_ports
from bench.common.table import markdown
from bench.cpu.chat import PROMPTS
from bench.cpu.up import model_of, penstock_up
from common.cli.chunks import Chunk
from common.protocol import messages
from common.protocol.draft_messages import DraftUpdate, Proposals
from common.protocol.errors import ProtocolError

KILLED_AFTER_S = (0.5, 2.5)
_STEP_SUM, _STEP_COUNT = "penstock_engine_step_seconds_sum", "penstock_engine_step_seconds_count"
_TRIP_SUM = "penstock_speculation_round_trip_seconds_sum"
_TRIP_COUNT = "penstock_speculation_round_trip_seconds_count"
_VERIFIED, _ACCEPTED = "penstock_speculation_draft_tokens_total", "penstock_speculation_accepted_tokens_total"
METRICS = (_STEP_SUM, _STEP_COUNT, _TRIP_SUM, _TRIP_COUNT, _VERIFIED, _ACCEPTED)


class Answer(NamedTuple):
    """times: seconds (monotonic) at which pieces of its text came."""

    text: str
    tokens: int
    times: list[float]

    @property
    def pauses(self) -> list[float]:
        return [after - before for before, after in pairwise(self.times)]


class Traffic:
    """What passed between draft workers and decode workers, as the relay saw it: sizes are of NATS frames, in bytes."""

    def __init__(self) -> None:
        self.updates = self.rows = self.update_bytes = self.proposals = self.proposal_bytes = 0

    def passed(self, frame: bytes) -> None:
        if not is_message(frame):
            return
        try:
            message = messages.decode(payload_of(frame))
        except ProtocolError:
            return
        if isinstance(message, DraftUpdate):
            self.updates += 1
            self.rows += len(message.rows)
            self.update_bytes += len(frame)
        elif isinstance(message, Proposals):
            self.proposals += 1
            self.proposal_bytes += len(frame)

    @property
    def bytes_per_row(self) -> float:
        """Both ways, of a sequence and round; the first round of a sequence has its prompt."""
        return (self.update_bytes + self.proposal_bytes) / self.rows if self.rows else 0.0


async def answer(http: httpx.AsyncClient, model: str, prompt: str, tokens: int, salt: str) -> Answer:
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}, "cache_salt": salt, "ignore_eos": True}
    texts: list[str] = []
    times: list[float] = []
    said = 0
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            data = line.removeprefix("data: ")
            if data == line or data == "[DONE]":
                continue
            chunk = msgspec.json.decode(data, type=Chunk)
            if chunk.text:
                texts.append(chunk.text)
                times.append(time.monotonic())
            if chunk.usage is not None:
                said = chunk.usage.completion_tokens
    return Answer("".join(texts), said, times)


async def ask(url: str, prompts: Sequence[str], streams: int, tokens: int, salt: str) -> tuple[list[Answer], float]:
    """Return the answers in the order of their prompts, `streams` at a time, and how many seconds they took."""
    found: dict[int, Answer] = {}
    limiter = anyio.CapacityLimiter(streams)
    limits = httpx.Limits(max_connections=streams)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as http:
        model = await model_of(http)
        began = time.monotonic()

        async def one(index: int) -> None:
            async with limiter:
                found[index] = await answer(http, model, prompts[index], tokens, salt)

        async with anyio.create_task_group() as group:
            for index in range(len(prompts)):
                group.start_soon(one, index)
    return [found[index] for index in range(len(prompts))], time.monotonic() - began


def counted(url: str) -> dict[str, float]:
    """Sums over decode workers, of METRICS."""
    totals: dict[str, float] = dict.fromkeys(METRICS, 0.0)
    for group in httpx.get(f"{url}/sd").raise_for_status().json():
        if group["labels"]["role"] == "decode":
            for line in httpx.get(f"http://{group['targets'][0]}/metrics").raise_for_status().text.splitlines():
                name = line.partition("{")[0].partition(" ")[0]
                if name in totals:
                    totals[name] += float(line.rpartition(" ")[2])
    return totals


@contextlib.contextmanager
def killed_and_restarted(command: Sequence[str], kills: list[float]) -> Iterator[None]:
    """A draft worker that is killed at random and started again, the whole time."""
    over, drawn = threading.Event(), random.Random(5)

    def work() -> None:
        while not over.is_set():
            with contextlib.suppress(AssertionError), running(command) as process:
                over.wait(drawn.uniform(*KILLED_AFTER_S) + 2.0)  # it takes about two seconds to start
                process.kill()
                process.wait()
                kills.append(time.monotonic())

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def chaos(options: argparse.Namespace) -> int:
    (nats_port,) = free_ports(1)
    flags = [f"--nats-port={nats_port}", "--draft=0", "--lookup=off", "--head=off", f"--model={options.model}", *options.flags]
    prompts = [PROMPTS[index % len(PROMPTS)] + " " * (index // len(PROMPTS)) for index in range(options.answers)]
    rows: list[list[str]] = []
    differ = 0
    expected: list[Answer] = []
    with penstock_up(flags) as url:
        anyio.run(ask, url, prompts[: options.streams], options.streams, 16, "warm-up")
        for name, steady, is_chaotic in (
            ("none", 0, False),
            ("1", 1, False),
            ("2", 2, False),
            ("2, one of them dies", 1, True),
        ):
            traffic, kills = Traffic(), list[float]()
            with ExitStack() as stack:
                commands = []
                for rank in range(steady + is_chaotic):
                    relay = stack.enter_context(relayed(nats_port, Faults(), seed=rank, passed=traffic.passed))
                    commands.append(draft_worker("services.draft", nats_port, options.model, f"draft-{rank}", relay.port))
                for command in commands[:steady]:
                    stack.enter_context(running(command))
                anyio.run(draft_workers_ready, nats_port, steady)
                before = counted(url)
                if is_chaotic:
                    stack.enter_context(killed_and_restarted(commands[-1], kills))
                answers, seconds = anyio.run(ask, url, prompts, options.streams, options.tokens, name)
                after = counted(url)
            grown = {key: after[key] - before[key] for key in METRICS}
            expected = expected or answers
            equal = sum(one.text == other.text for one, other in zip(answers, expected, strict=True))
            differ += len(answers) - equal
            rows.append(row_of(name, answers, seconds, grown, traffic, f"{equal} of {len(answers)}", len(kills)))
            print(rows[-1], file=sys.stderr, flush=True)
    titles = ["draft workers", "kills", "tok/s", "step", "median pause", "p99", "longest", "equal", "accepted"]
    titles += ["bytes a sequence and round", "messages a step", "round trip", "of a step"]
    print(f"{describe()}\n\n{markdown(titles, rows)}")
    return 1 if differ else 0


def row_of(
    name: str, answers: Sequence[Answer], seconds: float, grown: dict[str, float], traffic: Traffic, equal: str, kills: int
) -> list[str]:
    pauses = sorted(pause for one in answers for pause in one.pauses)
    step_s = grown[_STEP_SUM] / max(1.0, grown[_STEP_COUNT])
    trip_s = grown[_TRIP_SUM] / grown[_TRIP_COUNT] if grown[_TRIP_COUNT] else 0.0
    verified = grown[_VERIFIED]
    return [
        name,
        str(kills),
        f"{sum(one.tokens for one in answers) / seconds:.1f}",
        f"{1e3 * step_s:.1f} ms",
        f"{1e3 * median(pauses):.1f} ms",
        f"{1e3 * pauses[int(0.99 * len(pauses))]:.1f} ms",
        f"{1e3 * pauses[-1]:.1f} ms",
        equal,
        f"{grown[_ACCEPTED] / verified:.0%} of {verified:,.0f}" if verified else "–",
        f"{traffic.bytes_per_row:.0f}" if traffic.rows else "–",
        f"{traffic.updates / grown[_STEP_COUNT]:.2f} out, {traffic.proposals / grown[_STEP_COUNT]:.2f} in"
        if traffic.rows
        else "–",
        f"{1e3 * trip_s:.2f} ms" if trip_s else "–",
        f"{trip_s / step_s:.0%}" if trip_s else "–",
    ]


def idle(options: argparse.Namespace) -> int:
    engine = ["--engine=simulated", f"--profile={options.profile}", "--max-running=256", f"--model={options.model}"]
    engine += ["--kv-cache-mb=64", *options.flags]
    rows: list[list[str]] = []
    with ExitStack() as stack:
        off = stack.enter_context(penstock_up([*engine, "--draft=0", "--speculation-tokens=0"]))
        on = stack.enter_context(penstock_up([*engine, *options.on.split()]))
        for streams in map(int, options.streams_idle.split(",")):
            prompts = [f"number {index}" for index in range(max(streams, options.turn_tokens // options.tokens))]
            rates: dict[str, list[float]] = {off: [], on: []}
            for turn in range(options.turns + 1):
                for url in (off, on) if turn % 2 else (on, off):
                    answers, seconds = anyio.run(ask, url, prompts, streams, options.tokens, f"{streams}-{turn}")
                    if turn:  # the first one is for warming up
                        rates[url].append(sum(one.tokens for one in answers) / seconds)
            ratios = sorted(with_it / without for with_it, without in zip(rates[on], rates[off], strict=True))
            verified = counted(on)[_VERIFIED]
            rows.append(
                [
                    str(streams),
                    f"{median(rates[off]):,.0f}",
                    f"{median(rates[on]):,.0f}",
                    f"{median(ratios):.3f}",
                    f"{ratios[0]:.3f} to {ratios[-1]:.3f}",
                    f"{verified:,.0f}",
                ]
            )
            print(rows[-1], file=sys.stderr, flush=True)
    titles = ["streams", "off, tok/s", "on, tok/s", "median ratio", "of single turns", "tokens verified so far"]
    print(f"{describe()} · profile {options.profile}\n\n{markdown(titles, rows)}")
    return 0


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.disposable", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["chaos", "idle"])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--streams", type=int, default=4, help="of chaos")
    parser.add_argument("--answers", type=int, default=20, help="of a phase of chaos")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--streams-idle", default="1,64,256", help="of idle, between commas")
    parser.add_argument("--turn-tokens", type=int, default=2048, help="tokens of a turn of idle at least")
    parser.add_argument("--on", default="--draft=1 --lookup=on", help="of idle: the second system's flags")
    parser.add_argument("--turns", type=int, default=5, help="of idle")
    parser.add_argument("--profile", default="h200-llama-8b", help="of the simulated engine; instant: steps take no time")
    parser.add_argument("flags", nargs="*", help="of every `penstock up`, behind --")
    options = parser.parse_args(argv)
    return chaos(options) if options.what == "chaos" else idle(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
