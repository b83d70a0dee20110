"""A step that raises ends only those whom it fails for; an engine that fails for everyone, or hangs, is given up."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from common.engine.plan import LaterStep, RunnerLost, StepPlan, StepResult, StepRow
from common.engine.sequence import Sequence
from common.protocol.messages import SamplingParams
from common.worker.engine_threads import EngineThreads
from common.worker.stepping import StepLoop
from common.worker.watchdog import StepWatch
from services.decode.scheduler import DecodeScheduler
from tests.unit.scheduling import Bench, sequence

BAD = 666


class Faulty:
    """A simulated engine that raises for steps of which `fails` says so."""

    def __init__(self, bench: Bench, run_ahead: int, fails: Callable[[StepPlan], bool]) -> None:
        self.run_ahead = run_ahead
        self.inner = bench.runner
        self.fails = fails
        self.num_failed = 0
        self.block_tokens, self.num_blocks = bench.runner.block_tokens, bench.runner.num_blocks
        self.max_context, self.vocab_size = bench.runner.max_context, bench.runner.vocab_size
        self.fingerprint = "test"

    def execute(self, plan: StepPlan) -> StepResult:
        if self.fails(plan):
            self.num_failed += 1
            raise RuntimeError("a mistake in a kernel")
        return self.inner.execute(plan)

    def submit(self, plan: StepPlan) -> LaterStep:
        return LaterStep(self, plan)

    def may_compile(self, plan: StepPlan) -> bool:
        return False


class Site:
    """A loop over a decode scheduler. `failed`: the requests that were ended. at_hand: of so many steps one is left to the
    threads, the others are the event loop's own; 0: none is."""

    def __init__(self, fails: Callable[[StepPlan], bool], run_ahead: int = 1, at_hand: int = 0) -> None:
        self.bench = Bench(num_blocks=200)
        self.scheduler = DecodeScheduler(self.bench.cache, token_budget=64, max_running=64, max_context=256)
        self.runner = Faulty(self.bench, run_ahead, fails)
        self.threads = EngineThreads()
        self.watch = StepWatch(floor_s=5.0, compile_s=5.0)
        self.failed: list[str] = []
        self.num_step_failures = 0
        self.loop = StepLoop(
            runner=self.runner,
            scheduler=self.scheduler,
            steps=self,
            threads=self.threads,
            watch=self.watch,
            clock=time.monotonic,
        )
        self.loop.at_hand = lambda plan: at_hand > 0 and plan.step % at_hand > 0

    def commit(self, plan: StepPlan, result: StepResult) -> Callable[[], None]:
        self.scheduler.commit(plan, result, 0.0)
        return lambda: None

    def step_ended(self, plan: StepPlan, elapsed_s: float, *, compiled: bool) -> None: ...

    def step_failed(self) -> None:
        self.num_step_failures += 1

    def sequence_failed(self, sequence: Sequence) -> None:
        self.failed.append(sequence.request)
        self.scheduler.cancel(sequence)

    def admit(self, *prompts: list[int]) -> list[Sequence]:
        sequences = [sequence(str(number), prompt, max_tokens=8) for number, prompt in enumerate(prompts)]
        for each in sequences:
            self.scheduler.admit(each)
        return sequences

    async def run(self, sequences: list[Sequence]) -> None:
        """Until each has ended or failed."""
        async with anyio.create_task_group() as group:
            group.start_soon(self.loop.run)
            with anyio.fail_after(10):
                while any(each.finish is None and each.request not in self.failed for each in sequences):
                    await anyio.sleep(0.002)
            group.cancel_scope.cancel()
        assert self.threads.close()


def contains(token: int) -> Callable[[StepPlan], bool]:
    return lambda plan: any(token in row.tokens for row in plan.rows)


@pytest.mark.parametrize(("run_ahead", "at_hand"), [(1, 0), (2, 0), (2, 2), (2, 5)])
@pytest.mark.parametrize("culprits", [{0}, {3}, {8}, {0, 8}, {1, 2, 7}])
async def test_only_those_end_for_whom_a_step_fails(culprits: set[int], run_ahead: int, at_hand: int) -> None:
    site = Site(contains(BAD), run_ahead, at_hand)
    sequences = site.admit(*([5, BAD if number in culprits else 6, number] for number in range(9)))
    await site.run(sequences)
    assert sorted(site.failed) == sorted(map(str, culprits))
    for each in sequences:
        if each.request not in site.failed:
            assert each.tokens[3:] == site.bench.expected(each) and each.num_outputs == 8
    assert site.bench.all_given_back() and site.watch.age_s(time.monotonic()) == 0.0
    assert site.num_step_failures == site.runner.num_failed <= 1 + len(culprits) * 2 * 4


async def test_who_fails_in_the_middle_of_an_answer_ends_alone() -> None:
    late = {"at": 0}

    def fails(plan: StepPlan) -> bool:
        return any(row.start >= 6 and row.prompt_tokens == 4 for row in plan.rows)

    site = Site(fails, 2)
    sequences = site.admit([5, 6, 7], [5, 6, 7, 8], [5, 6])
    await site.run(sequences)
    assert site.failed == ["1"] and not late["at"]
    assert [each.num_outputs for each in sequences][::2] == [8, 8] and site.bench.all_given_back()


@pytest.mark.parametrize("at_hand", [0, 2, 3])
async def test_a_step_that_fails_once_ends_nobody(at_hand: int) -> None:
    faults = iter([False, True])
    site = Site(lambda plan: next(faults, False), 2, at_hand)
    sequences = site.admit(*([5, 6, number] for number in range(5)))
    await site.run(sequences)
    assert site.failed == [] and site.runner.num_failed == 1
    assert all(each.tokens[3:] == site.bench.expected(each) for each in sequences)


async def test_an_engine_that_fails_for_everyone_is_given_up_and_nobody_is_to_blame() -> None:
    site = Site(lambda plan: True)
    sequences = site.admit([5, 6], [6, 7], [7, 8])
    with pytest.raises(RunnerLost, match="whatever it computes"):
        await site.loop.run()
    assert site.failed == [] and len(sequences) == 3


async def test_an_engine_that_fails_for_the_only_request_is_given_up_and_the_request_is_not_to_blame() -> None:
    site = Site(lambda plan: True)
    (only,) = site.admit([5, 6])
    with pytest.raises(RunnerLost, match="whatever it computes"):
        await site.loop.run()
    assert site.failed == [] and site.scheduler.holds(only)
    site.scheduler.cancel(only)
    assert site.bench.all_given_back(), "the probe's blocks are back"


@pytest.mark.parametrize(("run_ahead", "at_hand"), [(1, 0), (2, 0), (2, 2), (2, 3)])
@pytest.mark.parametrize("count", [1, 2, 4])
async def test_a_step_in_which_every_request_is_to_blame_ends_them_and_not_the_engine(
    count: int, run_ahead: int, at_hand: int
) -> None:
    site = Site(contains(BAD), run_ahead, at_hand)
    await site.run(site.admit(*([5, BAD, number] for number in range(count))))
    assert sorted(site.failed) == sorted(map(str, range(count)))
    assert site.bench.all_given_back() and site.watch.age_s(time.monotonic()) == 0.0


async def test_bad_requests_one_after_another_end_and_the_engine_goes_on() -> None:
    site = Site(contains(BAD))
    requests = [sequence(f"r{number}", [5, BAD]) for number in range(5)]
    requests.append(sequence("good", [5, 6, 7], max_tokens=8))
    async with anyio.create_task_group() as group:
        group.start_soon(site.loop.run)
        with anyio.fail_after(10):
            for each in requests:
                site.scheduler.admit(each)
                site.loop.wake()
                while each.request not in site.failed and each.finish is None:
                    await anyio.sleep(0.002)
        group.cancel_scope.cancel()
    assert site.threads.close()
    assert site.failed == [f"r{number}" for number in range(5)] and site.bench.all_given_back()


@pytest.mark.parametrize("is_ill", [lambda row: len(row.tokens) > 3, lambda row: row.sampling.temperature > 0])
async def test_an_engine_that_fails_for_whatever_is_as_large_or_sampled_is_given_up(
    is_ill: Callable[[StepRow], bool],
) -> None:
    site = Site(lambda plan: any(map(is_ill, plan.rows)))
    (only,) = site.admit([5, 6, 7, 8])
    with pytest.raises(RunnerLost, match="whatever it computes"):
        await site.loop.run()
    assert site.failed == [] and site.scheduler.holds(only)


@pytest.mark.parametrize("wish", [{"logit_bias": {3: 5.0}}, {"top_k": 3}, {"repetition_penalty": 1.5}])
async def test_an_engine_that_fails_for_what_only_one_request_asks_for_goes_on(wish: dict[str, Any]) -> None:
    site = Site(lambda plan: any(getattr(row.sampling, name) == value for row in plan.rows for name, value in wish.items()))
    only = sequence("0", [5, 6, 7], max_tokens=8, **wish)
    site.scheduler.admit(only)
    await site.run([only])
    assert site.failed == ["0"] and site.bench.all_given_back()


async def test_a_probe_needs_no_free_block() -> None:
    site = Site(contains(BAD))
    sequences = site.admit([5, BAD], [5, 6, BAD])
    plan = site.scheduler.plan(0.0)  # so that they have their blocks
    site.scheduler.rewind()
    taken = site.bench.pool.allocate([site.bench.pool.available])
    await site.run(sequences)
    assert plan is not None and sorted(site.failed) == ["0", "1"]
    site.bench.pool.release(taken)
    assert site.bench.all_given_back()


async def test_threads_are_waited_for_unless_they_hang() -> None:
    for hangs in (False, True):
        threads, released = EngineThreads(), threading.Event()
        if hangs:
            threads.waiting.submit(released.wait)
        began = time.monotonic()
        assert threads.close() is not hangs
        assert time.monotonic() - began < 4
        released.set()


class Submitting:
    """Notes which thread submits which step; step 3 can't be submitted. `gate`: step 2 waits for it there."""

    run_ahead = 2

    def __init__(self) -> None:
        self.by_step: dict[int, str] = {}
        self.owners: list[str] = []
        self.gate = threading.Event()

    def own_thread(self) -> None:
        self.owners.append(threading.current_thread().name)

    def submit(self, plan: StepPlan) -> Submitting:
        self.by_step[plan.step] = threading.current_thread().name.partition("_")[0]
        if plan.step == 2:
            assert self.gate.wait(5)
        if plan.step == 3:
            raise ValueError("no such step")
        return self

    def result(self) -> StepResult:
        return StepResult(rows=[], elapsed_s=0.0)


async def test_the_event_loop_submits_what_it_is_told_to_and_steps_keep_their_order() -> None:
    runner, threads = Submitting(), EngineThreads(submits_here=True)
    here = threading.current_thread().name
    steps: Any = runner
    await threads.start(steps, StepPlan(1, []), here=True)
    compiling = threads.start(steps, StepPlan(2, []), here=False)
    behind = threads.start(steps, StepPlan(4, []), here=True)  # not before the one that the other thread still submits
    runner.gate.set()
    await compiling
    await behind
    await threads.start(steps, StepPlan(5, []), here=True)
    assert runner.by_step == {1: here, 2: "submit", 4: "submit", 5: here}
    assert runner.owners == [here], "the event loop stays the owner when the other thread submits"
    with pytest.raises(ValueError, match="no such step"):
        await threads.start(steps, StepPlan(3, []), here=True)
    assert threads.close()


class Polled:
    """Steps that have run once they are in `over`; step 3 fails then. `read`: whose results were taken, and in which thread."""

    run_ahead = 2

    def __init__(self) -> None:
        self.over: set[int] = set()
        self.read: list[tuple[int, str]] = []

    def submit(self, plan: StepPlan) -> OnePolled:
        return OnePolled(self, plan.step)


class OnePolled:
    def __init__(self, steps: Polled, number: int) -> None:
        self._steps, self._number = steps, number

    def has_run(self) -> bool:
        return self._number in self._steps.over

    def result(self) -> StepResult:
        while not self.has_run():
            time.sleep(0.001)
        self._steps.read.append((self._number, threading.current_thread().name.partition("_")[0]))
        if self._number == 3:
            raise ValueError("no such step")
        return StepResult(rows=[], elapsed_s=self._number)


async def test_polled_steps_are_read_by_the_event_loop_in_order_until_one_behind_them_is_not() -> None:
    steps, threads = Polled(), EngineThreads(submits_here=True)
    runner: Any = steps
    here = threading.current_thread().name
    first, second = (threads.start(runner, StepPlan(number, []), here=True, polled=True) for number in (1, 2))
    steps.over.add(2)
    threads.poll()
    assert threads.polls and not first.done() and not second.done(), "the second is behind the first"
    steps.over.add(1)
    threads.poll()
    assert [(await step).elapsed_s for step in (first, second)] == [1, 2]
    assert steps.read == [(1, here), (2, here)] and not threads.polls

    failing = threads.start(runner, StepPlan(3, []), here=True, polled=True)
    steps.over.add(3)
    threads.poll()
    with pytest.raises(ValueError, match="no such step"):
        await failing

    steps.read.clear()
    polled = threads.start(runner, StepPlan(4, []), here=True, polled=True)
    waited = threads.start(runner, StepPlan(5, []), here=True)
    behind = threads.start(runner, StepPlan(6, []), here=True, polled=True)
    steps.over.add(6)
    threads.poll()
    assert not threads.polls and not behind.done(), "the thread waits for the first two, in order"
    steps.over |= {4, 5}
    assert [(await step).elapsed_s for step in (polled, waited)] == [4, 5]
    assert threads.polls
    threads.poll()
    assert (await behind).elapsed_s == 6
    assert steps.read == [(4, "engine"), (5, "engine"), (6, here)]
    again = threads.start(runner, StepPlan(7, []), here=True, polled=True)
    assert threads.polls
    steps.over.add(7)
    threads.poll()
    await again
    assert threads.close()


class LongSteps:
    """Steps of 300 tokens that take 0.1 s each, five of them; `planned_at` and `ended_at` on the event loop's clock."""

    run_ahead = 2
    block_tokens = num_blocks = max_context = vocab_size = 1000
    fingerprint = "test"
    cache = Bench().cache

    def __init__(self) -> None:
        self.planned_at: list[float] = []
        self.ended_at: list[float] = []

    def plan(self, now: float, only: object = None) -> StepPlan | None:
        if len(self.planned_at) == 5:
            return None
        self.planned_at.append(time.monotonic())
        return StepPlan(len(self.planned_at), [StepRow([1] * 300, 0, [0], 0, SamplingParams(), 300)])

    def execute(self, plan: StepPlan) -> StepResult:
        time.sleep(0.1)
        return StepResult(rows=[])

    def submit(self, plan: StepPlan) -> LaterStep:
        return LaterStep(self, plan)

    def may_compile(self, plan: StepPlan) -> bool:
        return False

    def rewind(self) -> list[Sequence]:
        return []

    def holds(self, sequence: Sequence) -> bool:
        return False

    def commit(self, plan: StepPlan, result: StepResult) -> Callable[[], None]:
        self.ended_at.append(time.monotonic())
        return lambda: None

    def step_ended(self, plan: StepPlan, elapsed_s: float, *, compiled: bool) -> None: ...
    def step_failed(self) -> None: ...
    def sequence_failed(self, sequence: Sequence) -> None: ...


async def test_it_is_said_which_steps_may_have_compiled() -> None:
    site, ended = Site(lambda plan: False), list[tuple[int, bool]]()
    site.runner.may_compile = lambda plan: plan.step == 1
    site.step_ended = lambda plan, elapsed_s, *, compiled: ended.append((plan.step, compiled))
    await site.run(site.admit([1, 2, 3]))
    assert ended[:3] == [(1, True), (2, False), (3, False)]


@pytest.mark.parametrize("tells_first", [False, True])
async def test_others_are_told_before_the_next_step_is_planned_if_they_wait_for_it(tells_first: bool) -> None:
    site = Site(lambda plan: False, run_ahead=2)
    order: list[str] = []
    plan = site.scheduler.plan

    def planned(now: float, only: Any = None) -> StepPlan | None:
        found = plan(now, only)
        if found is not None:
            order.append(f"plan {found.step}")
        return found

    def commit(done: StepPlan, result: StepResult) -> Callable[[], None]:
        site.scheduler.commit(done, result, 0.0)
        asyncio.get_running_loop().call_soon(order.append, f"sent {done.step}")  # as a message is that a commit sends
        return lambda: order.append(f"tell {done.step}")

    site.scheduler.plan, site.commit = planned, commit  # type: ignore[method-assign]
    site.loop.tells_first, site.loop.settle = lambda: tells_first, lambda: order.append("settle")
    await site.run(site.admit([3, 4, 5]))
    assert order[:2] == ["plan 1", "plan 2"], "an engine without a step to go on with gets one first"
    told, after = order.index("tell 3"), order.index("plan 5")
    assert (told < after) == tells_first, order
    between = order[order.index("plan 4") + 1 : after]
    assert between.count("settle") == 1, "what a step gave is known when the next one is planned"
    assert order.index("settle", order.index("plan 4")) < after
    if tells_first:
        assert between == ["sent 3", "settle", "tell 3"]


async def test_a_long_step_is_planned_shortly_before_the_one_before_it_ends() -> None:
    steps, threads = LongSteps(), EngineThreads()
    watch = StepWatch(floor_s=5.0, compile_s=5.0)
    loop = StepLoop(runner=steps, scheduler=steps, steps=steps, threads=threads, watch=watch, clock=time.monotonic)
    async with anyio.create_task_group() as group:
        group.start_soon(loop.run)
        with anyio.fail_after(10):
            while len(steps.ended_at) < 5:
                await anyio.sleep(0.002)
        group.cancel_scope.cancel()
    assert threads.close()
    # the first two are planned at once, when nothing is known; later ones at LEAD_S before the end of the step that runs
    for planned, ended in zip(steps.planned_at[2:], steps.ended_at[1:], strict=False):
        assert ended - 0.09 < planned < ended
