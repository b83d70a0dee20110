"""Real processes die, stop and lose the bus while clients stream: no client sees it, but for a pause of seconds."""

from __future__ import annotations

import signal

import anyio
import pytest

from tests.chaos.site import GAP_LIMIT_S, Site

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("role", ["prefill", "decode", "draft", "kvstore"])
async def test_a_killed_worker_changes_no_stream(site: Site, role: str) -> None:
    async with site.crowd() as crowd:
        victim = await site.busy("prefill") if role == "prefill" else ""
        if not victim:
            await crowd.streaming()
            victim = await site.busy(role) if role == "decode" else site.alive(role)[0]
        site.stack.kill(victim)
        await crowd.turnover()
    assert crowd.check() < GAP_LIMIT_S
    await site.clean()


async def test_a_restarted_bus_neither_loses_nor_repeats_anything(site: Site) -> None:
    async with site.crowd() as crowd:
        for away_s in (0.0, 1.0):
            await crowd.streaming()
            await anyio.to_thread.run_sync(site.server.restart, away_s)
            await crowd.turnover()
    assert crowd.check() < GAP_LIMIT_S
    await site.clean()


async def test_stopped_workers_lose_their_work_and_are_fenced_when_they_wake(site: Site) -> None:
    async with site.crowd() as crowd:
        await crowd.streaming()
        victims = [await site.busy("decode"), site.alive("prefill")[0]]
        epochs = [site.stack.presence(victim).worker.epoch for victim in victims]
        for victim in victims:
            site.stack.send_signal(victim, signal.SIGSTOP)
        await anyio.sleep(10)
        moved = len(crowd.seen)
        for victim in victims:
            site.stack.send_signal(victim, signal.SIGCONT)
        for victim, epoch in zip(victims, epochs, strict=True):
            await site.until(
                lambda victim=victim, epoch=epoch: (
                    site.stack.state(victim) == "ready" and site.stack.presence(victim).worker.epoch > epoch
                ),
                within_s=5,
            )
            assert "fenced" in site.stack.log(victim)
        await crowd.turnover()
    assert crowd.check() < GAP_LIMIT_S
    assert moved > site.clients, "work went on while they were stopped"
    await site.clean()
