"""Engines that hang, raise or crash on what a client sent, and clocks that are off: real processes, broken by `inject`.

Whatever happens to the request that meets the fault, the streams beside it end with the text of an undisturbed run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
import pytest_asyncio

from common.models.source import ModelFiles
from common.protocol.handles import Role
from tests.chaos.site import FASTER_ENGINE, Site, simulated_jobs
from tests.e2e.stack import ROOT, Reply, Stack
from tests.fixtures.nats import LocalNatsServer
from tests.fixtures.slow import some_slow

log = logging.getLogger("chaos")

POISON = 0
"""A token that is in no other prompt, a canary's included, and that the simulated engine never samples."""
POISONED: dict[str, Any] = {"prompt": [5, 6, 7, POISON], "max_tokens": 8, "ignore_eos": True}
CLIENTS = 8
STEP_TIMEOUT_S = 2
STREAM_TOKENS = range(60, 120)
LONG_STREAM_TOKENS = range(120, 240)


def chaos(faults: str) -> dict[str, str]:
    """What breaks a process."""
    return {"CHAOS": faults, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests/chaos/inject"), str(ROOT)])}


@pytest_asyncio.fixture
async def site(tmp_path: Path, smollm2: ModelFiles) -> AsyncIterator[Site]:
    server = LocalNatsServer(tmp_path / "nats")
    server.start()
    flags = (*FASTER_ENGINE, "--step-timeout-s", str(STEP_TIMEOUT_S))
    try:
        async with Stack(server.url, tmp_path, engine_flags=flags) as stack:
            yield Site(stack, server, simulated_jobs(smollm2, tokens=STREAM_TOKENS), clients=CLIENTS)
    finally:
        server.stop()


async def start(site: Site, *, decode: dict[str, str], prefill: dict[str, str] | None = None) -> None:
    """A gateway and two decode workers that are broken alike; and perhaps a prefill worker."""
    await site.stack.start("gateway")
    for _ in range(2):
        await site.stack.start("decode", environment=decode)
    if prefill is not None:
        await site.stack.start("prefill", environment=prefill)
    await site.stack.ready()


def ended(site: Site) -> list[str]:
    """Return the processes that run no more."""
    return [name for name, process in site.stack.processes.items() if process.poll() is not None]


async def supervise(site: Site, environment: dict[str, str], deaths: list[str]) -> None:
    """Start dead decode workers again, under their names."""
    role: Role = "decode"
    while True:
        await anyio.sleep(0.1)
        for name, process in list(site.stack.processes.items()):
            if name.startswith(role) and process.poll() is not None:
                deaths.append(name)
                site.stack.processes.pop(name)
                await site.stack.start(role, name=name, environment=environment)


async def poll_health(site: Site, names: tuple[str, ...], answers: list[int]) -> None:
    while True:
        for name in names:
            with contextlib.suppress(httpx.HTTPError, KeyError):
                answers.append((await site.stack.client.get(f"{site.stack.url(name)}/health", timeout=5)).status_code)
        await anyio.sleep(0.02)


async def test_an_engine_that_hangs_once_costs_its_streams_a_pause(site: Site, tmp_path: Path) -> None:
    await start(site, decode=chaos(f"hang={POISON} once={tmp_path / 'hung'}"))
    async with site.crowd() as crowd:
        await crowd.streaming()
        began, answers, reply = time.monotonic(), [], Reply()
        async with anyio.create_task_group() as group:
            group.start_soon(poll_health, site, ("decode-0", "decode-1"), answers)
            await site.stack.complete(reply=reply, **POISONED)
            group.cancel_scope.cancel()
        took_s = time.monotonic() - began
        assert 503 in answers
        (hung,) = [name for name in ("decode-0", "decode-1") if "chaos: hang" in site.stack.log(name)]
        assert await site.stack.ended(hung) == 1, "a supervisor starts it again"
        await crowd.turnover()
    assert (reply.error, reply.finish) == (None, "length")
    longest_gap_s = crowd.check()
    log.info("the request took %.1f s, the longest silence was %.1f s", took_s, longest_gap_s)
    assert max(took_s, longest_gap_s) < STEP_TIMEOUT_S + 4
    assert "engine_hangs" in site.stack.log(hung)
    await site.clean()


async def test_a_hung_engine_shows_and_does_not_hold_up_sigterm(site: Site) -> None:
    await site.stack.start("gateway")
    broken = chaos(f"hang={POISON}")
    flags = ("--step-timeout-s", "600", "--drain-timeout-s", "3")
    await site.stack.start("decode", *flags, environment=broken)
    await site.stack.ready()
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: site.stack.complete(**POISONED))
        await site.until(lambda: "chaos: hang" in site.stack.log("decode-0"), 10)
        await site.until(lambda: site.stack.presence("decode-0").step_age_ms > 1500, 5)
        began = time.monotonic()
        site.stack.send_signal("decode-0", signal.SIGTERM)
        await site.stack.ended("decode-0", within_s=10)
        log.info("SIGTERM took %.1f s", time.monotonic() - began)
        assert time.monotonic() - began < 3 + 2
        group.cancel_scope.cancel()


async def test_a_request_that_ends_processes_ends_three_at_most(site: Site) -> None:
    broken, deaths = chaos(f"crash={POISON}"), []
    await start(site, decode=broken)
    async with site.crowd() as crowd, anyio.create_task_group() as group:
        group.start_soon(supervise, site, broken, deaths)
        await crowd.streaming()
        began = time.monotonic()
        reply = await site.stack.complete(**POISONED)
        log.info("ended after %.1f s and %d deaths", time.monotonic() - began, len(deaths))
        assert reply.error is not None and reply.error["code"] == "workers_died"
        await crowd.turnover()
        await anyio.sleep(1)
        group.cancel_scope.cancel()
    assert 2 <= len(deaths) <= 3, deaths
    assert crowd.check() < 10


async def test_a_step_that_raises_ends_the_request_that_it_raises_for(site: Site) -> None:
    await start(site, decode=chaos(f"raise={POISON}"))
    async with site.crowd() as crowd:
        await crowd.streaming()
        replies = [Reply() for _ in range(4)]
        async with anyio.create_task_group() as group:
            for reply in replies:
                group.start_soon(lambda reply=reply: site.stack.complete(reply=reply, **POISONED))
        await crowd.turnover()
    assert [reply.error and reply.error["code"] for reply in replies] == ["internal_error"] * 4
    assert crowd.check() < 2
    assert ended(site) == []
    await site.clean()


@pytest.mark.parametrize("with_prefill", some_slow([False, True], quick=[True]))
async def test_bad_requests_in_a_row_end_no_idle_worker(site: Site, with_prefill: bool) -> None:
    broken = chaos(f"raise={POISON}")
    await start(site, decode=broken, prefill=broken if with_prefill else None)
    for _ in range(4):
        reply = await site.stack.complete(**POISONED)
        assert reply.error is not None and reply.error["code"] == "internal_error"
    async with site.crowd() as crowd:
        await crowd.streaming()
    assert crowd.check() < 5
    assert ended(site) == []
    await site.clean()


async def test_a_step_that_raises_once_ends_nothing(site: Site, tmp_path: Path) -> None:
    trouble = tmp_path / "trouble"
    await start(site, decode=chaos(f"raise=any when={trouble} once={tmp_path / 'raised'}"))
    async with site.crowd() as crowd:
        await crowd.streaming()
        trouble.touch()
        await crowd.turnover()
    assert "chaos: raise" in site.stack.log("decode-0") + site.stack.log("decode-1")
    crowd.check()
    await site.clean()


@pytest.mark.parametrize(("decode_s", "prefill_s"), some_slow([(3600, -3600), (-30, 30)], quick=[(3600, -3600)]))
@pytest.mark.slow
async def test_wall_clocks_may_be_off(site: Site, decode_s: int, prefill_s: int) -> None:
    await start(site, decode=chaos(f"clock={decode_s}"), prefill=chaos(f"clock={prefill_s}"))
    async with site.crowd(timeout=20) as crowd:
        await crowd.streaming()
        await crowd.turnover()
        await crowd.turnover()
    assert len(crowd.seen) >= 2 * CLIENTS
    crowd.check()
    await site.clean()


@pytest.mark.slow
async def test_a_gateway_that_was_stopped_goes_on_with_every_stream(site: Site, smollm2: ModelFiles) -> None:
    site.stack.engine_flags += ("--time-scale", "1")
    site.jobs = simulated_jobs(smollm2, tokens=LONG_STREAM_TOKENS)  # decode workers send tokens while it is stopped
    await start(site, decode={})
    async with site.crowd(32) as crowd:
        await crowd.streaming()
        site.stack.send_signal("gateway-0", signal.SIGSTOP)
        await anyio.sleep(6)
        site.stack.send_signal("gateway-0", signal.SIGCONT)
        crowd.stopped = True
    assert len(crowd.seen) >= 32
    crowd.check()
    await site.clean(within_s=10)
