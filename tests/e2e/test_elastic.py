"""Pools grow and shrink by hand under 64 concurrent streams, and no request fails or gets another token for it."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from common.models.source import ModelFiles
from common.protocol.handles import Role
from tests.chaos.site import SIMULATED_ENGINE, Site, simulated_jobs
from tests.e2e.stack import Stack
from tests.fixtures.nats import LocalNatsServer

log = logging.getLogger("elastic")

STREAMS = 64
TAKES_LOAD_WITHIN_S = 2.0
"""After a new worker has said that it is ready."""


@asynccontextmanager
async def started(server: LocalNatsServer, folder: Path, files: ModelFiles, *roles: Role) -> AsyncIterator[Site]:
    """A gateway, a kvstore and workers of these roles, all ready, with simulated engines."""
    async with Stack(server.url, folder, engine_flags=SIMULATED_ENGINE) as stack:
        for role in ("gateway", "kvstore", *roles):
            await stack.start(role)
        await stack.ready()
        yield Site(stack, server, simulated_jobs(files), clients=STREAMS)


@pytest.mark.slow
async def test_new_workers_take_load_and_leaving_ones_drain_under_64_streams(
    tmp_path: Path, nats_server_factory: Callable[[], LocalNatsServer], smollm2: ModelFiles
) -> None:
    async with started(nats_server_factory(), tmp_path, smollm2, "draft", "prefill", "decode") as site:
        stack = site.stack

        async def join(role: Role) -> str:
            name = await stack.start(role)
            await site.until(lambda: stack.state(name) == "ready", within_s=60)

            def loaded() -> bool:  # a prompt is computed in less than a heartbeat: its speed stays to be seen
                presence = stack.presence(name)
                return presence.running + presence.waiting > 0 or presence.prefill_tokens_per_s > 0

            log.info("%s took load after %.2f s", name, await site.until(loaded, TAKES_LOAD_WITHIN_S))
            return name

        async with site.crowd() as crowd:
            await crowd.streaming()
            assert stack.presence("decode-0").running + stack.presence("decode-0").waiting > STREAMS / 2
            decode = await join("decode")
            prefill = await join("prefill")
            share_s = await site.until(lambda: stack.presence(decode).running > STREAMS / 4, within_s=20)
            log.info("%s runs a fair share after %.2f s", decode, share_s)
            for leaving in ("decode-0", "prefill-0"):
                began = time.monotonic()
                stack.send_signal(leaving, signal.SIGTERM)
                assert await stack.ended(leaving, within_s=60) == 0
                log.info("%s drained in %.2f s", leaving, time.monotonic() - began)
            await crowd.turnover()
            await site.until(lambda: stack.presence(decode).running > STREAMS / 2, within_s=10)
            assert stack.presence(prefill).prefill_tokens_per_s > 0
        crowd.check()
        await site.clean()


@pytest.mark.slow
async def test_a_prefill_worker_that_was_stopped_for_a_while_computes_prompts_again(
    tmp_path: Path, nats_server_factory: Callable[[], LocalNatsServer], smollm2: ModelFiles
) -> None:
    """The step that it was stopped in took seconds, which says nothing of the next."""
    async with started(nats_server_factory(), tmp_path, smollm2, "prefill", "prefill", "decode") as site:
        stack = site.stack
        stopped, other = "prefill-1", "prefill-0"
        async with site.crowd() as crowd:
            await crowd.streaming()
            epoch = stack.presence(stopped).worker.epoch
            stack.send_signal(stopped, signal.SIGSTOP)
            await anyio.sleep(6)
            stack.send_signal(stopped, signal.SIGCONT)

            def awake() -> bool:
                return stack.state(stopped) == "ready" and stack.presence(stopped).worker.epoch > epoch

            await site.until(awake, within_s=10)
            before = {name: stack.presence(name).steps for name in (stopped, other)}
            await anyio.sleep(8)
            steps = {name: stack.presence(name).steps - count for name, count in before.items()}
            log.info("steps since: %s; tokens a second %.0f", steps, stack.presence(stopped).prefill_tokens_per_s)
            assert steps[stopped] > 0.3 * steps[other]
        crowd.check()
        await site.clean()
