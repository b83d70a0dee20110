"""Actors in real processes over a real nats-server: killed, stopped, and with the server restarted under them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio

from common.protocol.messages import Presence
from common.runtime import nats_bus
from common.runtime.actor import Actor
from common.runtime.settings import ServiceConfig
from tests.fixtures.nats import LocalNatsServer
from tests.waiting import until

WORKER = """
from common.runtime.actor import Actor
from common.runtime.service import main
from common.runtime.settings import ServiceConfig


class Worker(Actor):
    role = "decode"


main(ServiceConfig, lambda bus, config: Worker(bus=bus, config=config), section="decode")
"""


class Watcher(Actor):
    role = "gateway"

    def __init__(self, bus: nats_bus.NatsBus, config: ServiceConfig) -> None:
        super().__init__(bus=bus, config=config)
        self.lost: list[Presence] = []

    def peer_lost(self, peer: Presence) -> None:
        self.lost.append(peer)

    def known(self) -> list[Presence]:
        return self.registry.alive("decode", self.clock())


def start_worker(url: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", WORKER, f"--nats-url={url}", "--worker-id=w1", "--http-port=-1"])


@asynccontextmanager
async def watching(url: str) -> AsyncIterator[tuple[Watcher, subprocess.Popen[bytes]]]:
    """A watcher here and a worker in a process of its own that it knows."""
    bus = await nats_bus.connect(url, name="watcher")
    watcher = Watcher(bus, ServiceConfig(nats_url=url))
    process = start_worker(url)
    try:
        async with anyio.create_task_group() as group:
            await group.start(watcher.run)
            await until(lambda: any(peer.state == "ready" for peer in watcher.known()), 20)
            yield watcher, process
            await watcher.stop()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)
        process.kill()
        process.wait()
        await bus.close()


async def test_a_process_killed_with_sigkill_is_noticed_within_a_second(nats_server_factory: Callable[[], LocalNatsServer]):
    async with watching(nats_server_factory().url) as (watcher, process):
        process.kill()
        began = time.monotonic()
        await until(lambda: len(watcher.lost) == 1, 5)
        assert time.monotonic() - began < 1.2, "the probe, not the two seconds of silence"
        assert watcher.known() == []


async def test_a_process_stopped_for_long_is_lost_and_returns_as_a_new_epoch(
    nats_server_factory: Callable[[], LocalNatsServer],
):
    async with watching(nats_server_factory().url) as (watcher, process):
        old = watcher.known()[0].worker
        process.send_signal(signal.SIGSTOP)
        await until(lambda: [peer.worker for peer in watcher.lost] == [old], 5)
        process.send_signal(signal.SIGCONT)
        await until(lambda: any(peer.worker.epoch > old.epoch for peer in watcher.known()), 5)
        assert watcher.known()[0].worker.id == old.id


async def test_a_restarted_nats_server_loses_no_process(nats_server_factory: Callable[[], LocalNatsServer]):
    server = nats_server_factory()
    async with watching(server.url) as (watcher, _):
        worker = watcher.known()[0].worker
        server.stop()
        await anyio.sleep(3.0)
        server.start()
        await until(lambda: watcher.bus.connected, 2)
        await anyio.sleep(3.0)
        assert watcher.lost == [] and [peer.worker for peer in watcher.known()] == [worker]
