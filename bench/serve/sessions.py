"""Sessions that begin together over a few shared prefixes, on a server that runs: `python -m bench.serve.sessions`.

    penstock up --device cuda --model dummy:llama-3.1-8b --load-format dummy --max-running 256 &
    python -m bench.serve.sessions --model llama-3.1-8b --sessions 200 --prefixes 16 --prefix-tokens 4096

Each prefix need be computed only once. The table gives the time to the first token of all sessions, and beside it the time in
which the distinct tokens alone could be computed, at the rate that `--rate` says.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from urllib.parse import urlsplit

import anyio

from bench.common.sse import Answer, HttpStream
from bench.common.table import markdown, number


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.serve.sessions", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True)
    parser.add_argument("--vocab", type=int, default=30_000, help="ids below this are sent")
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--prefixes", type=int, default=16)
    parser.add_argument("--prefix-tokens", type=int, default=4096)
    parser.add_argument("--own-tokens", type=int, default=64, help="tokens behind the prefix that are a session's own")
    parser.add_argument("--output", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--rate", type=float, default=0.0, help="prompt tokens per second that the engine computes alone")
    parser.add_argument("--repeat", type=int, default=3, help="times, with other tokens each")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(argv)


def bodies(options: argparse.Namespace, rng: random.Random) -> list[bytes]:
    """Return a request for each session, in random order."""

    def tokens(count: int) -> list[int]:
        return [rng.randrange(1000, options.vocab) for _ in range(count)]

    prefixes = [tokens(options.prefix_tokens) for _ in range(options.prefixes)]
    fixed = {"model": options.model, "max_tokens": options.output, "min_tokens": options.output, "temperature": 0}
    fixed |= {"stream": True, "stream_options": {"include_usage": True}}
    found = [
        json.dumps(fixed | {"prompt": prefixes[index % options.prefixes] + tokens(options.own_tokens)}).encode()
        for index in range(options.sessions)
    ]
    rng.shuffle(found)
    return found


async def together(host: str, port: int, requests: Sequence[bytes]) -> list[Answer]:
    """Send all at once; return what came."""
    found: list[Answer] = []

    async def one(body: bytes) -> None:
        stream = HttpStream(host, port)
        found.append(await stream.post("/v1/completions", body))
        stream.close()

    async with anyio.create_task_group() as group:
        for body in requests:
            group.start_soon(one, body)
    return found


async def run(options: argparse.Namespace) -> None:
    address = urlsplit(options.url)
    host, port = address.hostname or "127.0.0.1", address.port or 80
    distinct = options.prefixes * options.prefix_tokens + options.sessions * options.own_tokens
    rows: list[Sequence[str]] = []
    for turn in range(options.repeat + 1):
        found = await together(host, port, bodies(options, random.Random(f"{options.seed} {turn}")))
        times = sorted(1e3 * (answer.head_at - answer.sent_at) for answer in found if not answer.error)
        failed = sum(bool(answer.error) for answer in found)
        if not times:
            raise SystemExit(f"every request failed: {found[0].error}")
        if turn:  # the first turn compiles and connects
            alone = number(1e3 * distinct / options.rate if options.rate else None)
            cells = [f"{times[int(share * (len(times) - 1))]:.0f}" for share in (0.5, 0.99, 1.0)]
            rows.append((str(turn), *cells, alone, str(failed)))
    head = ("turn", "TTFT p50, ms", "p99", "last", "distinct tokens alone, ms", "failed")
    print(f"{options.sessions} sessions over {options.prefixes} prefixes of {options.prefix_tokens} tokens")
    print(markdown(head, rows))


def main(argv: Sequence[str] | None = None) -> None:
    anyio.run(run, parse(argv))


if __name__ == "__main__":
    main()
