"""Random histories: whatever happens, in whatever order, no token is wrong and every block comes back.

`PENSTOCK_HISTORIES=5000 pytest tests/chaos/test_random_worlds.py` plays that many; CI plays fewer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import anyio
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from common.cache.retention import KEEP_ALL, Retention
from common.protocol.handles import Role
from services.decode.arrivals import SILENT_S
from tests.chaos.world import World
from tests.fixtures import virtual_time

HISTORIES = int(os.environ.get("PENSTOCK_HISTORIES", "60"))
WORKERS = st.sampled_from(["prefill", "decode", "draft", "kvstore"])
ENGINES = ("prefill", "decode")
MAX_OF_A_ROLE = 3
WINDOWS: list[tuple[tuple[Retention, int], ...]] = [
    (),
    ((Retention(window=9), 20),),
    ((Retention(chunk=12), 24), (Retention(window=6), 64)),
]
"""Cache groups beside the first one: what each keeps, and its blocks."""


class RandomWorld(RuleBasedStateMachine):
    world: World
    stop: anyio.Event
    main: asyncio.Future[None]

    def __init__(self) -> None:
        super().__init__()
        self.num_losses = 0
        self.closing = contextlib.ExitStack()
        self.shm_dir = Path(self.closing.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        self.runner = self.closing.enter_context(virtual_time.runner())

    def play(self, act: Coroutine[Any, Any, None]) -> None:
        self.runner.run(act)

    @initialize(
        num_blocks=st.sampled_from([24, 48, 256]),
        seed=st.integers(0, 99),
        run_ahead=st.sampled_from([1, 2]),
        windows=st.sampled_from(WINDOWS),
        keeps=st.sampled_from([KEEP_ALL, KEEP_ALL, Retention(window=11)]),
        max_running=st.sampled_from([2, 8]),
        objective_ms=st.sampled_from([0.0, 0.01, 100.0]),
        staged=st.booleans(),
        recompute=st.sampled_from([0, 0, 5, 20]),
    )
    def begin(self, **settings: Any) -> None:
        async def act() -> None:
            started: asyncio.Future[World] = asyncio.get_running_loop().create_future()
            self.stop = anyio.Event()
            self.main = asyncio.ensure_future(self.live(started, settings))
            self.world = await started

        self.play(act())

    async def live(self, started: asyncio.Future[World], settings: dict[str, Any]) -> None:
        async with anyio.create_task_group() as task_group:
            world = World(task_group, self.shm_dir, **settings)
            for role in ("gateway", "prefill", "decode", "draft", "kvstore"):
                await world.start(role)
            await anyio.sleep(2.5)
            started.set_result(world)
            await self.stop.wait()
            task_group.cancel_scope.cancel()

    # -- what happens

    @rule(
        length=st.integers(1, 80),
        start=st.integers(0, 3),
        max_tokens=st.integers(1, 60),
        cancel_after_s=st.one_of(st.none(), st.floats(0, 2)),
        deadline_s=st.sampled_from([600.0, 600.0, 0.3, 1.5]),
    )
    def request(self, length: int, start: int, max_tokens: int, cancel_after_s: float | None, deadline_s: float) -> None:
        prompt = [3 + (start + 7 * i) % 900 for i in range(length)]

        async def act() -> None:
            self.world.submit(prompt, max_tokens=max_tokens, cancel_after_s=cancel_after_s, deadline_s=deadline_s)

        self.play(act())

    @rule(seconds=st.sampled_from([0.01, 0.05, 0.2, 0.7, 2.0]))
    def time_passes(self, seconds: float) -> None:
        self.play(anyio.sleep(seconds))

    @rule(role=WORKERS)
    def a_worker_joins(self, role: Role) -> None:
        if len(self.world.alive(role)) < MAX_OF_A_ROLE:
            self.play(self.start(role))

    async def start(self, role: Role) -> None:
        await self.world.start(role)

    @rule(role=WORKERS, which=st.integers(0, 9))
    def a_worker_is_killed(self, role: Role, which: int) -> None:
        alive = self.world.alive(role)
        if alive:
            self.num_losses += role in ENGINES
            self.play(self.world.kill(alive[which % len(alive)]))

    @rule(role=WORKERS, which=st.integers(0, 9))
    def a_worker_drains(self, role: Role, which: int) -> None:
        alive = self.world.alive(role)
        if len(alive) > 1:
            self.play(self.world.terminate(alive[which % len(alive)]))

    @rule(role=WORKERS, which=st.integers(0, 9))
    def a_worker_was_stopped_for_long(self, role: Role, which: int) -> None:
        """SIGSTOP and SIGCONT: its own clock says that it missed its heartbeats."""
        alive = self.world.alive(role)
        if alive:
            self.num_losses += role in ENGINES
            self.world.processes[alive[which % len(alive)]].actor._last_beat -= 10

    @rule(seconds=st.sampled_from([0.05, 0.5, 3.0]))
    def the_bus_restarts(self, seconds: float) -> None:
        async def act() -> None:
            self.world.broker.stop()
            await anyio.sleep(seconds)
            self.world.broker.start()

        self.play(act())

    @rule()
    def the_gateway_was_stopped_for_long(self) -> None:
        self.world.gateway._last_beat -= 10

    @rule(role=WORKERS, which=st.integers(0, 9), seconds=st.sampled_from([0.1, 1.0, 4.0]))
    def a_worker_is_cut_off(self, role: Role, which: int, seconds: float) -> None:
        alive = self.world.alive(role)
        if not alive:
            return
        self.num_losses += role in ENGINES
        bus = self.world.processes[alive[which % len(alive)]].bus

        async def act() -> None:
            self.world.broker.cut(bus)
            await anyio.sleep(seconds)
            self.world.broker.heal(bus)

        self.play(act())

    @rule(every=st.integers(2, 12), seconds=st.sampled_from([0.3, 1.5]))
    def messages_are_lost(self, every: int, seconds: float) -> None:
        async def act() -> None:
            undo = self.world.broker.drop(lambda message: self.world.dice.randrange(every) == 0)
            await anyio.sleep(seconds)
            undo()

        self.play(act())

    # -- what holds

    @invariant()
    def the_books_balance(self) -> None:
        if hasattr(self, "world"):
            self.world.check_pools()
            self.world.check_outcomes()

    def teardown(self) -> None:
        try:
            if hasattr(self, "world"):
                self.play(self.settle())
                assert not list(self.shm_dir.iterdir()), "a segment was left behind"
        finally:
            self.closing.close()

    async def settle(self) -> None:
        """Heal the world; then everyone gets an answer, and everything is given back."""
        for role in ("prefill", "decode"):
            if not self.world.alive(role):
                await self.world.start(role)
        await self.world.all_ended()
        await self.world.clean(within_s=SILENT_S + 12)  # whose KvWithdrawn was lost, a stream ends by its silence
        self.world.check_outcomes()
        allowed = {"deadline_exceeded", "no_workers", "cancelled"}
        if self.num_losses >= 3:  # a request may have been on three of them, without a token
            allowed.add("workers_died")
        for outcome in self.world.outcomes:
            assert outcome.error is None or outcome.error.code in allowed, outcome
        await self.world.end()
        self.stop.set()
        await self.main


TestRandomWorlds = RandomWorld.TestCase
TestRandomWorlds.settings = settings(
    max_examples=HISTORIES,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
