"""The threads of an engine, and which of them submits a step and takes its result."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from common.engine.plan import PendingStep, Runner, StepPlan, StepResult

CLOSE_TIMEOUT_S = 2.0
MIN_POLLING_CORES = 8
"""Of a machine on which the event loop asks again and again whether a step has run, which keeps a core busy. A thread that
waited for it would hold the interpreter when the loop submits the next step (decision 0099)."""


class _Polled(NamedTuple):
    """A step whose result `EngineThreads.poll` takes."""

    plan: StepPlan
    step: PendingStep
    running: asyncio.Future[StepResult]


class EngineThreads:
    """The threads of an engine: one that submits steps, and opened it, and one that waits for their results.

    Where an engine runs ahead, the event loop may submit steps itself (`here`), which suits those that are submitted sooner
    than handed to another thread, and of these it may take the results, too: of the ones that are `polled`, while it calls
    `poll`. submits_here: the event loop submits most steps.
    """

    def __init__(self, *, submits_here: bool = False) -> None:
        self._submits_here = submits_here
        self.submitting = ThreadPoolExecutor(1, thread_name_prefix="submit")
        self.waiting = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._polled: deque[_Polled] = deque()
        self._last: asyncio.Future[StepResult] | None = None
        """The last step whose result the waiting thread takes."""
        self._runner: Runner | None = None
        self._submitted: Future[PendingStep] | None = None
        """The last one of the submitting thread."""
        self.ran: Callable[[StepPlan], None] = lambda plan: None
        """Called with a step that has run, as soon as its result is taken: in the waiting thread, before the event loop knows,
        or by `poll`."""

    def start(self, runner: Runner, plan: StepPlan, *, here: bool, polled: bool = False) -> asyncio.Future[StepResult]:
        """A step on its way, behind those that are. here: the event loop submits it, if nothing is on its way to the submitting
        thread. polled: `poll` takes its result then."""
        loop = asyncio.get_running_loop()
        if runner.run_ahead == 1:
            return loop.run_in_executor(self.waiting, lambda: self._ended(plan, runner.execute(plan)))
        submitted: Future[PendingStep]
        if here and (self._submitted is None or self._submitted.done()):
            submitted = Future()
            try:
                submitted.set_result(self._submit(runner, plan, owns=self._submits_here))
            except Exception as error:
                submitted.set_exception(error)
            if polled and submitted.exception() is None:
                self._polled.append(_Polled(plan, submitted.result(), loop.create_future()))
                return self._polled[-1].running
        else:
            submitted = self._submitted = self.submitting.submit(self._submit, runner, plan, owns=not self._submits_here)
        self._hand_over(loop)
        self._last = loop.run_in_executor(self.waiting, lambda: self._ended(plan, submitted.result().result()))
        return self._last

    def poll(self) -> None:
        """Take the results of polled steps that have run."""
        while self.polls and self._polled[0].step.has_run():
            plan, step, running = self._polled.popleft()
            try:
                result = self._ended(plan, step.result())
            except Exception as error:
                running.set_exception(error)
            else:
                running.set_result(result)

    async def result(self, running: asyncio.Future[StepResult]) -> StepResult:
        """Wait for a step that `start` returned, and poll meanwhile. Raises what the step raised."""
        while self.polls and not running.done():
            await asyncio.sleep(0)
            self.poll()
        return await running

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have the waiting thread take the results of polled steps: one behind them is its own."""
        while self._polled:
            plan, step, running = self._polled.popleft()
            taken = loop.run_in_executor(self.waiting, lambda plan=plan, step=step: self._ended(plan, step.result()))
            taken.add_done_callback(partial(_pass_on, running))

    @property
    def polls(self) -> bool:
        """Whether the oldest step on its way is polled, if any is."""
        return bool(self._polled) and (self._last is None or self._last.done())

    def _submit(self, runner: Runner, plan: StepPlan, *, owns: bool) -> PendingStep:
        """owns: whether this thread submits all steps as a rule."""
        if owns and self._runner is not runner:
            self._runner = runner
            getattr(runner, "own_thread", _nothing)()
        return runner.submit(plan)

    def _ended(self, plan: StepPlan, result: StepResult) -> StepResult:
        self.ran(plan)
        return result

    def close(self) -> bool:
        """Wait for the threads to end, but not for one that hangs. Returns whether all have ended."""
        last: list[Future[None]] = []
        for executor in (self.submitting, self.waiting):
            last.append(executor.submit(_nothing))
            executor.shutdown(wait=False)
        try:
            for future in last:
                future.result(CLOSE_TIMEOUT_S)
        except TimeoutError:
            return False
        return True


def _pass_on(running: asyncio.Future[StepResult], taken: asyncio.Future[StepResult]) -> None:
    """Give what was taken to who waits for the step, unless that was cancelled."""
    if running.done():
        return
    if taken.cancelled():
        running.cancel()
    elif (error := taken.exception()) is not None:
        running.set_exception(error)
    else:
        running.set_result(taken.result())


def _nothing() -> None:
    """Do nothing: for a runner that is not told which thread submits, and as the last call of a thread."""
