"""What routing by workers' own word gives: decisions, memory, hit rates, throughput, and a gateway that is killed.

    python -m bench.routing

decisions    from a tokenized prompt to its workers, among --blocks blocks that --prefill workers have told of; and what a
             block takes of memory, what a message costs, and how long a turn of the event loop a snapshot takes
prefixes     --requests requests with --prefixes prompts of --prefix-tokens tokens before endings of their own, to --prefill
             workers with simulated engines whose caches hold a part of all that; the same requests for each way of routing:
             by workers' events, by all that workers really hold at that moment, by memory of what was sent, in turn
nothing      clients in a closed loop whose prompts share nothing: requests a second by events and in turn, in turns
kill -9      real processes on a nats-server: every prefix is asked for at a gateway, which is killed, and again at the next
             one; 5 s after that was started

All but the last run in one process, on the in-memory bus.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import anyio

from bench.common.machine import describe
from bench.common.table import markdown
from bench.routing import decisions, recovery
from bench.routing.site import Plan, Routing, Shared, running, share_nothing, share_prefixes

PARTS = ("decisions", "prefixes", "nothing", "kill")
WAYS: Sequence[tuple[Routing, int]] = (
    ("events", 1),
    ("all-knowing", 1),
    ("memory", 1),
    ("round-robin", 1),
    ("events", 2),
    ("all-knowing", 2),
    ("memory", 2),
)
"""How requests are routed, and by how many gateways."""


def decide(given: argparse.Namespace) -> None:
    figures, memory = decisions.measure(
        num_blocks=given.blocks, num_prefill=given.prefill, prompt_tokens=given.prefix_tokens, samples=given.samples
    )
    rows = [[each.name, f"{each.p50_us:.0f}", f"{each.p99_us:.0f}"] for each in figures]
    print(markdown([f"decision, {memory.num_blocks:,} blocks", "p50, µs", "p99, µs"], rows))
    print(
        f"{memory.bytes_per_block:.0f} bytes a block; {memory.event_us:.2f} µs a block that is told of; a snapshot of "
        f"{memory.num_blocks // given.prefill:,} blocks takes {memory.snapshot_ms:.0f} ms, in turns of "
        f"{memory.snapshot_part_ms:.0f} ms at most",
        flush=True,
    )


async def with_prefixes(given: argparse.Namespace, folder: Path) -> None:
    found: dict[tuple[Routing, int], Shared] = {}
    for routing, num_gateways in WAYS:
        plan = Plan(routing=routing, num_prefill=given.prefill, num_gateways=num_gateways, num_blocks=given.worker_blocks)
        async with running(plan, folder) as site:
            found[routing, num_gateways] = await share_prefixes(
                site,
                num_prefixes=given.prefixes,
                prefix_tokens=given.prefix_tokens,
                tail_tokens=given.tail_tokens,
                num_requests=given.requests,
                per_s=given.per_s,
                seed=given.seed,
            )
    rows = [
        [
            routing,
            str(num_gateways),
            f"{shared.hit_rate:.1%}",
            f"{shared.hit_rate / found['all-knowing', num_gateways].hit_rate:.1%}",
            " ".join(map(str, shared.by_worker)),
        ]
        for (routing, num_gateways), shared in found.items()
    ]
    print(markdown(["routing", "gateways", "hit rate", "of all-knowing", "prompts by worker"], rows), flush=True)


async def with_nothing(given: argparse.Namespace, folder: Path) -> None:
    rates: dict[Routing, list[float]] = {"events": [], "round-robin": []}
    for turn in range(given.turns):
        for routing, seen in rates.items():
            plan = Plan(routing=routing, num_prefill=given.prefill, num_blocks=given.worker_blocks, time_scale=4.0)
            async with running(plan, folder) as site:
                size = given.prefix_tokens + given.tail_tokens
                seen.append(
                    await share_nothing(site, clients=given.clients, prompt_tokens=size, seconds=given.seconds, seed=turn)
                )
    rows = [[name, f"{median(seen):.2f}", " ".join(f"{rate:.2f}" for rate in seen)] for name, seen in rates.items()]
    print(markdown(["nothing is shared", "requests/s", "each turn"], rows))
    print(f"events / round-robin: {median(rates['events']) / median(rates['round-robin']):.3f}", flush=True)


async def with_kill(given: argparse.Namespace, folder: Path) -> None:
    rows: list[list[str]] = []
    for name, blocks in (("events", 2_000_000), ("memory", 0)):
        logs = folder / name
        logs.mkdir()
        seen = await recovery.measure(
            logs,
            num_prefill=given.prefill,
            num_prefixes=given.prefixes,
            prefix_tokens=given.prefix_tokens,
            tail_tokens=given.tail_tokens,
            kv_index_blocks=blocks,
        )
        known = f"{seen.known_s:.2f}" if blocks else "—"
        rows.append([name, f"{seen.before:.1%}", f"{seen.after:.1%}", f"{seen.ready_s:.2f}", known, f"{seen.asked_s:.2f}"])
    titles = ["routing", "cached before", "cached after", "ready after, s", "caches known after, s", "asked after, s"]
    print(markdown(titles, rows), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.routing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--prefill", type=int, default=4, help="prefill workers")
    parser.add_argument("--blocks", type=int, default=1_000_000, help="blocks indexed for decisions")
    parser.add_argument("--samples", type=int, default=5000, help="decisions of each kind")
    parser.add_argument("--prefixes", type=int, default=32)
    parser.add_argument("--prefix-tokens", type=int, default=2000)
    parser.add_argument("--tail-tokens", type=int, default=100)
    parser.add_argument("--requests", type=int, default=900)
    parser.add_argument("--per-s", type=float, default=30.0, help="requests that come a second")
    parser.add_argument("--worker-blocks", type=int, default=2000, help="of each prefill worker's cache, of 16 tokens")
    parser.add_argument("--clients", type=int, default=32, help="where nothing is shared")
    parser.add_argument("--seconds", type=float, default=15.0, help="of one turn there")
    parser.add_argument("--turns", type=int, default=5, help="for each way of routing there")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(argv)
    print(describe(("numpy",)), flush=True)
    if "decisions" in given.parts:
        decide(given)
    for name, part in (("prefixes", with_prefixes), ("nothing", with_nothing), ("kill", with_kill)):
        if name in given.parts:
            with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
                anyio.run(part, given, Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
