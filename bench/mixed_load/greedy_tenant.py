"""The greedy tenant, a process of its own so that reading its answers does not delay the other's: `GreedyOptions` as JSON.

It keeps `at_once` streams open until it is ended, and prints how many requests it has had answered, a line each second.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence

import anyio
import msgspec

from bench.common import request
from bench.common.sse import HttpStream
from bench.mixed_load.asks import words

BACK_OFF_S = 0.2


class GreedyOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`prompt`, `answer`: tokens of each request. The tenant's key comes from the first line of stdin."""

    port: int
    model: str
    at_once: int
    prompt: int
    answer: int
    seed: int


def body(options: GreedyOptions, rng: random.Random) -> bytes:
    """Return a request whose prompt nobody sent before."""
    return msgspec.json.encode(
        {
            "model": options.model,
            "prompt": words(rng, options.prompt),
            "max_tokens": options.answer,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


async def ask_for_ever(options: GreedyOptions, key: str) -> None:
    """Keep `at_once` requests with the server."""
    answered = 0

    async def stream(number: int) -> None:
        nonlocal answered
        rng = random.Random(f"{options.seed} {number}")
        connection = HttpStream("127.0.0.1", options.port, key=key)
        while True:
            answer = await connection.post("/v1/completions", body(options, rng))
            if answer.error:
                await anyio.sleep(BACK_OFF_S)
            else:
                answered += 1

    async with anyio.create_task_group() as streams:
        for number in range(options.at_once):
            streams.start_soon(stream, number)
        while True:
            await anyio.sleep(1)
            print(answered, flush=True)


def main(argv: Sequence[str]) -> None:
    _, options = request.request(GreedyOptions, "bench.mixed_load.greedy_tenant", __doc__, argv)
    anyio.run(ask_for_ever, options, sys.stdin.readline().strip())


if __name__ == "__main__":
    main(sys.argv[1:])
