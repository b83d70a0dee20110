"""Engines faster than the gateway: it takes what it can, nothing piles up, nothing is computed twice. Real processes."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import psutil
import pytest
import pytest_asyncio

from common.models.source import ModelFiles
from tests.chaos.site import simulated_jobs
from tests.e2e.stack import Reply, Stack

log = logging.getLogger("chaos")

STREAMS, TOKENS = 300, 400
UNPACED = ("--engine", "simulated", "--time-scale", "0", "--kv-cache-mb", "8", "--max-running", "512")


@pytest_asyncio.fixture
async def stack(nats_server: str, tmp_path: Path) -> AsyncIterator[Stack]:
    async with Stack(nats_server, tmp_path, engine_flags=UNPACED) as stack:
        await stack.start("gateway")
        await stack.start("decode")
        await stack.ready()
        yield stack


async def metric(stack: Stack, worker: str, name: str) -> float:
    page = (await stack.client.get(f"{stack.url(worker)}/metrics")).text
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith((f"{name} ", f"{name}{{")))


@pytest.mark.slow
async def test_a_gateway_behind_its_engines_keeps_its_memory_and_computes_nothing_twice(
    stack: Stack, smollm2: ModelFiles
) -> None:
    jobs = simulated_jobs(smollm2, tokens=range(TOKENS, TOKENS + 1))
    gateway = psutil.Process(stack.processes["gateway-0"].pid)
    before_mb, most_mb = gateway.memory_info().rss / 1e6, 0.0
    asked = [(next(jobs), Reply()) for _ in range(STREAMS)]
    for job, _ in asked:
        job.body["prompt"] = job.body["prompt"][:64]
    began = time.monotonic()
    async with anyio.create_task_group() as watch:

        async def look() -> None:
            nonlocal most_mb
            while True:
                most_mb = max(most_mb, gateway.memory_info().rss / 1e6)
                await anyio.sleep(0.1)

        watch.start_soon(look)
        async with anyio.create_task_group() as group:
            for job, reply in asked:
                group.start_soon(lambda job=job, reply=reply: stack.complete(reply=reply, **job.body))
        watch.cancel_scope.cancel()
    took_s = time.monotonic() - began
    assert [reply.error for _, reply in asked] == [None] * STREAMS
    assert {reply.finish for _, reply in asked} == {"length"}
    computed = await metric(stack, "decode-0", "penstock_engine_generation_tokens_total")
    fetched = await metric(stack, "gateway-0", "penstock_frames_fetched_total")
    resumes = await metric(stack, "gateway-0", "penstock_request_resumes_total")
    log.info(
        "%.0f tokens/s, computed %.0f for %d, fetched %.0f, resumed %.0f, %.0f to %.0f MB",
        STREAMS * TOKENS / took_s, computed, STREAMS * TOKENS, fetched, resumes, before_mb, most_mb,
    )  # fmt: skip
    assert computed <= 1.01 * STREAMS * TOKENS
    assert resumes == 0 and fetched <= STREAMS / 100
    assert most_mb - before_mb < 60

    began = time.monotonic()  # and then it is as it was
    reply = await stack.complete([5, 6, 7], max_tokens=4, ignore_eos=True)
    assert reply.finish == "length" and time.monotonic() - began < 5
    await stack.clean()
