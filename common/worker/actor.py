"""What prefill and decode share: an engine, sequences held for gateways, and the loop that steps them.

The life of a request here:

    task ─► admit (scheduler takes blocks, `held` takes a lease of the gateway) ─► steps ─► finished: blocks freed
         └► Rejected: nothing was taken                                        └► Cancel, no Renew, deadline: freed

A finished request keeps its tokens, without blocks, until the gateway lets go of it: frames that were lost are sent again.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable

import anyio
import msgspec

from common.engine.engine import Engine, OpenEngine
from common.engine.known_tokens import KnownTokens
from common.engine.plan import RunnerLost, StepPlan, StepResult
from common.engine.sequence import Sequence
from common.engine.sequence_cache import SequenceCache
from common.engine.settings import EngineServiceConfig
from common.engine.speeds import Speeds
from common.protocol.errors import Cancelled, InvalidLogits, OutOfCredits, PenstockError, ShuttingDown
from common.protocol.explain_messages import Explain
from common.protocol.handles import WorkerRef
from common.protocol.kv_events import KvSnapshotRequest
from common.protocol.messages import (
    Accepted,
    Cancel,
    FetchFrames,
    FramesTaken,
    Generation,
    Message,
    Presence,
    Rejected,
    Renew,
    TokenFrame,
    TokenFrames,
    Unknown,
)
from common.protocol.transfer_messages import DescribeMemory
from common.runtime import logs
from common.runtime.actor import Actor, WorkerState
from common.runtime.bus import Bus
from common.runtime.leases import LeaseTable
from common.transfer.fence import memory_fence
from common.transfer.shm import host_id
from common.worker.constraints import Constraints
from common.worker.engine_threads import EngineThreads
from common.worker.fetch_rate import FetchRates
from common.worker.kv_counts import KvCounts
from common.worker.kv_events import KvEventPublisher
from common.worker.metrics import EngineMetrics
from common.worker.outflow import FRAME_ENTRIES, Outflow
from common.worker.prefixes import Prefixes
from common.worker.remote_kv import RemoteKv
from common.worker.request_times import set_times
from common.worker.scheduler import Scheduler
from common.worker.stepping import StepLoop
from common.worker.store_client import StoreClient
from common.worker.traces import WorkerTraces
from common.worker.watchdog import StepWatch

log = logs.get("engine")

TOMBSTONES = 4096


class EngineWorker(Actor):
    """Base of the prefill and the decode actor."""

    config: EngineServiceConfig
    scheduler: Scheduler

    def __init__(
        self, *, bus: Bus, config: EngineServiceConfig, open_engine: OpenEngine, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(bus=bus, config=config, clock=clock)
        self.open_engine = open_engine
        self.host = host_id(config.shm_dir)
        self.held: LeaseTable[Sequence] = LeaseTable(config.lease_s)
        self.outflow, self.speeds = Outflow(self._send_frames), Speeds()
        self.kv = KvCounts(self.metrics, self.lease_ages)
        self.refusing = self.loaded = False
        self._alone: Sequence | None = None
        self.loaded_share = 0.0
        self._cancelled: dict[str, int] = {}
        self._idle = anyio.Event()
        self._threads = EngineThreads()
        self.remote = RemoteKv(self, config, self.kv.transfers)
        self.watch = StepWatch(floor_s=config.step_timeout_s, compile_s=config.compile_timeout_s)

    # -- life

    async def start(self) -> None:
        self.engine = await self._opened()
        runner, keeps = self.engine.runner, not self.config.zero_retention
        self.pool = self.engine.pool(memory_fence(), zero_retention=self.config.zero_retention)
        self.cache = SequenceCache(self.pool, fingerprint=runner.fingerprint)
        self.kv_events = KvEventPublisher(self, self.pool, runner.fingerprint, backlog=self.config.kv_event_backlog)
        shm_dir, transfers = self.config.shm_dir, self.kv.transfers
        blocks, rates = self.engine.blocks(transfers), FetchRates(lambda: self.speeds.prefill_tokens_per_s)
        self.store = StoreClient(self, blocks, runner.fingerprint, shm_dir, enabled=keeps, transfers=transfers, rates=rates)
        self.traces = WorkerTraces(self.tracing, lambda: self.ref, self.clock, self.kv)
        self.scheduler = self.make_scheduler()
        self.prefixes = Prefixes(self)
        self.constraints = Constraints(self, self.engine.files, vocab_size=runner.vocab_size)
        self.loop = StepLoop(
            runner=runner,
            scheduler=self.scheduler,
            steps=self,
            threads=self._threads,
            watch=self.watch,
            clock=self.clock,
        )
        self.counters = EngineMetrics(
            self.metrics,
            model=self.config.served_name,
            usage=self.pool.usage,
            running=lambda: self.scheduler.num_running,
            waiting=lambda: self.scheduler.num_waiting,
        )
        self.loaded = True
        await self.remote.open(self.engine, self.store)

    async def _opened(self) -> Engine:
        """In the thread that submits steps: a library's handles are a thread's own, and warm for the first step then."""
        context, name = contextvars.copy_context(), f"{self.ref.id}-{self.ref.epoch:x}"
        opening = lambda: context.run(self.open_engine, name, self._on_progress)  # noqa: E731
        opened = asyncio.get_running_loop().run_in_executor(self._threads.submitting, opening)
        with anyio.CancelScope(shield=True):  # what has been opened must be closed
            await opened
        return opened.result()

    def _on_progress(self, done: int, total: int) -> None:
        self.loaded_share = done / max(1, total)

    @abstractmethod
    def make_scheduler(self) -> Scheduler: ...

    @abstractmethod
    def commit(self, plan: StepPlan, result: StepResult) -> Callable[[], None]:
        """Commit a step to the scheduler. What is returned tells everyone concerned; it is called once the next step runs."""

    async def work(self) -> None:
        self.task_group.start_soon(self.kv_events.run)
        await self.loop.run()

    def step_ended(self, plan: StepPlan, elapsed_s: float, *, compiled: bool) -> None:
        """A step took so long. compiled: it may have compiled kernels meanwhile, and says nothing of how long others take."""
        self.traces.step_ended(elapsed_s)
        if not compiled:
            self.speeds.measure(plan, elapsed_s)
        self.counters.step(plan, elapsed_s)

    def step_failed(self) -> None:
        self.counters.step_failures.inc()

    def sequence_failed(self, sequence: Sequence) -> None:
        self.fail(sequence, "internal_error", "the engine failed on this request; see the worker's log")

    def wake(self) -> None:
        """Something can be planned that could not be before: a sequence came, a copy has ended, or blocks were given back."""
        self.loop.wake()

    async def drain(self) -> None:
        self.refusing = True
        await self._idle.wait()

    @property
    def num_obligations(self) -> int:
        """What must end before the process may: sequences in work, and results that a gateway has not acknowledged."""
        return len(self.held)

    def close(self) -> None:
        """Give the segment back, once the runner's threads have ended, or hang."""
        if not self._threads.close():
            log.error("engine_thread_hangs", worker=self.ref.id, consequence="the process ends without it")
        if self.loaded:
            self.store.close()
            self.engine.close()

    # -- requests

    def handle(self, message: Message, reply: str) -> None:
        """What gateways say of requests that are held; tasks and the rest are the subclass's."""
        match message:
            case Cancel():
                self.on_cancel(message)
            case Renew():
                self.on_renew(message)
            case FetchFrames():
                self.on_fetch(message)
            case FramesTaken():
                self.outflow.taken(message, self.clock())
            case DescribeMemory():
                self.remote.describe(reply)
            case Explain():
                if (held := self.held.get(message.request)) is not None:
                    self.note_so_far(held)
                self.answer(reply, self.traces.explain(message.request, held))
            case KvSnapshotRequest():
                self.kv_events.on_request(message, reply)
            case _:
                log.warning("unexpected_message", message=type(message).__name__)

    def admit(
        self, generation: Generation, reply: str, take: Callable[[Sequence], None], prefix: KnownTokens | None = None
    ) -> Sequence | None:
        """Answer a task: `take(sequence)` admits it to the scheduler or raises why not. None: refused or held already."""
        request, attempt = generation.request, generation.attempt
        known = self.held.get(request)
        if known is not None and known.attempt == attempt:
            self.answer(reply, Accepted(worker=self.ref))
            return None
        try:
            if self.refusing:
                raise ShuttingDown("this worker is draining")
            if self._cancelled.get(request, -1) >= attempt or (known is not None and known.attempt > attempt):
                raise Cancelled("a later attempt or a cancel came first")
            vocab_size, max_context = self.engine.runner.vocab_size, self.engine.runner.max_context
            sequence = Sequence.of(generation, vocab_size=vocab_size, max_context=max_context, prefix=prefix)
            self._check_company(generation)
            set_times(sequence, self.clock())
            if known is not None:
                self.drop(request)
            take(sequence)
        except PenstockError as error:
            self.answer(reply, Rejected(worker=self.ref, code=error.code, message=str(error)))
            return None
        if generation.alone:
            self._alone = sequence
        self.outflow.open(generation.gateway, generation.window, self.clock())
        self.held.grant(request, generation.gateway, sequence, self.clock())
        self.traces.admitted(sequence)
        if not sequence.is_ready:
            self.constraints.begin(sequence)
        self.counters.prefix_queries.inc(len(sequence.tokens))
        self.counters.prefix_hits.inc(sequence.num_computed)
        self.answer(reply, Accepted(worker=self.ref))
        self.wake()
        return sequence

    @property
    def is_alone(self) -> bool:
        """A request runs here that killed workers before, and has not given a token yet."""
        alone = self._alone
        return alone is not None and len(alone.tokens) == alone.held_from and self.held.get(alone.request) is alone

    def _check_company(self, generation: Generation) -> None:
        """:raises OutOfCredits: if the request, or one that is here, must run alone."""
        others = self.scheduler.num_running + self.scheduler.num_waiting
        if self.is_alone or (generation.alone and others):
            raise OutOfCredits("a request must run alone; this one, or one that is here")

    def is_held(self, sequence: Sequence) -> bool:
        """Whether its gateway still wants it."""
        return self.held.get(sequence.request) is sequence

    def drop(self, request: str) -> None:
        """Free a request and forget it. Harmless for one that is not held."""
        sequence = self.held.release(request)
        if sequence is not None:
            self._let_go(sequence)

    def note_so_far(self, sequence: Sequence) -> None:
        """Somebody asks what happened to a held request: bring its timeline up to date, if the subclass counts elsewhere."""

    def lease_ages(self) -> list[float]:
        """Return the age in seconds of each lease that others hold on this worker's blocks."""
        return []

    def _let_go(self, sequence: Sequence) -> None:
        self.outflow.drop(sequence)
        self.scheduler.cancel(sequence)
        self.dropped(sequence)
        self.traces.left(sequence)
        self.wake()  # somebody may have waited for its blocks

    def dropped(self, sequence: Sequence) -> None:
        """A held request was let go of: free what the subclass holds for it."""

    def fail(self, sequence: Sequence, code: str, message: str) -> None:
        """Tell the gateway that this attempt is over, and forget it."""
        self.traces.failed(sequence, code)
        unsent = sequence.frame(self.outflow.drop(sequence), max_entries=FRAME_ENTRIES)
        frame = msgspec.structs.replace(unsent, finish="error", error_code=code, error_message=message)
        self._send_frames(sequence.generation.gateway, [frame], 0)
        self.drop(sequence.request)

    def fail_broken(self, sequences: Iterable[Sequence]) -> None:
        """Fail those of a committed step whose logits were not finite."""
        for sequence in sequences:
            if sequence.is_broken and self.is_held(sequence):
                self.counters.invalid_logits.inc()
                log.error("logits_not_finite", request=sequence.request, tokens=len(sequence.tokens))
                self.fail(sequence, InvalidLogits.code, "the model's logits for this request are infinite or NaN")

    def _send_frames(self, gateway: WorkerRef, frames: list[TokenFrame], number: int) -> None:
        self.send(gateway, TokenFrames(worker=self.ref, frames=frames, number=number))

    def on_cancel(self, cancel: Cancel) -> None:
        for request, attempt in cancel.requests:
            self._cancelled.pop(request, None)
            self._cancelled[request] = attempt
            if (held := self.held.get(request)) is not None and held.attempt <= attempt:
                self.drop(request)
        while len(self._cancelled) > TOMBSTONES:
            del self._cancelled[next(iter(self._cancelled))]

    def on_renew(self, renew: Renew) -> None:
        mine, unknown = [], []
        for request, attempt in renew.requests:
            held = self.held.get(request)
            (mine if held is not None and held.attempt == attempt else unknown).append((request, attempt))
        self.held.renew(renew.gateway, [request for request, _ in mine], self.clock())
        if unknown:
            self.send(renew.gateway, Unknown(worker=self.ref, requests=unknown))

    def on_fetch(self, fetch: FetchFrames) -> None:
        held = self.held.get(fetch.request)
        if held is None or held.attempt != fetch.attempt:
            self.send(fetch.gateway, Unknown(worker=self.ref, requests=[(fetch.request, fetch.attempt)]))
        elif fetch.start < held.num_outputs:
            self.outflow.again(held, fetch.start)
        else:  # with the end, perhaps; and a sign of life
            self._send_frames(fetch.gateway, [held.frame(fetch.start)], 0)

    @property
    def healthy(self) -> bool:
        """Also: no step has been running for longer than it may."""
        return super().healthy and self.watch.age_s(self.clock()) <= self.watch.limit_s

    def tick(self, now: float) -> None:
        if self.watch.overdue(now, period_s=self.config.heartbeat_s):
            self._give_up_engine(now)
        for request, sequence in self.held.expire(now):
            log.warning("request_expired", request=request, reason="no gateway renewed it")
            self._let_go(sequence)
        for sequence in [s for s in self.held.values() if s.ends_at < now]:
            self.drop(sequence.request)
        self.outflow.tick(now)
        if self.loaded:
            self.kv_events.tick(now)
            self.remote.tick(now, self.host)
        if self.refusing and not self.num_obligations:
            self._idle.set()

    def _give_up_engine(self, now: float) -> None:
        """:raises RunnerLost: gateways go on elsewhere, with the tokens so far, and a supervisor starts this worker again."""
        age_s, limit_s = round(self.watch.age_s(now), 1), round(self.watch.limit_s, 1)
        log.critical("engine_hangs", worker=self.ref.id, step_age_s=age_s, limit_s=limit_s, compiling=self.watch.may_compile)
        self.engine.give_up()
        raise RunnerLost(f"a step has been running for {age_s} s, which may take {limit_s} s")

    def connection_changed(self, connected: bool) -> None:
        (self.held.resume if connected else self.held.pause)(self.clock())
        if connected:
            self.outflow.lost()

    def fenced(self) -> None:
        for sequence in self.held.values():
            self.drop(sequence.request)
        self.outflow.clear()

    # -- presence

    def presence(self, state: WorkerState) -> Presence:
        if not self.loaded:
            return msgspec.structs.replace(super().presence(state), host=self.host, loaded=round(self.loaded_share, 3))
        return Presence(
            worker=self.ref,
            state="draining" if self.refusing else state,
            model=self.config.served_name,
            fingerprint=self.engine.runner.fingerprint,
            host=self.host,
            segment=self.engine.segment.name,
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            credits=0 if self.refusing or self.is_alone else self.scheduler.credits,
            kv=self.pool.usage(),
            prefill_tokens_per_s=round(self.speeds.prefill_tokens_per_s, 1),
            step_ms=round(self.speeds.step_ms, 3),
            tokens_per_s=round(self.speeds.tokens_per_s, 1),
            http_port=self.http_port,
            identity=self.engine.identity,
            named=bool(self.config.served_model_name),
            max_context=min(self.engine.runner.max_context, self.cache.longest_sequence),
            steps=self.watch.num_steps,
            step_age_ms=round(self.watch.age_s(self.clock()) * 1000, 1),
            endpoints=self.remote.endpoints,
            traffic=self.kv.traffic(),
        )
