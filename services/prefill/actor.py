"""The prefill worker: computes prompts, samples the first token, hands the KV over.

The life of a request here:

    PrefillTask ─► admitted ─► prefix copied from the kvstore ─► chunks ─► first token ─► TokenFrames to the gateway
                                                                 └ with each: KvPromise or KvPart to decode (`streams`)
        ─► KvReady to decode ─ Accepted ─► HandedOff; blocks leased until decode releases them or stops renewing
                             └ refused ──► HandoffFailed; parked with its blocks until Redirect, Cancel or lease end

    DecodeTask ─► admitted ─► chunks ─► a token a step: while no decode worker has room, and no prompt waits here

    ReadTask ─► admitted ─► chunks, each with frames of what was scored ─► the last frame; blocks freed
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from common.cache.prefix import TOKEN_BYTES
from common.engine.plan import StepPlan, StepResult
from common.engine.sequence import Sequence
from common.protocol import tokens as token_bytes
from common.protocol.capacity import WINDOW_MS, Capacity
from common.protocol.errors import OutOfBlocks, OutOfCredits, PenstockError, ProtocolError, from_wire
from common.protocol.handles import GroupBlocks, KvHandle, WorkerRef, new_lease
from common.protocol.messages import (
    Accepted,
    Cancel,
    DecodeTask,
    HandedOff,
    HandoffFailed,
    KvReady,
    Message,
    PrefillTask,
    Presence,
    ReadTask,
    Redirect,
    Rejected,
    ReleaseLease,
    RenewLeases,
)
from common.protocol.stream_messages import KvWatched
from common.protocol.transfer_messages import StageLeased, UnstageBlocks
from common.runtime import logs
from common.runtime.actor import WorkerState
from common.runtime.bus import Bus
from common.runtime.lease_metrics import LeaseMetrics
from common.runtime.leases import LeaseTable
from common.transfer.fence import memory_fence
from common.worker.actor import EngineWorker, OpenEngine
from common.worker.early_heartbeats import EarlyHeartbeats
from services.prefill.config import PrefillConfig
from services.prefill.scheduler import PrefillScheduler
from services.prefill.streams import Leased, Stream, Streams

log = logs.get("prefill")


class PrefillActor(EngineWorker):
    role = "prefill"
    hears = ("kvstore",)
    config: PrefillConfig
    scheduler: PrefillScheduler

    def __init__(
        self, *, bus: Bus, config: PrefillConfig, open_engine: OpenEngine, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(bus=bus, config=config, open_engine=open_engine, clock=clock)
        self.leases: LeaseTable[Leased] = LeaseTable(config.lease_s)
        self.metrics.registry.register(LeaseMetrics({"hand-off": self.lease_ages}))
        self.decode_for: dict[str, WorkerRef] = {}
        self.answering = set[str]()
        """Requests that decode here."""
        self.parked: dict[str, Sequence] = {}
        self.lease_of: dict[str, tuple[int, str]] = {}
        self.streams = Streams(self)
        self.early_heartbeats = EarlyHeartbeats(self)

    def make_scheduler(self) -> PrefillScheduler:
        limits = self.config.limits(on_gpu=self.engine.on_gpu)
        return PrefillScheduler(
            self.cache,
            token_budget=limits.token_budget,
            max_running=limits.max_running,
            max_context=self.engine.runner.max_context,
        )

    async def start(self) -> None:
        await super().start()
        self.loop.launched = self.launched
        if not self.engine.tell_progress():
            progress, fence = self.engine.segment.progress, memory_fence()

            def ran(plan: StepPlan) -> None:
                if plan.step:  # a probe has none
                    fence()  # what the step has written comes before the word that says so
                    progress[0] = plan.step

            self._threads.ran = ran

    @property
    def num_obligations(self) -> int:
        return len(self.held) + len(self.leases)

    def lease_ages(self) -> list[float]:
        return [age_s for _, age_s in self.leases.ages(self.clock())]

    def handle(self, message: Message, reply: str) -> None:
        if not self.loaded:
            return
        match message:
            case PrefillTask():
                self.on_task(message, reply)
            case DecodeTask():
                self.on_decode(message, reply)
            case ReadTask():
                self.on_read(message, reply)
            case ReleaseLease():
                for lease in message.leases:
                    self.end_lease(lease)
            case KvWatched():
                self.streams.watched(message.holder, message.streams)
            case RenewLeases():
                self.leases.renew(message.holder, message.leases, self.clock())
            case Redirect():
                self.on_redirect(message)
            case StageLeased():
                leased = self.leases.get(message.lease) if self.leases.holder(message.lease) == message.holder else None
                self.remote.stage(self, message, None if leased is None else leased.tables, reply)
            case UnstageBlocks():
                self.remote.unstage(message.stages)
            case _:
                super().handle(message, reply)

    def on_task(self, task: PrefillTask, reply: str) -> None:
        sequence = self.admit(task.generation, reply, lambda s: self.scheduler.admit(s, self.clock()))
        if sequence is not None:
            self.decode_for[sequence.request] = task.decode
            self.prefixes.fetch(sequence)
            self.early_heartbeats.admitted(sequence)

    def on_decode(self, task: DecodeTask, reply: str) -> None:
        sequence = self.admit(task.generation, reply, lambda s: self.scheduler.admit(s, self.clock(), keeps=True))
        if sequence is not None:
            self.answering.add(sequence.request)
            self.prefixes.fetch(sequence)
            self.early_heartbeats.admitted(sequence)

    def on_read(self, task: ReadTask, reply: str) -> None:
        sequence = self.admit(task.generation, reply, lambda s: self.scheduler.admit(s, self.clock()))
        if sequence is not None:
            self.prefixes.fetch(sequence)
            self.early_heartbeats.admitted(sequence)

    def commit(self, plan: StepPlan, result: StepResult) -> Callable[[], None]:
        done = self.scheduler.commit(plan, result, self.clock())
        advanced = self.scheduler.advanced
        self.traces.committed()
        return lambda: self.report(done, advanced)

    def launched(self, plan: StepPlan, due_s: float) -> None:
        """A step is on its way: what it will have computed of prompts is promised to decode workers."""
        for sequence, row in zip(self.scheduler.planned(plan.step), plan.rows, strict=False):
            decode = self.decode_for.get(sequence.request)
            if decode is not None and self.is_held(sequence) and sequence.num_steps:
                self.streams.promise(sequence, decode, row.start + len(row.tokens), plan.step, due_s)

    def step_failed(self) -> None:
        super().step_failed()
        self.streams.step_failed()

    def report(self, news: list[Sequence], advanced: list[Sequence]) -> None:
        """First tokens and what was read go to their gateways, and KV to the decode workers: of `advanced`, which are not at
        their end, as it is computed, and all of it behind first tokens."""
        self.fail_broken(news)
        for sequence in advanced:
            decode = self.decode_for.get(sequence.request)
            if decode is not None and self.is_held(sequence):
                self.streams.advance(sequence, decode)
        for sequence in news:
            if sequence.is_read:
                self.report_reading(sequence)
        done = [sequence for sequence in news if not (sequence.is_read or sequence.is_broken)]
        newest = [(sequence, sequence.num_outputs - 1) for sequence in done]
        self.constraints.check(newest)
        newest = [(sequence, start) for sequence, start in newest if self.is_held(sequence)]
        for sequence, _ in newest:
            if sequence.finish is None and sequence.request not in self.answering:
                self.streams.advance_last(sequence, self.decode_for[sequence.request])
        first: list[tuple[Sequence, int]] = []
        later: list[tuple[Sequence, int]] = []
        for sequence, start in newest:
            (later if start > 0 and sequence.request in self.answering else first).append((sequence, start))
        self.outflow.put(first, urgent=True)
        self.outflow.put(later)
        self.counters.generation_tokens.inc(len(done))
        for sequence in done:
            if sequence.request in self.answering:
                self.report_answer(sequence)
                continue
            goes_on = sequence.finish is None and self.is_held(sequence)
            if goes_on:
                self.parked[sequence.request] = sequence
                self.task_group.start_soon(self.hand_off, sequence)
            self.prefixes.offer_soon(sequence)  # behind the hand-off: somebody waits for that
            if not goes_on:
                self.streams.withdraw(sequence)
                self.cache.close(sequence)

    def report_answer(self, sequence: Sequence) -> None:
        """Of one that decodes here: its scheduler frees the blocks."""
        if sequence.num_outputs == 1:
            self.prefixes.offer_soon(sequence)
        if sequence.finish is not None:
            self.traces.finished(sequence)
            self.answering.discard(sequence.request)

    def report_reading(self, sequence: Sequence) -> None:
        if sequence.finish is not None:
            self.cache.close(sequence)
        if self.is_held(sequence):
            self.outflow.read(sequence)

    def on_redirect(self, redirect: Redirect) -> None:
        sequence = self.parked.get(redirect.request)
        if sequence is not None and sequence.attempt == redirect.attempt:
            self.decode_for[redirect.request] = redirect.decode
            self.task_group.start_soon(self.hand_off, sequence)

    async def hand_off(self, sequence: Sequence) -> None:
        """Lease the blocks to the decode worker and ask it to take the request."""
        decode = self.decode_for.get(sequence.request)
        if decode is None or self.parked.get(sequence.request) is not sequence:
            return
        lease, stream = self.lease_for(sequence, decode)
        began_at, sent_at = self.clock(), 0.0
        try:
            ready = self.kv_ready(sequence, lease, stream)
            groups = await self.remote.with_checksums(ready.handle.groups, () if stream is None else stream.checksums)
            ready = msgspec.structs.replace(ready, handle=msgspec.structs.replace(ready.handle, groups=groups))
            sent_at = self.clock()
            answer = await self.ask(decode, ready, self.config.handoff_timeout_s, repeat=True)
            if isinstance(answer, Rejected):
                raise from_wire(answer.code, answer.message)
            if not isinstance(answer, Accepted):
                raise ProtocolError(f"{type(answer).__name__} is no answer to KvReady")
        except PenstockError as error:
            if stream is not None:
                self.streams.refused(stream)
            self.end_lease(lease)
            self.traces.handed_off(sequence, began_at, decode.id, error.code, sent_at=sent_at)
            if self.parked.get(sequence.request) is sequence:
                tell = log.info if isinstance(error, OutOfBlocks | OutOfCredits) else log.warning  # full workers refuse
                tell("handoff_failed", request=sequence.request, decode=decode.id, code=error.code, reason=str(error))
                failed = HandoffFailed(worker=self.ref, request=sequence.request, attempt=sequence.attempt, code=error.code)
                self.send(sequence.generation.gateway, failed)
            return
        self.traces.handed_off(sequence, began_at, decode.id, sent_at=sent_at)
        if self.parked.get(sequence.request) is sequence:
            handed = HandedOff(worker=self.ref, request=sequence.request, attempt=sequence.attempt, decode=decode)
            self.send(sequence.generation.gateway, handed)
            self.drop(sequence.request)

    def lease_for(self, sequence: Sequence, decode: WorkerRef) -> tuple[str, Stream | None]:
        """Return a lease on all blocks of a prompt, that of its stream if it has been streamed to `decode`."""
        tables, now = [list(table) for table in sequence.tables], self.clock()
        stream = self.streams.finish(sequence, decode)
        if stream is not None and self.leases.move(stream.lease, decode, now):
            told = stream.leased.tables
            if all(table[: len(part)] == part for table, part in zip(tables, told, strict=True)):
                self.pool.lease([table[len(part) :] for table, part in zip(tables, told, strict=True)])
            else:  # a group that keeps a window
                self.pool.lease(tables)
                self.pool.end_lease(told)
            told[:] = tables
            lease = stream.lease
        else:
            lease, stream = new_lease(), None
            self.pool.lease(tables)
            self.leases.grant(lease, decode, Leased(sequence.request, sequence.attempt, tables), now)
        self.lease_of[sequence.request] = (sequence.attempt, lease)
        return lease, stream

    def kv_ready(self, sequence: Sequence, lease: str, stream: Stream | None = None) -> KvReady:
        covered, packed = sequence.num_computed, sequence.generation.tokens
        hashes = self.cache.hash(sequence, covered)
        groups: list[GroupBlocks] = []
        for index, (group, table) in enumerate(zip(self.pool.groups, sequence.tables, strict=True)):
            first = self.cache.first_block(index, covered)
            blocks = table[first : self.cache.blocks_for(covered)]
            start = first * self.cache.block_tokens
            groups.append(GroupBlocks(index, blocks, group.pool.generations_of(blocks), start, covered))
        return KvReady(
            generation=msgspec.structs.replace(
                sequence.generation,
                tokens=packed + token_bytes.pack(sequence.tokens[len(packed) // TOKEN_BYTES :]),
                remaining_ms=max(1, int((sequence.ends_at - self.clock()) * 1000)),
            ),
            handle=KvHandle(
                owner=self.ref,
                lease=lease,
                fingerprint=self.engine.runner.fingerprint,
                num_tokens=covered,
                chain=hashes[-1] if hashes else b"",
                groups=groups,
            ),
            first_logprobs=sequence.logprobs[-1] if sequence.logprobs else None,
            cached_tokens=sequence.num_cached,
            stream="" if stream is None else stream.name,
        )

    def on_cancel(self, cancel: Cancel) -> None:
        """Also ends leases at once: a reader that is still copying sees the generations change, and throws its copy away."""
        super().on_cancel(cancel)
        for request, attempt in cancel.requests:
            leased_attempt, lease = self.lease_of.get(request, (attempt + 1, ""))
            if leased_attempt <= attempt:
                self.end_lease(lease)

    def dropped(self, sequence: Sequence) -> None:
        self.streams.withdraw(sequence)
        self.decode_for.pop(sequence.request, None)
        self.answering.discard(sequence.request)
        if self.parked.get(sequence.request) is sequence:
            del self.parked[sequence.request]
            self.cache.close(sequence)

    def end_lease(self, lease: str) -> None:
        leased = self.leases.release(lease)
        if leased is not None:
            self.forget_lease(lease, leased)

    def forget_lease(self, lease: str, leased: Leased) -> None:
        self.streams.lease_ended(lease)
        self.remote.lease_ended(lease)
        self.pool.end_lease(leased.tables)
        self.wake()  # a group that gives blocks step by step may have had none left
        if self.lease_of.get(leased.request) == (leased.attempt, lease):
            del self.lease_of[leased.request]

    def presence(self, state: WorkerState) -> Presence:
        said = super().presence(state)
        if not self.loaded:
            return said
        tokens = int(self.speeds.prefill_tokens_per_s * WINDOW_MS / 1000)
        scheduler = self.scheduler
        capacity = Capacity(tokens, scheduler.uncomputed_tokens, 0.0, scheduler.credits)
        return msgspec.structs.replace(said, capacity=capacity)

    def tick(self, now: float) -> None:
        super().tick(now)
        for lease, leased in self.leases.expire(now):
            log.warning("kv_lease_expired", request=leased.request, blocks=sum(map(len, leased.tables)))
            self.forget_lease(lease, leased)

    def connection_changed(self, connected: bool) -> None:
        super().connection_changed(connected)
        (self.leases.resume if connected else self.leases.pause)(self.clock())

    def fenced(self) -> None:
        super().fenced()
        self.streams.clear()
        for lease, leased in self.leases.clear():
            self.forget_lease(lease, leased)
