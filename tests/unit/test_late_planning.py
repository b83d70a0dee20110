"""The wait before the next step is planned follows the margin that was left, and never makes an engine wait for long."""

from __future__ import annotations

import asyncio
import time

import anyio

from common.engine.plan import StepPlan, StepResult, StepRow
from common.protocol.messages import SamplingParams
from common.worker.late_planning import MARGIN_S, LatePlanning
from common.worker.stepping import EngineThreads, StepLoop
from common.worker.watchdog import StepWatch
from tests.unit.test_stepping import LongSteps

STEP_S = 0.02


def test_the_wait_settles_where_the_margin_is_left() -> None:
    late, step_s, work_s = LatePlanning(), 6e-3, 1e-3
    for _ in range(60):
        late.ended(step_s - max(late.wait_s, 0.0) - work_s)
    assert abs(step_s - late.wait_s - work_s - MARGIN_S) < 1e-4


def test_a_step_that_is_shorter_than_the_wait_ends_it_at_once() -> None:
    late = LatePlanning()
    for _ in range(400):
        late.ended(200e-3 - late.wait_s)
    late.missed(4e-3)
    assert 0 < late.wait_s < 4e-3


class Endless(LongSteps):
    """A scheduler and an engine whose steps take `STEP_S` each, one behind the other, without an end."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0
        self.free_at = 0.0
        self.planned: dict[int, float] = {}
        self.begun: dict[int, float] = {}
        self.ends: dict[int, float] = {}

    def plan(self, now: float, only: object = None) -> StepPlan | None:
        self.step += 1
        self.planned[self.step] = time.monotonic()
        return StepPlan(self.step, [StepRow([1], 0, [0], 1, SamplingParams(), 1)])

    def submit(self, plan: StepPlan) -> Running:  # type: ignore[override]
        self.begun[plan.step] = max(time.monotonic(), self.free_at)
        self.free_at = self.ends[plan.step] = self.begun[plan.step] + STEP_S
        return Running(self.free_at)


class Running:
    def __init__(self, ends_at: float) -> None:
        self.ends_at = ends_at

    def result(self) -> StepResult:
        time.sleep(max(0.0, self.ends_at - time.monotonic()))
        return StepResult([])


async def test_steps_are_planned_late_and_the_engine_hardly_waits() -> None:
    """Also after a while in which they were planned at once, which says nothing of how long to wait."""
    engine, threads = Endless(), EngineThreads()
    watch = StepWatch(floor_s=5.0, compile_s=5.0)
    loop = StepLoop(runner=engine, scheduler=engine, steps=engine, threads=threads, watch=watch, clock=time.monotonic)
    loop.plans_late = lambda: not 20 <= engine.step < 40
    running = asyncio.ensure_future(loop.run())
    with anyio.fail_after(30):
        while engine.step < 80:
            await anyio.sleep(0.01)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert threads.close()
    last = [step for step in engine.ends if 60 <= step < 80]
    ahead = sorted(engine.ends[step - 1] - engine.planned[step] for step in last)
    gaps = sorted(engine.begun[step] - engine.ends[step - 1] for step in last)
    assert ahead[len(ahead) // 2] < STEP_S / 2
    assert gaps[len(gaps) // 2] < STEP_S / 10
