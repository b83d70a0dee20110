"""The loop that steps an engine: plan, execute, commit, for ever; and what happens when a step fails.

While a step runs, messages are handled, the step before is reported and, with a runner that runs ahead, the next one is planned
and submitted. What a message changes meanwhile, a cancel above all, the scheduler defers where a running step depends on it.

A step that raises says nothing about who is to blame. Its sequences go back to where the last good step left them and are run
again in halves, until the ones that fail alone are found; only those end. If all of them fail, the step of one of them is run
once more as a probe, with `PROBE_TOKEN` in place of its tokens and default sampling parameters except for its temperature. If
the probe fails, too, the engine is to blame, and is given up.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

import anyio
from msgspec import structs

from common.engine.plan import Runner, RunnerLost, StepPlan, StepResult, StepRow
from common.engine.sequence import Sequence
from common.protocol.messages import SamplingParams
from common.runtime import logs
from common.worker.engine_threads import EngineThreads
from common.worker.watchdog import StepWatch

log = logs.get("engine")

PROBE_TOKEN = 1
"""Token id that a probe computes in place of a request's tokens."""

LEAD_S = 0.02
"""Seconds before the expected end of the running step at which the next one is planned. A step of a long prompt takes 0.2 s on
a GPU: planned at its beginning, the next step would make a request that arrives meanwhile wait for both."""
LAUNCH_S = 0.002
"""Seconds from the start of a step to `StepLoop.launched`: until then its submitting thread has the interpreter to itself."""
MIN_PACE_TOKENS = 256
"""A step of fewer tokens says nothing of how fast tokens can be computed: its time goes into reading weights."""
SENDING_TURNS = 4
"""Of the event loop, in which a message gets through the outbox and the bus into the socket."""
PACE_DECAY = 1.02
"""Growth, per step, of the best pace that was seen, so that an engine which has become slower is expected to be."""


@dataclass(slots=True, eq=False)
class Flight:
    """A step on its way. due_at: when it should have run, at the best pace seen lately."""

    plan: StepPlan
    due_at: float
    running: asyncio.Future[StepResult] = field(init=False)


class Scheduler(Protocol):
    """What the loop asks of a scheduler."""

    def plan(self, now: float, only: Collection[Sequence] | None = None) -> StepPlan | None: ...
    def rewind(self) -> list[Sequence]: ...
    def holds(self, sequence: Sequence) -> bool: ...


class Steps(Protocol):
    """What the loop tells of its steps."""

    def commit(self, plan: StepPlan, result: StepResult) -> Callable[[], None]:
        """Commit a step to the scheduler, and tell those who wait for what it gave. What is returned tells everyone else
        concerned; it is called once the next step runs."""
        ...

    def step_ended(self, plan: StepPlan, elapsed_s: float, *, compiled: bool) -> None: ...
    def step_failed(self) -> None:
        """A step failed; it and those submitted after it are void, and none is in flight."""
        ...

    def sequence_failed(self, sequence: Sequence) -> None:
        """It fails whatever runs beside it. It is still in the scheduler."""
        ...


class StepLoop:
    """`run` it in a task; `wake` it when something can be planned that could not be before.

    tells_first: whether others wait for what a step gave. `Steps.commit` has told them then. If an engine that runs ahead has a
    step to go on with, the messages to them are sent at once, and everyone is told before the next step is planned.
    settle: notes what a step gave, for the plans of later ones; called once those who wait for it have been told.
    at_hand: whether the event loop submits a step itself, and asks itself whether it has run: threads that take turns in the
    interpreter would hold up whatever others say meanwhile, and what they are told.
    launched: called soon after a step was started, with the seconds until its end as far as they can be estimated; not called
    if it has ended by then.
    """

    def __init__(
        self,
        *,
        runner: Runner,
        scheduler: Scheduler,
        steps: Steps,
        threads: EngineThreads,
        watch: StepWatch,
        clock: Callable[[], float],
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._steps = steps
        self._threads = threads
        self._watch = watch
        self._clock = clock
        self._flights: deque[Flight] = deque()
        self.tells_first: Callable[[], bool] = lambda: False
        self.settle: Callable[[], None] = _nothing
        self.at_hand: Callable[[StepPlan], bool] = lambda plan: False
        self.launched: Callable[[StepPlan, float], None] | None = None
        self._wake = anyio.Event()
        self._report: Callable[[], None] = _nothing
        self._ended = clock()
        self._pace_s = 0.0

    def wake(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        """:raises RunnerLost: no later step can run, or each would fail."""
        while True:
            room = len(self._flights) < self._runner.run_ahead
            if room and self._flights and self.tells_first():
                self._tell()
            if room and (early_s := self._early_s()) > 0:
                self._tell()
                await asyncio.wait([self._flights[0].running], timeout=early_s)
                room = not self._flights[0].running.done()
            if room and (plan := self._scheduler.plan(self._clock())) is not None:
                self._flights.append(self._start(plan))
                continue
            self._tell()
            if not self._flights:
                self._wake = anyio.Event()
                await self._wake.wait()
                self._ended = self._clock()
                continue
            if not await self._land(self._flights.popleft()):
                await self._isolate()

    def _early_s(self) -> float:
        """Return how many seconds it is too early to plan the step after those in flight.

        Their end is expected after the time that their tokens would take at the best pace seen lately: rather too soon than too
        late, when the engine would have nothing to do.
        """
        if not self._flights:
            return 0.0
        tokens = sum(flight.plan.num_tokens for flight in self._flights)
        return self._ended + tokens * self._pace_s - LEAD_S - self._clock()

    def _measure(self, num_tokens: int, elapsed_s: float) -> None:
        if num_tokens >= MIN_PACE_TOKENS:
            pace_s = elapsed_s / num_tokens
            self._pace_s = min(pace_s, PACE_DECAY * self._pace_s) if self._pace_s else pace_s

    def _start(self, plan: StepPlan) -> Flight:
        compiling = self._runner.may_compile(plan)
        self._watch.began(self._clock(), compiling=compiling)
        at_hand = not compiling and self.at_hand(plan)
        num_tokens = plan.num_tokens + sum(ahead.plan.num_tokens for ahead in self._flights)
        flight = Flight(plan, self._ended + num_tokens * self._pace_s)
        flight.running = self._threads.start(self._runner, plan, here=at_hand, polled=at_hand)
        if self.launched is not None:
            asyncio.get_running_loop().call_later(LAUNCH_S, self._launched, flight)
        return flight

    def _launched(self, flight: Flight) -> None:
        if self.launched is not None and not flight.running.done():
            self.launched(flight.plan, max(0.0, flight.due_at - self._clock()))

    async def _land(self, flight: Flight) -> bool:
        """Wait for a step and commit it. False if it failed, and with it those submitted after it."""
        plan = flight.plan
        try:
            result = await self._threads.result(flight.running)
        except RunnerLost:
            log.critical("engine_lost", step=plan.step, rows=len(plan.rows))
            raise  # nobody is told that a request failed: gateways go on elsewhere, with the tokens so far
        except Exception:
            log.exception("step_failed", step=plan.step, rows=len(plan.rows))
            for later in self._flights:
                with contextlib.suppress(Exception):
                    await self._threads.result(later.running)
            for _ in range(1 + len(self._flights)):
                self._watch.ended(self._clock())
            self._flights.clear()
            self._steps.step_failed()  # now that nobody is told any more that a step is on its way
            return False
        began, self._ended = self._ended, self._clock()
        compiled = self._watch.may_compile
        self._watch.ended(self._ended)
        self._measure(plan.num_tokens, self._ended - began)
        self._steps.step_ended(plan, self._ended - began, compiled=compiled)
        self._report = self._steps.commit(plan, result)
        if self._flights and self.tells_first():
            await sent()
        self.settle()
        return True

    def _tell(self) -> None:
        report, self._report = self._report, _nothing
        report()

    async def _isolate(self) -> None:
        """A step failed: find whom it fails for.

        :raises RunnerLost: if it fails for everyone.
        """
        suspects = self._scheduler.rewind()
        culprits: list[Sequence] = []
        groups = deque(_halves(suspects))
        while groups:
            group = [sequence for sequence in groups.popleft() if self._scheduler.holds(sequence)]
            plan = self._scheduler.plan(self._clock(), group) if group else None
            if plan is None:
                continue
            if await self._land(self._start(plan)):
                self._tell()
                continue
            failed = self._scheduler.rewind()
            if len(failed) > 1:
                groups.extendleft(_halves(failed))
            else:
                culprits += failed
        self._ended = self._clock()
        if len(culprits) == len(suspects) > 0 and not await self._computes(culprits):
            raise RunnerLost("every step fails, whatever it computes")
        for sequence in culprits:
            log.error("sequence_failed", request=sequence.request, tokens=len(sequence.tokens), suspects=len(suspects))
            self._steps.sequence_failed(sequence)

    async def _computes(self, culprits: list[Sequence]) -> bool:
        """Return whether a probe of the last culprit that still runs succeeds; True if no step of it can be planned.

        The probe overwrites no KV that was computed before. What it writes is not kept: if it succeeds, the sequence ends.
        """
        held = [sequence for sequence in culprits if self._scheduler.holds(sequence)][-1:]
        plan = self._scheduler.plan(self._clock(), held) if held else None
        if plan is None:
            return True
        plan = structs.replace(plan, rows=[_probe(row) for row in plan.rows])
        self._watch.began(self._clock(), compiling=self._runner.may_compile(plan))
        try:
            await self._threads.start(self._runner, plan, here=False)
        except RunnerLost:
            raise
        except Exception:
            log.exception("probe_failed")
            return False
        finally:
            self._watch.ended(self._clock())
            self._scheduler.rewind()
        return True


def _probe(row: StepRow) -> StepRow:
    """Return a row of the same number of tokens, position, blocks and temperature, without the request's other parameters."""
    tokens = [PROBE_TOKEN] * len(row.tokens)
    sampling = SamplingParams(temperature=row.sampling.temperature, seed=row.sampling.seed)
    targets = [PROBE_TOKEN] * len(row.targets)
    return StepRow(
        tokens,
        row.start,
        row.blocks,
        row.num_samples,
        sampling,
        row.prompt_tokens,
        num_read=row.num_read,
        targets=targets,
        more_blocks=row.more_blocks,
    )


async def sent() -> None:
    """Let go of the event loop until messages that were just sent are in the socket: what comes next would hold them up."""
    for _ in range(SENDING_TURNS):
        await asyncio.sleep(0)


def _halves(sequences: list[Sequence]) -> list[list[Sequence]]:
    """One sequence stays as it is: it is tried once more, alone."""
    middle = (len(sequences) + 1) // 2
    return [half for half in (sequences[:middle], sequences[middle:]) if half]


def _nothing() -> None:
    """There is no step to report."""
