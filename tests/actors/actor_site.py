"""What the tests of `common.runtime.actor` share: a worker and a gateway on the memory bus."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from typing import ClassVar

import anyio

from common.protocol.handles import Role
from common.protocol.messages import Accepted, HandoffFailed, Message, Presence, ReleaseLease
from common.runtime.actor import Actor
from common.runtime.settings import ServiceConfig
from common.testing.memory_bus import MemoryBroker, MemoryBus
from tests.waiting import until

HEARTBEAT_S = 0.02
DEAD_AFTER_S = 0.3
CONFIG = ServiceConfig(heartbeat_s=HEARTBEAT_S, dead_after_s=DEAD_AFTER_S, drain_timeout_s=1.0)


class Clock:
    """Real time plus what a test adds."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


class Worker(Actor):
    """Answers ReleaseLease with Accepted, fails on HandoffFailed, keeps what it gets."""

    role: ClassVar[Role] = "decode"

    def __init__(self, bus: MemoryBus, config: ServiceConfig = CONFIG) -> None:
        self.bus_double = bus
        self.clock_double = Clock()
        super().__init__(bus=bus, config=config, clock=self.clock_double)
        self.got: list[Message] = []
        self.lost: list[Presence] = []
        self.connection: list[bool] = []
        self.num_fenced = 0
        self.num_closed = 0
        self.num_held = 0
        self.loading = anyio.Event()
        self.loading.set()

    async def start(self) -> None:
        await self.loading.wait()

    def handle(self, message: Message, reply: str) -> None:
        self.got.append(message)
        match message:
            case ReleaseLease():
                self.answer(reply, Accepted(worker=self.ref))
            case HandoffFailed():
                raise RuntimeError("a mistake in this handler")
            case _:
                pass

    def peer_lost(self, peer: Presence) -> None:
        self.lost.append(peer)

    def fenced(self) -> None:
        self.num_fenced += 1

    def connection_changed(self, connected: bool) -> None:
        self.connection.append(connected)

    async def drain(self) -> None:
        await until(lambda: self.num_held == 0, 60)

    def close(self) -> None:
        self.num_closed += 1


class Gateway(Worker):
    role = "gateway"


@contextlib.asynccontextmanager
async def running(*actors: Actor) -> AsyncIterator[None]:
    async with anyio.create_task_group() as group:
        for actor in actors:
            await group.start(actor.run)
        yield
        for actor in actors:
            await actor.stop()
        group.cancel_scope.cancel()


def pair() -> tuple[MemoryBroker, Gateway, Worker]:
    broker = MemoryBroker()
    return broker, Gateway(broker.connect("gateway")), Worker(broker.connect("worker"))
