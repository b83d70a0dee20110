"""What a hand-off costs through the whole stack, and what a kvstore saves: `python -m bench.hand_off`.

    python -m bench.hand_off --model dummy:llama-3.1-8b                      one GPU for prompts, one for answers
    python -m bench.hand_off --model smollm2-135m-instruct --device cpu --prompt-tokens 1000 --token-budgets 1024,256

Real processes, started by `penstock up` where all are of one host, once for each arrangement:

    prefill, decode, budget N   a prefill and a decode worker. A prompt longer than the budget is computed in chunks, whose KV
                                leaves while the next are computed; a shorter one is handed off as a whole
    decode alone                the decode worker computes prompts as well
    decode, kvstore             likewise, with room for few prompts: each prompt is asked for, driven out by others, and asked
                                for again with another ending, so that its beginning comes from the kvstore. A pause of
                                --pause-s comes before that, in which the others' KV is written to the kvstore
    between hosts, budget N     with --between-hosts: a prefill and a decode worker that share no memory, as if they were on two
                                machines, so that KV goes over NIXL; with one GPU both are on it

One greedy request at a time, each with another random prompt, the same in each arrangement. Times are milliseconds, medians
(slowest, fastest): the client's, over HTTP, and those of `GET /v1/explain`. Answers are compared with those of the first
arrangement; on a GPU a near-tie may differ between arrangements, unless --batch-invariant is given.

A second table tells of hand-offs when what happened, in milliseconds since the prefill worker had the last chunk's result:

    last part told, heard       the prefill worker sends the KvPart of the last chunk, or promises it before the chunk has been
                                computed: then both are negative; the decode worker takes it up
    its copy begun, ended       in a thread of the decode worker; its event loop learns of the end. The thread may know of the
                                chunk's end before the prefill worker's event loop does
    KvReady sent, heard         likewise
    admitted                    the decode worker has the sequence
    KV is here                  nothing is copied any more
    first step, its end         of the decode worker
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import anyio
import httpx
import msgspec
import torch

from bench.common.machine import describe
from bench.common.stack import Stack, free_ports, quiet_flags, running
from bench.common.table import markdown
from common.protocol.errors import ConfigError, PenstockError

TAIL_TOKENS = 40
SETTLE_S = 1.5
"""Until a kvstore has what a worker offers when a request has ended."""
PATIENCE_S = 120.0
ONE_GPU_SHARE = 0.42
"""Of a GPU's memory, for each of two workers on it."""
COPIES = ("KV received", "kvstore")
"""Names of events: from a prefill worker, and from a kvstore."""


@dataclass(frozen=True)
class Arrangement:
    name: str
    flags: tuple[str, ...]
    has_store: bool = False
    num_hosts: int = 1


@dataclass
class Seen:
    """One request: as its client saw it, and as the workers tell. Times in ms; None: it did not happen."""

    first_ms: float
    second_ms: float
    text: str
    wait_ms: float | None = None
    copy_ms: float | None = None
    copied_mb: float = 0.0
    early_mb: float = 0.0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    moments: dict[str, float] = field(default_factory=dict)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.hand_off", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="dummy:llama-3.1-8b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--token-budgets", default="8192,1024", help="of the prefill worker's steps; one arrangement for each")
    parser.add_argument("--answer-tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=8, help="prompts of each arrangement; two more come before them")
    parser.add_argument("--vocab", type=int, default=30000, help="tokens of prompts are below it")
    parser.add_argument("--kv-prompts", type=float, default=3.0, help="prompts that the KV of `decode, kvstore` has room for")
    parser.add_argument("--pause-s", type=float, default=SETTLE_S, help="0: the kvstore is written to meanwhile")
    parser.add_argument("--token-kb", type=float, default=128.0, help="KV of a token")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--between-hosts", action="store_true", help="hand-offs over NIXL, too")
    parser.add_argument("--nixl-transports", default="tcp", help="UCX_TLS of these; empty: UCX chooses")
    parser.add_argument("--only", default="", help="a part of the names of arrangements to run")
    parser.add_argument("--flag", action="append", default=[], metavar="--NAME=VALUE", help="for `penstock up` and workers")
    return parser.parse_args(argv)


def arrangements(options: argparse.Namespace) -> list[Arrangement]:
    shared = (f"--model={options.model}", f"--device={options.device}", "--draft=0", "--lookup=off", *options.flag)
    if options.batch_invariant:
        shared += ("--batch-invariant",)
    kv_mb = int(options.kv_prompts * (options.prompt_tokens + TAIL_TOKENS) * options.token_kb / 1024)
    apart = ("--prefill=1", "--decode=1", "--kvstore=0", "--direct-max-tokens=-1")
    found = [
        Arrangement(f"prefill, decode, budget {budget}", (*shared, *apart, f"--token-budget={budget}"))
        for budget in options.token_budgets.split(",")
    ]
    alone = ("--prefill=0", "--decode=1")
    found.append(Arrangement("decode alone", (*shared, *alone, "--kvstore=0")))
    found.append(Arrangement("decode, kvstore", (*shared, *alone, "--kvstore=1", f"--kv-cache-mb={kv_mb}"), has_store=True))
    if options.between_hosts:
        found += [
            Arrangement(f"between hosts, budget {budget}", (f"--token-budget={budget}",), num_hosts=2)
            for budget in options.token_budgets.split(",")
        ]
    return [one for one in found if options.only in one.name]


async def ask(client: httpx.AsyncClient, model: str, prompt: list[int], tokens: int) -> Seen:
    """:raises ConfigError: the answer is an error."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    begun, came, text, name = time.perf_counter(), list[float](), "", ""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise ConfigError(f"HTTP {response.status_code}: {(await response.aread()).decode(errors='replace')[:500]}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk: dict[str, Any] = msgspec.json.decode(line[6:])
            if "error" in chunk:
                raise ConfigError(f"the answer ended with {chunk['error']}")
            name = chunk.get("id", name)
            if chunk.get("choices") and not chunk["choices"][0].get("finish_reason"):
                came.append(1000 * (time.perf_counter() - begun))
                text += chunk["choices"][0]["text"]
    seen = Seen(came[0] if came else 0.0, came[1] - came[0] if len(came) > 1 else 0.0, text)
    explained: dict[str, Any] = (await client.get(f"/v1/explain/{name}")).json()
    for one in explained["requests"]:
        add_events(seen, one)
    return seen


def add_events(seen: Seen, explained: dict[str, Any]) -> None:
    """Add what workers tell of a request."""
    events: list[dict[str, Any]] = explained["events"]
    chunks = [event["at_ms"] + (event.get("duration_ms") or 0.0) for event in events if event["event"] == "prefill chunk"]
    firsts = [event["at_ms"] for event in events if event["event"] == "first step"]
    copies = [event for event in events if event["event"] in COPIES]
    seen.cached_tokens = explained["cached_tokens"]
    if chunks and firsts:
        seen.wait_ms = firsts[-1] - max(chunks)
    if copies:
        seen.copy_ms = sum(event.get("duration_ms") or 0.0 for event in copies)
        facts = [event.get("facts", {}) for event in copies]
        seen.copied_mb = sum(each.get("received_bytes", 0) for each in facts) / 1e6
        seen.early_mb = sum(each.get("streamed_bytes", 0) for each in facts) / 1e6
    seen.recomputed_tokens = sum(event.get("facts", {}).get("recomputed_tokens", 0) for event in events)
    if chunks and firsts and copies:
        seen.moments = {name: at - max(chunks) for name, at in moments(events)}


def moments(events: list[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """Return what happened between a prompt's last chunk and its first decode step, and when; nothing where it was not handed
    off."""
    ends = [event["at_ms"] + (event.get("duration_ms") or 0.0) for event in events]
    # the last of each
    found = {(event["event"], event["service"]): (event, end) for event, end in zip(events, ends, strict=True)}
    if ("hand-off", "prefill") not in found:
        return
    if ("KV part", "decode") in found:
        yield "last part told", found["KV part", "prefill"][0]["at_ms"]
        heard, copied_at = found["KV part", "decode"]
        yield "heard", heard["at_ms"]
        begun_at = heard["at_ms"] + heard["facts"]["queued_us"] / 1000
        yield "copy begun", begun_at
        yield "ended in its thread", begun_at + heard["facts"]["copy_us"] / 1000
        yield "in the event loop", copied_at
    made, received = found["hand-off", "prefill"][0], found["KV received", "decode"]
    yield "KvReady sent", made["at_ms"] + made["facts"]["sent_us"] / 1000
    yield "KvReady heard", received[0]["at_ms"] - received[0]["facts"]["admission_us"] / 1000
    yield "admitted", received[0]["at_ms"]
    if "queued_us" in received[0]["facts"] and ("KV part", "decode") not in found:
        begun_at = received[0]["at_ms"] + received[0]["facts"]["queued_us"] / 1000
        yield "copy begun", begun_at
        yield "ended in its thread", begun_at + received[0]["facts"]["copy_us"] / 1000
    yield "KV is here", received[1]
    yield "first step", found["first step", "decode"][0]["at_ms"]
    yield "its end", found["first step", "decode"][1]


def start_apart(
    stack: Stack, arrangement: Arrangement, options: argparse.Namespace, memory: Path, ports: Sequence[int]
) -> None:
    """Start a gateway, a prefill and a decode worker; each worker has a folder for shared memory, and so a host, of its own.

    memory: where these folders are made. ports: of HTTP and of NATS.
    """
    http_port, nats_port = ports
    url = f"nats://127.0.0.1:{nats_port}"
    stack.start_nats(nats_port)
    shared = ["--kv-transfer=nixl", f"--nixl-transports={options.nixl_transports}", *options.flag]
    shared += ["--batch-invariant"] if options.batch_invariant else []
    count = torch.cuda.device_count() if options.device.startswith("cuda") else 0
    shared += [f"--gpu-memory-utilization={ONE_GPU_SHARE}"] if count == 1 else []
    stack.start(
        "gateway", "services.gateway", *quiet_flags("gateway-0", url, options.model, http_port), "--direct-max-tokens=-1"
    )
    workers = {"prefill": arrangement.flags, "decode": ("--lookup=off",)}
    for (number, (role, flags)), port in zip(enumerate(workers.items()), free_ports(2), strict=True):
        (memory / role).mkdir()
        where = [f"--device={f'cuda:{number % count}' if count else options.device}", f"--shm-dir={memory}/{role}"]
        stack.start(role, f"services.{role}", *quiet_flags(f"{role}-0", url, options.model, port), *shared, *flags, *where)


async def measure(arrangement: Arrangement, options: argparse.Namespace, folder: Path, memory: Path) -> list[Seen]:
    """Return what each counted request was seen to do. folder: for logs and data. memory: a folder in shared memory.

    :raises ConfigError: the system does not start, or refuses.
    """
    port, nats = free_ports(2)
    dice = random.Random("hand-off")

    def new_prompt(size: int = options.prompt_tokens) -> list[int]:
        return [dice.randrange(100, options.vocab) for _ in range(size)]

    counted: list[Seen] = []
    async with running(folder) as stack, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
        begun = time.monotonic()
        if arrangement.num_hosts > 1:
            start_apart(stack, arrangement, options, memory, (port, nats))
        else:
            flags = ("up", *arrangement.flags, f"--http-port={port}", f"--nats-port={nats}", f"--data-dir={folder}/data")
            stack.start("up", "common.cli", *flags)
        await stack.wait_ready(port, 300.0)
        print(f"{arrangement.name}: ready after {time.monotonic() - begun:.1f} s", file=sys.stderr, flush=True)
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        prompts = [new_prompt() for _ in range(options.rounds + 2)]
        fillers = [new_prompt() for _ in range(int(options.kv_prompts) + 2)]
        for number, prompt in enumerate(prompts):
            seen = await ask(client, model, prompt, options.answer_tokens)
            if arrangement.has_store:
                await anyio.sleep(SETTLE_S)
                for filler in fillers:
                    await ask(client, model, [number + 1, *filler[1:]], 1)
                await anyio.sleep(options.pause_s)
                seen = await ask(client, model, [*prompt, *new_prompt(TAIL_TOKENS)], options.answer_tokens)
            if number >= 2:
                counted.append(seen)
    return counted


def shown(values: Sequence[float | None]) -> str:
    known = sorted(value for value in values if value is not None)
    return f"{median(known):.1f} ({known[-1]:.1f}, {known[0]:.1f})" if known else "–"


def row(arrangement: Arrangement, seen: Sequence[Seen], first: Sequence[Seen]) -> tuple[str, ...]:
    same = sum(one.text == other.text for one, other in zip(seen, first, strict=True))
    return (
        arrangement.name,
        shown([one.first_ms for one in seen]),
        shown([one.wait_ms for one in seen]),
        shown([one.copy_ms for one in seen]),
        f"{median(one.copied_mb for one in seen):.0f}",
        f"{median(one.early_mb for one in seen):.0f}",
        f"{median(one.cached_tokens for one in seen):.0f}, {median(one.recomputed_tokens for one in seen):.0f}",
        shown([one.second_ms for one in seen]),
        "–" if arrangement.has_store else f"{same} of {len(seen)}",
    )


async def run(options: argparse.Namespace) -> None:
    found: list[tuple[Arrangement, list[Seen]]] = []
    for arrangement in arrangements(options):
        with (
            tempfile.TemporaryDirectory(prefix="penstock-hand-off-") as folder,
            tempfile.TemporaryDirectory(prefix="hand-off-", dir="/dev/shm") as memory,
        ):
            found.append((arrangement, await measure(arrangement, options, Path(folder), Path(memory))))
    heads = ("first token", "last chunk → first step", "copying KV", "MB", "MB before KvReady", "cached, computed again")
    print(describe())
    print(f"{options.model}, prompts of {options.prompt_tokens} tokens, {options.rounds} each")
    print(markdown(("", *heads, "1st → 2nd piece", "equal"), [row(*one, found[0][1]) for one in found]))
    handed = [(arrangement.name, [one.moments for one in seen]) for arrangement, seen in found if seen[0].moments]
    names = list(dict.fromkeys(name for _, seen in handed for one in seen for name in one))
    if handed:
        rows = [(name, *(shown([one.get(name) for one in seen]) for _, seen in handed)) for name in names]
        print(markdown(("ms since the last chunk", *(name for name, _ in handed)), rows))


def main() -> None:
    try:
        anyio.run(run, parse(sys.argv[1:]))
    except PenstockError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
