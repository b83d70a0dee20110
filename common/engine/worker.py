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
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import anyio
import msgspec

from common.cache.pool import BlockPool
from common.cache.store_client import StoreClient
from common.engine.engine import Engine, OpenEngine
from common.engine.metrics import EngineMetrics
from common.engine.plan import RunnerLost, StepPlan, StepResult
from common.engine.sequence import Sequence, SequenceCache
from common.engine.settings import EngineServiceConfig
from common.engine.speeds import Speeds
from common.protocol import messages
from common.protocol.errors import Cancelled, PenstockError, ShuttingDown
from common.protocol.handles import WorkerRef
from common.protocol.messages import (
    Accepted,
    Cancel,
    FetchFrames,
    Generation,
    Message,
    Presence,
    Rejected,
    Renew,
    Unknown,
)
from common.runtime import logs
from common.runtime.actor import Actor, WorkerState
from common.runtime.bus import Bus
from common.runtime.leases import LeaseTable
from common.transfer.shm import host_id

log = logs.get("engine")

TOMBSTONES = 4096


class Scheduler(Protocol):
    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def credits(self) -> int: ...
    def plan(self, now: float) -> StepPlan | None: ...
    def abandon(self) -> list[Sequence]: ...
    def cancel(self, sequence: Sequence) -> None: ...
    def begin_copy(self, sequence: Sequence) -> None: ...
    def end_copy(self, sequence: Sequence, num_computed: int) -> None: ...


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
        self.refusing = False
        self.speeds = Speeds()
        self.loaded = False
        self.loaded_share = 0.0
        self._cancelled: dict[str, int] = {}
        self._wake = anyio.Event()
        self._idle = anyio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._submitting = ThreadPoolExecutor(1, thread_name_prefix="submit")

    # -- life

    async def start(self) -> None:
        self.engine = await self._opened()
        runner, segment = self.engine.runner, self.engine.segment
        self.pool = BlockPool(runner.num_blocks, runner.block_tokens, segment.generations)
        self.cache = SequenceCache(self.pool, block_tokens=runner.block_tokens, fingerprint=runner.fingerprint)
        self.store = StoreClient(self, segment.blocks, runner.fingerprint, self.config.shm_dir)
        self.scheduler = self.make_scheduler()
        self.counters = EngineMetrics(
            self.metrics,
            usage=self.pool.usage,
            running=lambda: self.scheduler.num_running,
            waiting=lambda: self.scheduler.num_waiting,
        )
        self.loaded = True

    async def _opened(self) -> Engine:
        """In the thread that submits steps: a library's handles are a thread's own, and warm for the first step then."""
        context, name = contextvars.copy_context(), f"{self.ref.id}-{self.ref.epoch:x}"
        opening = lambda: context.run(self.open_engine, name, self._on_progress)  # noqa: E731
        opened = asyncio.get_running_loop().run_in_executor(self._submitting, opening)
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
        """Plan, execute, commit, for ever. While a step runs, messages are handled, the step before is reported and, with a
        runner that runs ahead, the next one is planned and submitted.

        What a message changes meanwhile, a cancel above all, the scheduler defers where a running step depends on it.
        """
        report = _nothing
        flights: deque[tuple[StepPlan, asyncio.Future[StepResult]]] = deque()
        ended = self.clock()
        while True:
            if len(flights) < self.engine.runner.run_ahead and (plan := self.scheduler.plan(self.clock())) is not None:
                flights.append((plan, self._start(plan)))
                continue
            report()
            report = _nothing
            if not flights:
                self._wake = anyio.Event()
                await self._wake.wait()
                ended = self.clock()
                continue
            plan, running = flights.popleft()
            try:
                result = await running
            except RunnerLost:
                log.critical("engine_lost", step=plan.step, rows=len(plan.rows))
                raise  # nobody is told that a request failed: gateways go on elsewhere, with the tokens so far
            except Exception:
                log.exception("step_failed", step=plan.step, rows=len(plan.rows))
                self.counters.step_failures.inc()
                await asyncio.gather(*(later for _, later in flights), return_exceptions=True)
                flights.clear()
                for sequence in self.scheduler.abandon():
                    self.fail(sequence, "internal_error", "the engine failed on this request; see the worker's log")
                continue
            began, ended = ended, self.clock()
            self.speeds.measure(plan, ended - began)
            self.counters.step(plan, ended - began)
            report = self.commit(plan, result)

    def _start(self, plan: StepPlan) -> asyncio.Future[StepResult]:
        """A step on its way, behind those that are."""
        loop, runner = asyncio.get_running_loop(), self.engine.runner
        if runner.run_ahead == 1:
            return loop.run_in_executor(self._thread, runner.execute, plan)
        submitted = self._submitting.submit(runner.submit, plan)
        return loop.run_in_executor(self._thread, lambda: submitted.result().result())

    def wake(self) -> None:
        """Something can be planned that could not be before: a sequence came, a copy has ended, or blocks were given back."""
        self._wake.set()

    async def drain(self) -> None:
        self.refusing = True
        await self._idle.wait()

    @property
    def num_obligations(self) -> int:
        """What must end before the process may: sequences in work, and results that a gateway has not acknowledged."""
        return len(self.held)

    def close(self) -> None:
        """Give the segment back, once the runner's thread has ended."""
        self._submitting.shutdown(wait=True)
        self._thread.shutdown(wait=True)
        if self.loaded:
            self.store.close()
            self.engine.segment.close()

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
            case _:
                log.warning("unexpected_message", message=type(message).__name__)

    def admit(self, generation: Generation, reply: str, take: Callable[[Sequence], None]) -> Sequence | None:
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
            sequence = Sequence.of(
                generation, vocab_size=self.engine.runner.vocab_size, max_context=self.engine.runner.max_context
            )
            if known is not None:
                self.drop(request)
            take(sequence)
        except PenstockError as error:
            self.answer(reply, Rejected(worker=self.ref, code=error.code, message=str(error)))
            return None
        self.held.grant(request, generation.gateway, sequence, self.clock())
        self.counters.prefix_queries.inc(len(sequence.tokens))
        self.counters.prefix_hits.inc(sequence.num_computed)
        self.answer(reply, Accepted(worker=self.ref))
        self.wake()
        return sequence

    def drop(self, request: str) -> None:
        """Free a request and forget it. Harmless for one that is not held."""
        sequence = self.held.release(request)
        if sequence is not None:
            self.scheduler.cancel(sequence)
            self.dropped(sequence)
            self.wake()  # somebody may have waited for its blocks

    def dropped(self, sequence: Sequence) -> None:
        """A held request was let go of: free what the subclass holds for it."""

    def fail(self, sequence: Sequence, code: str, message: str) -> None:
        """Tell the gateway that this attempt is over, and forget it."""
        frame = messages.TokenFrame(
            request=sequence.request,
            attempt=sequence.attempt,
            start=sequence.num_outputs,
            tokens=[],
            finish="error",
            error_code=code,
            error_message=message,
        )
        self.send(sequence.generation.gateway, messages.TokenFrames(worker=self.ref, frames=[frame]))
        self.drop(sequence.request)

    def on_cancel(self, cancel: Cancel) -> None:
        for request, attempt in cancel.requests:
            self._cancelled.pop(request, None)
            self._cancelled[request] = attempt
            held = self.held.get(request)
            if held is not None and held.attempt <= attempt:
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
        else:  # an empty frame, when there is nothing new, is a sign of life
            self.send(fetch.gateway, messages.TokenFrames(worker=self.ref, frames=[held.frame(fetch.start)]))

    def tick(self, now: float) -> None:
        for request, sequence in self.held.expire(now):
            log.warning("request_expired", request=request, reason="no gateway renewed it")
            self.scheduler.cancel(sequence)
            self.dropped(sequence)
            self.wake()
        wall_ms = time.time() * 1000
        for sequence in [s for s in self.held.values() if s.generation.deadline_ms < wall_ms]:
            self.drop(sequence.request)
        if self.refusing and not self.num_obligations:
            self._idle.set()

    def connection_changed(self, connected: bool) -> None:
        (self.held.resume if connected else self.held.pause)(self.clock())

    def fenced(self) -> None:
        for sequence in self.held.values():
            self.drop(sequence.request)

    # -- KV copies

    def fetch_prefix(self, sequence: Sequence) -> None:
        """Fill the blocks behind the local prefix from a kvstore, if that could save work; the sequence runs afterwards.

        Call it in the turn that admitted the sequence: from then on a step may be planned with it.
        """
        if self.store.available and len(sequence.tokens) - sequence.num_computed > self.cache.block_tokens:
            self.scheduler.begin_copy(sequence)
            self.task_group.start_soon(self._fetch_prefix, sequence)

    async def _fetch_prefix(self, sequence: Sequence) -> None:
        have = sequence.num_computed // self.cache.block_tokens
        copied = 0
        try:
            hashes = self.cache.hash(sequence, len(sequence.tokens) - 1)
            copied = await self.store.fetch(hashes[have:], sequence.blocks[have : len(hashes)])
        finally:
            num_computed = (have + copied) * self.cache.block_tokens
            sequence.num_cached = min(num_computed, sequence.generation.prompt_tokens)
            self.counters.prefix_hits.inc(copied * self.cache.block_tokens)
            self.scheduler.end_copy(sequence, num_computed)
            self.wake()

    async def offer(self, blocks: list[int], hashes: list[bytes]) -> None:
        """Give full blocks to the kvstore. The caller retained them; they are released here, whatever happens."""
        try:
            await self.store.offer(hashes, blocks)
        finally:
            self.pool.release(blocks)
            self.wake()

    def offer_soon(self, sequence: Sequence) -> None:
        """Offer the full blocks of a sequence in the background; call before its blocks are freed."""
        hashes = self.cache.hash(sequence, sequence.num_computed)
        blocks = sequence.blocks[: len(hashes)]
        if blocks and self.store.available:
            self.pool.retain(blocks)
            self.task_group.start_soon(self.offer, blocks, list(hashes))

    # -- presence

    def presence(self, state: WorkerState) -> Presence:
        if not self.loaded:
            starting = super().presence(state)
            return msgspec.structs.replace(starting, host=self.host, loaded=round(self.loaded_share, 3))
        return Presence(
            worker=self.ref,
            state="draining" if self.refusing else state,
            model=self.config.served_name,
            fingerprint=self.engine.runner.fingerprint,
            host=self.host,
            segment=self.engine.segment.name,
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            credits=0 if self.refusing else self.scheduler.credits,
            kv=self.pool.usage(),
            prefill_tokens_per_s=round(self.speeds.prefill_tokens_per_s, 1),
            step_ms=round(self.speeds.step_ms, 3),
            tokens_per_s=round(self.speeds.tokens_per_s, 1),
            http_port=self.http_port,
            identity=self.engine.identity,
            max_context=min(self.engine.runner.max_context, self.cache.longest_sequence),
        )


def _nothing() -> None:
    """There is no step to report."""


def send_frames(worker: Actor, news: Iterable[tuple[Sequence, int]]) -> None:
    """Send what a step generated, one message per gateway: for each sequence its tokens from an output index on."""
    grouped: dict[WorkerRef, list[messages.TokenFrame]] = {}
    for sequence, start in news:
        grouped.setdefault(sequence.generation.gateway, []).append(sequence.frame(start))
    for gateway, frames in grouped.items():
        worker.send(gateway, messages.TokenFrames(worker=worker.ref, frames=frames))
