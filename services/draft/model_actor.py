"""The draft worker with a model: mirrors are drafted by steps of an engine of its own.

    open the engine ─┬► the model can't be used: one line in the log, and in each heartbeat; no mirrors are taken,
                     │  serving goes on
                     └► plan ─► steps ─► commit one ─► messages that came meanwhile ─► Proposals ─► plan ─► …

Decode never waits: drafts run ahead of what is confirmed, by a proposal's tokens at most, and a proposal covers what is drafted
behind the confirmed tokens. On a GPU the next step is planned while one runs, and fed with its tokens there, unless an update
is expected before it would begin (`cadence.py`). Where a draft may fail, branches are drafted with what steps leave
(`branches.py`). A step that raises costs its mirrors, which are sent whole again; several in a row end the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
from collections import deque
from collections.abc import Callable
from statistics import median

import anyio
import anyio.lowlevel
import msgspec

from common.engine.plan import RunnerLost, StepPlan, StepResult
from common.protocol.draft_messages import DraftUpdate
from common.protocol.errors import PenstockError
from common.protocol.messages import Message, Presence
from common.runtime import logs
from common.runtime.actor import WorkerState
from common.runtime.bus import Bus
from common.runtime.cores import usable_cores
from common.transfer.fence import memory_fence
from common.worker.engine_threads import MIN_POLLING_CORES, EngineThreads
from common.worker.kv_blocks import KvBlocks
from common.worker.stepping import sent
from common.worker.watchdog import StepWatch
from services.draft.actor import DraftActor
from services.draft.cadence import Cadence
from services.draft.config import DraftConfig
from services.draft.drafting import Drafter
from services.draft.model_engine import DraftEngine, OpenDraftEngine
from services.draft.proposer import MirrorKey, NoProposals

log = logs.get("draft")

MAX_FAILURES = 3
"""Steps that may fail one after another before the engine is given up."""
MAX_PACE_TOKENS = 128
"""Of steps that say how long one takes: others are prompts."""
MEASURED_STEPS = 9
"""The last ones, whose median is how long one takes."""
STAY_TOKENS = 8
"""Tokens of a mirror beyond its proposal, on a GPU: at its limit it would leave the step until the next update."""
MAX_PROBLEM_CHARS = 300
"""Of the reason that each heartbeat of a worker without a draft model repeats."""


class ModelDraftActor(DraftActor):
    """`open_engine`: see `model_engine.open_draft_engine`."""

    def __init__(
        self, *, bus: Bus, config: DraftConfig, open_engine: OpenDraftEngine, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(bus=bus, config=config, proposer=NoProposals(), clock=clock)
        self.open_engine = open_engine
        self.opened: DraftEngine | None = None
        self.drafter: Drafter | None = None
        self.watch = StepWatch(floor_s=config.step_timeout_s, compile_s=config.compile_timeout_s)
        self.loaded_share = 0.0
        self.problem = ""
        """Why the model can't be used; empty where it can."""
        self._threads = EngineThreads(submits_here=True)
        self.polls = usable_cores() >= MIN_POLLING_CORES
        self._steps_in_air: deque[tuple[StepPlan, asyncio.Future[StepResult]]] = deque()
        self._news: asyncio.Future[None] | None = None
        """While a step is waited for: done when an update comes."""
        self.cadence = Cadence()
        self._ended = self._woken = self._begun = clock()
        self._paces_s: deque[float] = deque(maxlen=MEASURED_STEPS)
        self._failures = 0
        self._drafted = self.metrics.counter("draft_model_tokens_total", "Tokens drafted by the model")
        self._in_vain = self.metrics.counter("draft_model_tokens_in_vain_total", "Drafted tokens that decode did not confirm")
        self._branch_tokens = self.metrics.counter("draft_model_branch_tokens_total", "Tokens drafted in branches")
        self._branches_taken = self.metrics.counter(
            "draft_model_branches_taken_total", "Branches that said what decode said where the draft was wrong"
        )
        self._evicted = self.metrics.counter("draft_model_evictions_total", "Mirrors dropped for lack of KV blocks or room")
        self._broken = self.metrics.counter(
            "draft_model_invalid_logits_total", "Mirrors that are drafted no further since the model's logits were not finite"
        )
        self._steps = self.metrics.counter("draft_model_steps_total", "Steps of the draft model's engine")
        self._step_s = self.metrics.counter(
            "draft_model_step_seconds_total", "Seconds spent in steps; its rate is the utilisation of the draft model's engine"
        )
        self._step_failures = self.metrics.counter(
            "draft_model_step_failures_total", "Steps of the draft model's engine that raised an error"
        )

    # -- life

    async def start(self) -> None:
        try:
            engine = (await self._open()).engine
            pool = engine.pool(memory_fence(), zero_retention=self.config.zero_retention)
        except (PenstockError, RuntimeError, MemoryError, OSError) as error:  # torch's out-of-memory errors are RuntimeErrors
            reason = str(error).partition("\n")[0]
            log.error("draft_model_unusable", model=self.config.draft_model, reason=reason, consequence="nothing is drafted")
            self.problem = (reason or type(error).__name__)[:MAX_PROBLEM_CHARS]
            self._give_back()
            return
        self.metrics.registry.register(KvBlocks(self.config.served_name, pool.usage))
        limits = self.config.limits(on_gpu=engine.on_gpu)
        self.max_proposal = self.config.max_proposal(on_gpu=engine.on_gpu)
        self.proposer = self.drafter = Drafter(
            pool,
            max_sequences=min(self.config.max_sequences, limits.max_running),
            max_drafted=self.max_proposal,
            token_budget=limits.token_budget,
            max_context=engine.runner.max_context,
            vocab_size=engine.runner.vocab_size,
            num_branches=self.config.num_branches(on_gpu=engine.on_gpu),
            branch_tokens=self.config.draft_branch_tokens,
            branches_beside=engine.on_gpu,
            stay_tokens=STAY_TOKENS if engine.on_gpu else 0,
        )

    async def _open(self) -> DraftEngine:
        """Open the engine, in the thread that submits steps."""
        context, name = contextvars.copy_context(), f"{self.ref.id}-{self.ref.epoch:x}"
        opening = lambda: context.run(self.open_engine, name, self._on_progress)  # noqa: E731
        future = asyncio.get_running_loop().run_in_executor(self._threads.submitting, opening)
        with anyio.CancelScope(shield=True):  # what has been opened must be closed
            await future
        self.opened = future.result()
        return self.opened

    def _on_progress(self, done: int, total: int) -> None:
        self.loaded_share = done / max(1, total)

    def close(self) -> None:
        """Give the segment back, once the runner's threads have ended, or hang."""
        if not self._threads.close():
            log.error("engine_thread_hangs", worker=self.ref.id, consequence="the process ends without it")
        self._give_back()

    def _give_back(self) -> None:
        """Close the engine, if there is one. Harmless twice."""
        opened, self.opened = self.opened, None
        if opened is not None:
            opened.engine.close()

    # -- steps

    async def work(self) -> None:
        """:raises RunnerLost: no later step can run, or each would fail."""
        drafted: list[MirrorKey] = []
        while True:
            if self._queue or drafted:
                self.serve(drafted)
                drafted = []
                if self._steps_in_air:
                    await sent()  # before another step takes the interpreter
            self._start_steps()
            self._count()
            if self._steps_in_air:
                if not await self._hears_first():
                    drafted = await self._land(self._steps_in_air.popleft())
            elif not self._queue:
                self._wake = anyio.Event()
                await self._wake.wait()
                self._woken = self.clock()
            await anyio.lowlevel.checkpoint()

    def handle(self, message: Message, reply: str) -> None:
        super().handle(message, reply)
        if isinstance(message, DraftUpdate):
            self.cadence.heard(message.decode, self.clock())
            if self._news is not None and not self._news.done():
                self._news.set_result(None)

    async def _hears_first(self) -> bool:
        """Where there is room for another step, wait until the oldest one has run or an update has come. Return whether it was
        the update."""
        assert self.opened is not None
        running = self._steps_in_air[0][1]
        has_room = len(self._steps_in_air) < self.opened.engine.runner.run_ahead
        while self._threads.polls and not running.done() and not (has_room and self._queue):
            await asyncio.sleep(0)
            self._threads.poll()
        if has_room and not self._queue and not running.done():
            self._news = asyncio.get_running_loop().create_future()
            await asyncio.wait([running, self._news], return_when=asyncio.FIRST_COMPLETED)
            self._news = None
        return has_room and not running.done()

    def _start_steps(self) -> None:
        """As many as the engine takes at once, but none behind another while an update is due."""
        if self.drafter is None or self.opened is None:
            return
        runner = self.opened.engine.runner
        while len(self._steps_in_air) < runner.run_ahead and not (self._steps_in_air and self._is_early()):
            if (plan := self.drafter.plan()) is None:
                break
            if not self._steps_in_air:
                self._begun = self.clock()
            compiling = runner.may_compile(plan)
            self.watch.began(self.clock(), compiling=compiling)
            polled = self.polls and plan.num_tokens <= MAX_PACE_TOKENS
            self._steps_in_air.append((plan, self._threads.start(runner, plan, here=not compiling, polled=polled)))

    def _is_early(self) -> bool:
        """Whether an update is expected before the step in the air ends, behind which another one would begin."""
        pace_s = median(self._paces_s) if self._paces_s else 0.0
        return self.cadence.is_due(max(self._ended, self._begun) + pace_s, self.clock())

    async def _land(self, flight: tuple[StepPlan, asyncio.Future[StepResult]]) -> list[MirrorKey]:
        """Wait for a step. Return the mirrors that were drafted further."""
        assert self.drafter is not None
        plan, running = flight
        try:
            result = await running
        except RunnerLost:
            log.critical("engine_lost", step=plan.step, rows=len(plan.rows))
            raise
        except Exception as error:
            for _, later in self._steps_in_air:
                with contextlib.suppress(Exception):
                    await self._threads.result(later)
            for _ in range(1 + len(self._steps_in_air)):
                self.watch.ended(self.clock())
            self._steps_in_air.clear()
            return self._step_failed(plan, error)
        began, self._ended = max(self._ended, self._woken), self.clock()
        self.watch.ended(self._ended)
        if plan.num_tokens <= MAX_PACE_TOKENS:
            self._paces_s.append(self._ended - max(began, self._begun))
        return self._committed(self.drafter, plan, result, self._ended - began)

    def _committed(self, drafter: Drafter, plan: StepPlan, result: StepResult, elapsed_s: float) -> list[MirrorKey]:
        self._failures = 0
        self._steps.inc()
        self._step_s.inc(max(0.0, elapsed_s))
        self.was_busy(elapsed_s)
        return drafter.commit(plan, result)

    def _step_failed(self, plan: StepPlan, error: Exception) -> list[MirrorKey]:
        """:raises RunnerLost: if too many failed one after another."""
        assert self.drafter is not None
        self._failures += 1
        self._step_failures.inc()
        closed = self.drafter.abort()
        log.error("step_failed", step=plan.step, mirrors=closed, exc_info=error)
        if self._failures >= MAX_FAILURES:
            raise RunnerLost("every step fails, whatever it computes") from error
        return []

    def _count(self) -> None:
        """Bring the metrics up to what the drafter has counted."""
        drafter = self.drafter
        if drafter is not None:
            self._drafted.inc(drafter.num_tokens_drafted)
            self._in_vain.inc(drafter.num_tokens_in_vain)
            self._evicted.inc(drafter.num_evicted)
            self._broken.inc(drafter.num_broken)
            branches = drafter.branches
            self._branch_tokens.inc(branches.num_tokens)
            self._branches_taken.inc(branches.num_taken)
            branches.num_tokens = branches.num_taken = 0
            drafter.num_tokens_drafted = drafter.num_tokens_in_vain = drafter.num_evicted = drafter.num_broken = 0

    # -- heartbeat

    def presence(self, state: WorkerState) -> Presence:
        now = self.clock()
        said = super().presence(state)
        said = msgspec.structs.replace(
            said,
            loaded=self.loaded_share if state == "starting" else 1.0,
            steps=self.watch.num_steps,
            step_age_ms=1e3 * self.watch.age_s(now),
            drafting=msgspec.structs.replace(said.drafting, problem=self.problem),
        )
        if self.drafter is None or self.opened is None:
            return said
        return msgspec.structs.replace(
            said,
            vocabulary=self.opened.vocabulary,
            kv=self.drafter.blocks.pool.usage(),
            drafting=msgspec.structs.replace(said.drafting, longest=self.drafter.max_context),
        )

    def tick(self, now: float) -> None:
        """:raises RunnerLost: a step hangs; a supervisor starts this worker again."""
        if self.watch.overdue(now, period_s=self.config.heartbeat_s):
            log.critical("step_hangs", worker=self.ref.id, age_s=round(self.watch.age_s(now), 2))
            raise RunnerLost("a step of the draft model does not end")
        super().tick(now)
