"""The decode worker: runs every sequence one token (or a verified handful) further per step.

The life of a request here:

    KvPart … ─► of a long prompt, blocks are pulled while the rest is computed
    KvReady ─► admitted ─► blocks pulled from the prefill worker, lease released ─► running ─► TokenFrames each step ─► finished
                            └ stale, unreadable, another layout: recomputed here, the same tokens
    DecodeTask ─► admitted ─► prefix copied from the kvstore ─► prompt computed here in chunks ─► running ─► …

Draft workers are told what each step fixed; what they propose is verified in the next one. Nothing waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import anyio
import msgspec

from common.cache.grouped_pool import Arrived
from common.engine.plan import StepPlan, StepResult
from common.engine.sequence import Sequence
from common.protocol.capacity import Capacity
from common.protocol.draft_messages import Drafting, DraftResync, DraftUpdate, Proposals
from common.protocol.errors import OutOfBlocks, OutOfCredits
from common.protocol.explain_messages import RequestContext
from common.protocol.messages import Cancel, DecodeTask, KvReady, Message, Presence, ReadTask
from common.protocol.stream_messages import KvPart, KvPromise, KvWithdrawn
from common.protocol.trace_context import child_of
from common.runtime import logs
from common.runtime.actor import WorkerState
from common.runtime.bus import Bus
from common.runtime.cores import usable_cores
from common.text.vocabulary import vocabulary_digest
from common.transfer.base import Transport
from common.transfer.measured import MeasuredTransport
from common.worker.actor import EngineWorker, OpenEngine
from common.worker.early_heartbeats import EarlyHeartbeats
from common.worker.engine_threads import MIN_POLLING_CORES
from services.decode.arrivals import Arrivals
from services.decode.config import DecodeConfig
from services.decode.device_head import DeviceHeadDrafts
from services.decode.device_lookup import DeviceLookup
from services.decode.draft_trial import DraftTrial
from services.decode.head_drafts import HeadDrafts
from services.decode.kept_place import KeptPlace
from services.decode.kv_reader import KvReader, covered_blocks
from services.decode.lookup import Lookup
from services.decode.posting import Posting
from services.decode.prompt_budget import PromptBudget
from services.decode.proposers import Proposers
from services.decode.scheduler import DecodeScheduler, Progress
from services.decode.speculation import DraftBook
from services.decode.speculation_policy import SpeculationPolicy
from services.decode.telemetry import SpeculationTelemetry

log = logs.get("decode")

LOOKUP_TOKENS = 1 << 19
"""Tokens of all running sequences that are looked up in, about 40 MB; each sequence has an equal share."""
MAX_AT_HAND_TOKENS = 128
"""Of a step that is submitted by the event loop, which does nothing else meanwhile."""
RECENT_TOKENS = 1 << 17
"""Tokens of ended answers that are looked up in, about 10 MB."""


class DecodeActor(EngineWorker):
    role = "decode"
    hears = ("prefill", "draft", "kvstore")
    config: DecodeConfig
    scheduler: DecodeScheduler

    def __init__(
        self,
        *,
        bus: Bus,
        config: DecodeConfig,
        open_engine: OpenEngine,
        transport: Transport,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(bus=bus, config=config, open_engine=open_engine, clock=clock)
        self.transport = MeasuredTransport(transport, self.kv.transfers)
        self.kv_reader = KvReader(self)
        self.early_heartbeats = EarlyHeartbeats(self)
        self.kept_place = KeptPlace(lapse_s=max(2.0, 4 * config.heartbeat_s))  # offers come twice a second
        self.vocabulary = ""

    async def start(self) -> None:
        await super().start()
        self.loop.tells_first = lambda: self.drafts.expects_proposals
        self.loop.settle = self.settle
        if self.engine.on_gpu and usable_cores() >= MIN_POLLING_CORES:
            self.loop.at_hand = self.is_at_hand
        if self.config.speculation_tokens and self.engine.files is not None:
            self.vocabulary = await anyio.to_thread.run_sync(
                vocabulary_digest, self.engine.files, self.engine.runner.vocab_size
            )

    def make_scheduler(self) -> DecodeScheduler:
        limits = self.config.limits(on_gpu=self.engine.on_gpu)
        self.num_preemptions, self.step_s = 0, 0.0
        always = self.config.verify == "always"
        self.max_proposal = self.config.max_proposal(on_gpu=self.engine.on_gpu)
        policy = SpeculationPolicy(max_tokens=self.max_proposal, max_step_tokens=self.config.max_verify_tokens, always=always)
        self.drafts = DraftBook(policy, vocab_size=self.engine.runner.vocab_size, trial=DraftTrial(enabled=not always))
        has_head, slots = bool(self.engine.head and self.config.speculation_tokens), self.engine.head_slots
        head = HeadDrafts(policy) if has_head and slots is None else None
        device_head = DeviceHeadDrafts(policy, slots) if has_head and slots is not None else None
        lookup = [self.make_lookup(limits.max_running)] if self.looks_up else []
        on_device = DeviceLookup(policy) if self.engine.looks_up else None
        # a row takes from one slot of the board, the head's or that of draft workers
        posting = None if self.engine.board is None or device_head is not None else Posting(self.engine.board, self.drafts)
        self.proposers = Proposers(self.drafts, lookup, head, on_device, posting, device_head)
        self.speculation = SpeculationTelemetry(self.metrics, self.config.served_name, self.proposers)
        self.prompts = PromptBudget(self.config.slo_itl_ms / 1000)
        self.arrivals = Arrivals(self, max_streams=limits.max_running)
        return DecodeScheduler(
            self.cache,
            prompt_limit=self.prompts.limit,
            token_budget=limits.token_budget,
            max_running=limits.max_running,
            max_context=self.engine.runner.max_context,
            propose=self.proposers.propose,
            begin_step=self.proposers.begin_step,
            wanted=self.proposers.wanted,
            finishing=lambda sequence: self.prefixes.offer_soon(sequence),
            resumed=self.traces.resumed,
            recompute=self.proposers.recompute,
            foresee=self.proposers.foresee,
            room_for=self.proposers.room_for,
        )

    @property
    def looks_up(self) -> bool:
        """Whether this process proposes tokens by lookup, its engine's steps not counted."""
        if self.config.lookup == "auto":
            return self.max_proposal > 0 and not self.engine.on_gpu and self.config.engine == "torch"
        on_host = self.config.lookup == "host" or (self.config.lookup == "on" and not self.engine.on_gpu)
        return self.max_proposal > 0 and on_host

    def make_lookup(self, max_running: int) -> Lookup:
        recent = 0 if self.config.zero_retention else RECENT_TOKENS
        return Lookup(max_tokens=LOOKUP_TOKENS // max(1, max_running), max_recent_tokens=recent)

    def handle(self, message: Message, reply: str) -> None:
        if not self.loaded:
            return
        match message:
            case Proposals():
                self.on_proposals(message)
            case DraftResync():
                self.drafts.on_resync(message)
            case KvPart() | KvPromise():
                self.on_part(message)
            case KvWithdrawn():
                self.arrivals.withdraw(message.owner, message.streams)
            case KvReady():
                if self.arrivals.is_beginning(message.stream):
                    self.task_group.start_soon(self.kv_ready_later, message, reply)
                else:
                    self.on_kv_ready(message, reply)
            case DecodeTask():
                self.on_task(message, reply)
            case ReadTask():
                self.on_read(message, reply)
            case _:
                super().handle(message, reply)

    # -- tasks

    def on_task(self, task: DecodeTask, reply: str) -> None:
        sequence = self.admit(task.generation, reply, self.take_in)
        if sequence is not None:
            self.speculate(sequence)
            self.prefixes.fetch(sequence)
            self.early_heartbeats.admitted(sequence)

    def on_read(self, task: ReadTask, reply: str) -> None:
        sequence = self.admit(task.generation, reply, self.take_in)
        if sequence is not None:
            self.prefixes.fetch(sequence)
            self.early_heartbeats.admitted(sequence)

    def take_in(self, sequence: Sequence, arrived: Arrived = ()) -> None:
        """Admit a sequence to the scheduler. :raises PenstockError: it has no place; see `DecodeScheduler.admit`."""
        now = self.clock()
        self.kept_place.check(sequence.request, now)
        try:
            self.scheduler.admit(sequence, arrived)
        except (OutOfBlocks, OutOfCredits):
            if self.scheduler.num_held < self.scheduler.max_running:  # it lacks blocks, or those that were preempted do
                self.kept_place.refused(sequence.request, sequence.length, now)
            raise
        self.kept_place.admitted(sequence.request)

    def on_kv_ready(self, ready: KvReady, reply: str) -> None:
        heard_at = self.clock()

        def take(sequence: Sequence) -> None:
            covered_blocks(ready.handle, len(sequence.tokens), self.cache)
            arrived = self.arrivals.usable(arrival, ready, sequence)
            sequence.num_cached = ready.cached_tokens
            if ready.first_logprobs is not None:
                sequence.held_from -= 1
                sequence.logprobs.append(ready.first_logprobs)
            self.take_in(sequence, arrived)
            if arrival is not None:
                self.arrivals.take(arrival, arrived)

        arrival = self.arrivals.find(ready)
        sequence = self.admit(ready.generation, reply, take, None if arrival is None else arrival.prompt)
        if sequence is not None:
            self.speculate(sequence)
            self.kv_reader.begin(sequence, ready.handle, arrival, heard_at)

    async def kv_ready_later(self, ready: KvReady, reply: str) -> None:
        """The last part came just before: first its copy begins, so that the sequence is admitted with those blocks."""
        try:
            self.on_kv_ready(ready, reply)
        except Exception:
            self._on_handler_error(ready, reply)

    # -- steps

    def step_ended(self, plan: StepPlan, elapsed_s: float, *, compiled: bool) -> None:
        super().step_ended(plan, elapsed_s, compiled=compiled)
        self.step_s = elapsed_s
        if not compiled:
            prompts = [len(row.tokens) for row in plan.rows if len(row.tokens) > 1 and row.is_prompt_part]
            self.prompts.observe(rows=len(plan.rows) - len(prompts), prompt_tokens=sum(prompts), seconds=elapsed_s)

    def is_at_hand(self, plan: StepPlan) -> bool:
        """Whether draft workers wait for what a small step gives. What is constrained waits for the step before when it is
        submitted."""
        if plan.num_tokens > MAX_AT_HAND_TOKENS or not self.drafts.expects_proposals:
            return False
        return not any(row.is_constrained for row in plan.rows)

    def commit(self, plan: StepPlan, result: StepResult) -> Callable[[], None]:
        now = self.clock()
        progress = self.scheduler.commit(plan, result, now)
        self.speculation.decided(((done.sequence.request, len(done.sequence.tokens)) for done in progress), now)
        if self.drafts.expects_proposals:
            self.tell_drafts()
        self.unsettled = plan, progress
        return lambda: self.report(plan, result, progress)

    def settle(self) -> None:
        """Note what a step gave, for plans of later ones. A request may have ended meanwhile."""
        plan, progress = self.unsettled
        for done in progress:
            self.proposers.record(done)
        self.try_drafts(plan, progress)

    def measure(self, plan: StepPlan, result: StepResult, progress: list[Progress]) -> None:
        """Note how long a step took, and what it did."""
        self.traces.committed()
        self.counters.preemptions.inc(self.scheduler.num_preemptions - self.num_preemptions)
        self.num_preemptions = self.scheduler.num_preemptions
        self.proposers.measure(plan, self.step_s, result.passes)

    def try_drafts(self, plan: StepPlan, progress: list[Progress]) -> None:
        """Note the pace of a step that only decodes: is it worth while to ask draft workers?"""
        rows, most = len(plan.rows), 1 + self.max_proposal
        if len(progress) == rows and plan.num_tokens <= most * rows and self.drafts.is_mirrored:
            gained = sum(done.sequence.num_outputs - done.start for done in progress)
            self.drafts.trial.step(rows, gained, self.step_s, self.drafts.are_caught_up)

    def report(self, plan: StepPlan, result: StepResult, progress: list[Progress]) -> None:
        """Tell the draft workers and then the gateways what a step did. A proposal that comes later may miss the next step."""
        self.fail_broken([done.sequence for done in progress])
        self.tell_drafts()
        self.measure(plan, result, progress)
        for done in progress:
            if done.sequence.is_read and self.is_held(done.sequence):
                self.outflow.read(done.sequence)
        progress = [done for done in progress if not done.sequence.is_read]
        self.constraints.check((done.sequence, done.start) for done in progress)
        self.outflow.put((done.sequence, done.start) for done in progress if self.is_held(done.sequence))
        self.counters.generation_tokens.inc(sum(done.sequence.num_outputs - done.start for done in progress))
        for done in progress:
            if done.start == 0 and not self.cache.keeps_all:
                self.prefixes.offer_soon(done.sequence)  # windows leave their tail behind the prompt as the answer grows
            if done.proposed and not done.forced:  # as in vLLM, what a grammar forces is no draft
                self.counters.drafts.inc()
                self.counters.draft_tokens.inc(done.proposed)
                self.counters.accepted_tokens.inc(done.accepted)
            if done.sequence.finish is not None:
                self.traces.finished(done.sequence)
                self.dropped(done.sequence)
        if any(done.sequence.finish is not None for done in progress):
            self.tell_drafts()
        self.proposers.tidy()

    def tell_drafts(self) -> None:
        for worker, message in self.drafts.messages(self.ref):
            self.send(worker, message)
            if isinstance(message, DraftUpdate):
                self.speculation.asked(message, self.clock())

    def may_draft(self, draft: Presence) -> bool:
        """Whether a draft worker's proposals are in this model's vocabulary: it serves the model, and if it has a model of its
        own, that has the same tokenizer."""
        return draft.model in ("", self.config.served_name) and draft.vocabulary in ("", self.vocabulary)

    def on_proposals(self, message: Proposals) -> None:
        now = self.clock()
        self.speculation.answered(message, now)
        self.speculation.came_late(self.proposers.on_proposals(message), now)

    def speculate(self, sequence: Sequence) -> None:
        if self.config.speculation_tokens:
            generation = sequence.generation
            trace = child_of(generation.trace, self.ref.id)
            self.proposers.open(sequence, RequestContext(generation.request, generation.attempt, trace))

    def note_so_far(self, sequence: Sequence) -> None:
        facts, draft_workers = self.proposers.facts_of(sequence.request)
        if sequence.timeline is not None and (facts or draft_workers):
            sequence.timeline.speculated(self.clock(), facts)
            sequence.timeline.asked(draft_workers)

    def dropped(self, sequence: Sequence) -> None:
        self.kv_reader.cancel(sequence)
        self.note_so_far(sequence)
        self.proposers.close(sequence)
        self.speculation.forget(sequence.request)

    # -- heartbeat

    @property
    def capacity(self) -> Capacity:
        scheduler = self.scheduler
        return self.prompts.capacity(
            scheduler.num_decoding,
            budget=scheduler.token_budget,
            backlog_tokens=scheduler.uncomputed_tokens,
            places=scheduler.credits,
        )

    def presence(self, state: WorkerState) -> Presence:
        said = super().presence(state)
        if not self.loaded:
            return said
        if not said.credits:
            self.kept_place.full(self.clock())
        return msgspec.structs.replace(
            said,
            capacity=self.capacity,
            room=self.scheduler.room,
            draft_tokens=self.proposers.num_draft_tokens,
            accepted_tokens=self.proposers.num_accepted_tokens,
            drafting=Drafting(self.engine.head if self.proposers.any_head is not None else ""),
        )

    def tick(self, now: float) -> None:
        super().tick(now)
        if not self.loaded:
            return
        self.speculation.draft_workers = [draft for draft in self.registry.alive("draft", now) if self.may_draft(draft)]
        self.drafts.set_workers(self.speculation.draft_workers)
        self.arrivals.tick(now)
        self.kv_reader.renew(self.arrivals.leases)

    def on_part(self, message: KvPart | KvPromise) -> None:
        """Nothing is copied for a request that is here already, or was cancelled."""
        part = message.part if isinstance(message, KvPromise) else message
        held, ended = self.held.get(part.request), self._cancelled.get(part.request, -1)
        if not self.refusing and max(ended, -1 if held is None else held.attempt) < part.attempt:
            self.arrivals.on_promise(message) if isinstance(message, KvPromise) else self.arrivals.on_part(message)

    def on_cancel(self, cancel: Cancel) -> None:
        super().on_cancel(cancel)
        self.arrivals.cancel(cancel.requests)

    async def drain(self) -> None:
        self.refusing = True
        if self.loaded:
            self.arrivals.clear()
        await super().drain()

    def peer_lost(self, peer: Presence) -> None:
        if peer.worker.role == "prefill" and self.loaded:
            self.arrivals.lost(peer.worker)
        if peer.worker.role == "draft" and self.loaded:
            self.drafts.worker_lost(peer.worker)

    def fenced(self) -> None:
        super().fenced()
        if self.loaded:
            self.arrivals.clear()
            self.proposers.reset()
            self.speculation.forget_all()
