"""The default engine on a CPU beside transformers (bfloat16) and llama.cpp: `python -m bench.cpu`.

    python -m bench.cpu                                   1 and 16 streams, three turns
    python -m bench.cpu --up=--dtype=float32              other flags for `penstock up`
    python -m bench.cpu --up=--draft=1                    with speculation

Ours is a whole `penstock up`, measured by an HTTP client; the others run in processes of their own, one measurement each. They
take turns, because a machine's speed changes; what counts is the median of each turn's ratio. Rates are of decoding: ours is
the sum over streams of (tokens - 1) / (last token's time - first token's). Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from statistics import median

import anyio
import httpx
import msgspec

from bench.common.machine import describe
from bench.common.stack import ROOT
from bench.cpu.peers import PEERS, Work
from bench.cpu.up import model_of, penstock_up, stream_chat
from common.cli.bench import prompt_of
from common.models.source import DEFAULT_MODEL, resolve

OURS = "penstock"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.cpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", default="1,16")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--prompt-words", type=int, default=40)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the peers")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--up", action="append", default=[], metavar="FLAG", help="for `penstock up`")
    return parser.parse_args()


async def http_rate(url: str, prompts: list[str], tokens: int) -> float:
    """Tokens per second of all streams together, each timed from its first token to its last."""
    rates: list[float] = []
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        name = await model_of(http)

        async def stream(prompt: str) -> None:
            rates.append((await stream_chat(http, name, prompt, tokens, ignore_eos=True)).tokens_per_s)

        async with anyio.create_task_group() as clients:
            for prompt in prompts:
                clients.start_soon(stream, prompt)
    return sum(rates)


def peer_rate(peer: str, work: Work) -> float | None:
    """None: it is not installed, or failed (its last words go to stderr)."""
    command = [sys.executable, "-m", "bench.cpu.peers", peer, msgspec.json.encode(work).decode()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    try:
        return float(done.stdout.split()[-1])
    except (IndexError, ValueError):
        print(f"{peer}: {done.stderr.strip().splitlines()[-1:] or 'no figure'}", file=sys.stderr)
        return None


def main() -> None:
    options = parse()
    streams = [int(count) for count in options.streams.split(",")]
    peers = [peer for peer in options.peers.split(",") if peer]
    found: dict[tuple[str, int], list[float]] = {}
    model = str(resolve(DEFAULT_MODEL).path)
    for turn in range(options.turns):
        for rows in streams:
            prompts = [prompt_of(100 * turn + row, options.prompt_words) for row in range(rows)]
            with penstock_up(options.up) as url:
                anyio.run(http_rate, url, prompts[:1], 8)
                ours = anyio.run(http_rate, url, prompts, options.tokens)
            found.setdefault((OURS, rows), []).append(ours)
            for peer in peers:
                work = Work(model=model, prompts=prompts, tokens=options.tokens, threads=options.threads)
                rate = peer_rate(peer, work)
                if rate is not None:
                    found.setdefault((peer, rows), []).append(rate)
            latest = "  ".join(f"{name} {found[name, rows][-1]:.1f}" for name in (OURS, *peers) if (name, rows) in found)
            print(f"turn {turn + 1}, {rows} streams, tok/s: {latest}", file=sys.stderr, flush=True)
    print(f"{describe()}\n")
    titles = ["streams", *(f"{name}, tok/s" for name in (OURS, *peers)), *(f"ours / {peer}" for peer in peers)]
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    for rows in streams:
        mine = found[OURS, rows]
        cells = [f"{median(found[name, rows]):.1f}" if (name, rows) in found else "-" for name in (OURS, *peers)]
        for peer in peers:
            theirs = found.get((peer, rows), [])
            cells.append(f"{median(a / b for a, b in zip(mine, theirs, strict=False)):.2f}" if theirs else "-")
        print(f"| {rows} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
