"""A gateway that is killed is followed by one that routes as well: it asks workers what their prefix caches hold."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import anyio

from tests.e2e.stack import Stack
from tests.fixtures.nats import LocalNatsServer

SIMULATED = ("--engine", "simulated", "--time-scale", "0", "--kv-cache-mb", "4")
PROMPTS = [[1000 + 300 * number + index % 250 for index in range(400)] for number in range(8)]
AS_WELL_WITHIN_S = 5.0
ELSEWHERE = 2
"""Prompts that may go to another of three workers than the one that knows them, which seemed late for a moment."""


async def metric(stack: Stack, name: str, metric: str) -> float:
    page = (await stack.client.get(f"{stack.url(name)}/metrics")).text
    return sum(float(value) for value in re.findall(rf"^penstock_{metric}(?:{{.*}})? ([0-9.e+]+)$", page, re.MULTILINE))


async def cached(stack: Stack, gateway: str) -> list[int]:
    """Ask for each prompt with an ending of its own; return the tokens that did not have to be computed."""
    found: list[int] = []
    for number, prompt in enumerate(PROMPTS):
        tail = [20_000 + number * 100 + len(gateway) * 10 + index for index in range(5)]
        reply = await stack.complete([*prompt, *tail, time.monotonic_ns() % 20_000], gateway=gateway, max_tokens=4)
        assert reply.error is None and reply.usage is not None
        found.append((reply.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))
    return found


async def test_a_gateway_after_kill_9_routes_as_well_as_the_one_before(
    tmp_path: Path, nats_server_factory: Callable[[], LocalNatsServer]
) -> None:
    server = nats_server_factory()
    async with Stack(server.url, tmp_path, engine_flags=SIMULATED) as stack:
        first = await stack.start("gateway", "--direct-max-tokens", "-1")
        for role in ("prefill", "prefill", "prefill", "decode"):
            await stack.start(role)
        await stack.ready()
        assert max(await cached(stack, first)) < 16
        await anyio.sleep(0.2)  # workers tell of blocks a little later
        assert sorted(await cached(stack, first))[ELSEWHERE] >= 384
        await anyio.sleep(0.2)
        blocks = await metric(stack, first, "kv_index_blocks")
        assert blocks >= 8 * 25 and await metric(stack, first, "kv_event_gaps_total") == 0
        stack.kill(first)
        second = await stack.start("gateway", "--direct-max-tokens", "-1")
        await stack.ready(second)
        began = time.monotonic()
        while await metric(stack, second, "kv_index_workers") < 4:
            assert time.monotonic() - began < AS_WELL_WITHIN_S
            await anyio.sleep(0.05)
        assert await metric(stack, second, "kv_index_blocks") >= blocks
        assert sorted(await cached(stack, second))[ELSEWHERE] >= 384
