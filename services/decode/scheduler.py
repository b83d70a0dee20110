"""Continuous batching: sequences join and leave the running batch at every step. Pure: no clock, no bus, no tensors.

    admit ─► (copying: KV arrives from prefill or the store) ─► running ─► finished: blocks freed
                                                                 │  ▲
                                       out of blocks: preempted ─┘  └─ resumed when there is room: recomputed, same tokens

A running sequence with one unplanned token decodes (with proposals to verify, if any); one with more prefills in chunks,
in what proposals leave of the token budget, tenants by turns. Decoding never waits for prefilling. A prompt that is read,
where there is no prefill worker for it, prefills to its end and is finished then.

A step may be planned while the one before it runs (`run_ahead`): rows are then fed with samples that nobody has seen yet, and
what they verify is foreseen for each likely outcome of that step (`common/engine/outcomes.py`). What turns out to have ended
meanwhile is computed once too often, and dropped; its blocks are freed when that step has run too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from common.cache.grouped_pool import Arrived
from common.engine.outcomes import Outcome, accept, width_of
from common.engine.plan import NO_ROOM, Drafted, LookedUp, Room, StepPlan, StepResult, StepRow, Taken
from common.engine.prompt_parts import PromptParts
from common.engine.sequence import Sequence, uncomputed_tokens
from common.engine.sequence_cache import SequenceCache
from common.protocol.errors import ContextLengthExceeded, OutOfBlocks, OutOfCredits
from services.decode.hooks import BeginStep, Foresee, PromptLimit, Propose, Recompute, RoomFor, Wanted
from services.decode.prompt_budget import needed_rate


@dataclass(slots=True)
class Progress:
    """What a step did for a sequence: new tokens from output index `start` on, `proposed` of which `accepted` held.

    `forced`: a grammar proposed them, not a draft worker. `drafted`: what the engine's head proposes for the next step.
    `looked_up`: what the device found for the row; `taken`: what it took from its board.
    """

    sequence: Sequence
    start: int
    proposed: int
    accepted: int
    forced: bool = False
    drafted: Drafted | None = None
    looked_up: LookedUp | None = None
    taken: Taken | None = None


AGING_TOKENS_PER_STEP = 64
"""Prompts with the fewest tokens left go first; each step that one waits counts as so many tokens less: none waits for ever."""
PRIORITY_TOKENS = 5120
"""Each step of priority counts as so many tokens more: as many as PRIORITY_STEP_S of age take off at a prefill worker."""


class DecodeScheduler:
    """Which sequences run, and what the next step computes for each.

    `token_budget`: tokens of prompts and proposals that a step computes at most, beside a token of each decoding row. So,
    but for a `prompt_limit`, prompts are parted at the same places whatever runs beside them.
    `watermark`: blocks kept free at admission. `finishing(sequence)` is called when a sequence has ended, before its blocks
    are freed.
    """

    def __init__(
        self,
        cache: SequenceCache,
        *,
        token_budget: int,
        max_running: int,
        max_context: int,
        propose: Propose = lambda sequence, limit: [],
        foresee: Foresee = lambda sequence, limit: [],
        room_for: RoomFor = lambda sequence, limit: NO_ROOM,
        begin_step: BeginStep = lambda decoding: None,
        wanted: Wanted = lambda sequence: (-1, 0.0),
        finishing: Callable[[Sequence], None] = lambda sequence: None,
        prompt_limit: PromptLimit = lambda rows, budget, needed_per_s: budget,
        resumed: Callable[[Sequence], None] = lambda sequence: None,
        recompute: Recompute = lambda sequence: 0,
        watermark: int = 1,
    ) -> None:
        self.cache = cache
        self.token_budget, self.max_running = token_budget, max_running
        self.max_context = min(max_context, cache.longest(spare=watermark))
        self.begin_step, self.propose, self.foresee, self.room_for = begin_step, propose, foresee, room_for
        self.wanted, self.finishing, self.resumed, self.prompt_limit = wanted, finishing, resumed, prompt_limit
        self.recompute = recompute
        self.watermark, self.num_preemptions = watermark, 0
        self._running: dict[Sequence, None] = {}
        self._copying: dict[Sequence, None] = {}
        self._preempted: list[Sequence] = []
        self._flights: deque[list[Sequence]] = deque()
        self._parts = PromptParts(cache)
        self._step = self._arrivals = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_decoding(self) -> int:
        return sum(sequence.num_uncomputed <= 1 for sequence in self._running)

    @property
    def uncomputed_tokens(self) -> int:
        """Of prompts to compute, and of preempted sequences, which are computed again; not of one whose KV arrives."""
        return uncomputed_tokens((*self._running, *self._preempted))

    @property
    def num_waiting(self) -> int:
        return len(self._copying) + len(self._preempted)

    @property
    def num_held(self) -> int:
        return self.num_running + self.num_waiting

    @property
    def credits(self) -> int:
        """How many more sequences would be taken, at one block each at least; none while preempted ones wait."""
        room = min(self.max_running - self.num_held, self.cache.pool.available - self.watermark)
        return 0 if self._preempted else max(0, room)

    @property
    def room(self) -> int:
        """Tokens of the longest sequence for which there are blocks."""
        return min(self.max_context, self.cache.longest_now(spare=self.watermark))

    def admit(self, sequence: Sequence, arrived: Arrived = ()) -> None:
        """Take a sequence and the blocks of its tokens, those that have arrived among them (see `SequenceCache.open`).

        :raises OutOfCredits, OutOfBlocks: nothing has been taken; another worker may.
        :raises ContextLengthExceeded: it never fits.
        """
        if sequence.length + (not sequence.is_read) > self.max_context:
            raise ContextLengthExceeded(f"{sequence.length} tokens; this worker holds at most {self.max_context} a sequence")
        if self.num_held >= self.max_running or self._preempted:
            raise OutOfCredits(f"{self.num_held} sequences are in work already")
        self.cache.check_room(sequence.length, spare=self.watermark, arrived=arrived)
        self.cache.open(sequence, sequence.length, arrived)
        self._arrivals += 1
        sequence.arrival = self._arrivals
        sequence.admitted_step = self._step
        self._running[sequence] = None

    def begin_copy(self, sequence: Sequence) -> None:
        """A copy into the sequence's blocks begins: not planned and not freed until `end_copy`."""
        assert not sequence.num_steps, "begin the copy before a step can be planned with it"
        del self._running[sequence]
        self._copying[sequence] = None

    def end_copy(self, sequence: Sequence, num_computed: int) -> None:
        """The copy has ended; KV of the first `num_computed` tokens is there (what was there before stays).

        Others find it after `publish`, or the first step: that does not wait for the hashes of a long prompt's many blocks.
        """
        del self._copying[sequence]
        if sequence.cancelled:
            self.cache.close(sequence)
            return
        self.cache.copied(sequence, num_computed, recompute=self.recompute(sequence))
        self._running[sequence] = None

    def publish(self, sequence: Sequence) -> None:
        """Let others find what was copied. Harmless for a sequence that does not run, or at any other time."""
        if sequence in self._running:
            self.cache.publish(sequence)

    def holds(self, sequence: Sequence) -> bool:
        """Whether the sequence can be planned."""
        return sequence in self._running

    def plan(self, now: float, only: Collection[Sequence] | None = None) -> StepPlan | None:
        """The next step, or None when there is nothing to run, or nothing that could be planned ahead of the step in flight.

        `only`: the sequences that may be in it; None: all.
        """
        ahead = bool(self._flights)
        self._resume()
        decoding: list[Sequence] = []
        prompts: list[Sequence] = []
        for sequence in self._running:
            if not sequence.is_ready or (only is not None and sequence not in only):
                continue
            left = sequence.num_unplanned
            if left > 1 or (left and sequence.is_read):
                prompts.append(sequence)
            elif left and (not ahead or self._may_follow(sequence)):
                decoding.append(sequence)
        if ahead and not all(self._fits(sequence, sequence.longest) for sequence in decoding):
            return None
        rows: list[StepRow] = []
        planned: list[Sequence] = []
        num_samples = 0
        prospects = self.begin_step(decoding)
        budget = self.token_budget
        for sequence in decoding:
            if not ahead and (sequence not in self._running or not self._make_room(sequence, planned)):
                continue  # ahead, all have room
            asks = prospects is None or sequence in prospects
            room = self._room(sequence, budget) if asks else NO_ROOM
            if sequence.num_awaited:
                outcomes = self._outcomes(sequence, budget) if asks and not (room.num_tokens or room.is_posted) else []
                row = sequence.plan(1, [], num_samples, outcomes, room)
                self._ask(sequence, row)
            else:  # a grammar is read by the step that runs
                asks = not room.num_tokens and (asks if sequence.matcher is None else not ahead)
                row = sequence.plan(1, self._proposal(sequence, budget) if asks else [], num_samples, (), room)
                self._ask(sequence, row)
            rows.append(row)
            planned.append(sequence)
            num_samples += row.num_samples
            budget -= row.num_samples - 1
        prompts = [sequence for sequence in prompts if sequence in self._running]
        if prompts:
            budget = self.prompt_limit(len(rows), budget, needed_rate(prompts, now, self._remaining))
        for sequence, row in self._parts.plan(prompts, self._remaining, budget=budget, num_samples=num_samples, ahead=ahead):
            self._ask(sequence, row)
            rows.append(row)
            planned.append(sequence)
        if not rows:
            return None
        self._flights.append(planned)
        self._step += 1
        for sequence in planned:
            sequence.planned_step = self._step
        return StepPlan(step=self._step, rows=rows)

    def _may_follow(self, sequence: Sequence) -> bool:
        """Whether the sequence can be in a step that is planned ahead: a row is fed by the step just before alone."""
        return sequence.may_go_on(self.max_context) and (not sequence.num_awaited or sequence.planned_step == self._step)

    def _remaining(self, sequence: Sequence) -> int:
        """Return the tokens to compute of a prompt, less what its age and priority make up for."""
        age_tokens = (self._step - sequence.admitted_step) * AGING_TOKENS_PER_STEP
        return sequence.num_unplanned - age_tokens + sequence.generation.priority * PRIORITY_TOKENS

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[Progress]:
        """Take the oldest step's result: keep what was accepted, free what finished or was cancelled meanwhile."""
        progress = []
        for sequence, row, samples in zip(self._flights.popleft(), plan.rows, result.rows, strict=True):
            ended = sequence.cancelled or sequence.finish is not None
            sequence.ran(row)
            if ended:
                self._leave(sequence)
                continue
            if sequence.is_read:
                progress.append(Progress(sequence, sequence.num_outputs, 0, 0))
                sequence.read(samples)
                if sequence.is_broken:
                    self._abandon(sequence)
                    continue
            if not row.num_samples:
                self.cache.publish(sequence)
                if sequence.finish is not None:
                    self._leave(sequence)
                continue
            proposal = samples.chosen(row) if row.room else sequence.verifying
            accepted = accept(proposal, samples.tokens) if proposal else 0
            start = sequence.num_outputs
            sequence.went_on(sequence.append(samples, accepted + 1, max_context=self.max_context))
            forced = sequence.matcher is not None and sequence.matcher.was_forced(proposal, accepted)
            progress.append(
                Progress(sequence, start, len(proposal), accepted, forced, samples.drafted, samples.looked_up, samples.taken)
            )
            if sequence.is_broken:
                self._abandon(sequence)
                continue
            self.cache.publish(sequence)
            if sequence.finish is not None:
                self.finishing(sequence)
                self._leave(sequence)
        return progress

    def rewind(self) -> list[Sequence]:
        """A step in flight failed, and with it those after it: their sequences go back to what was computed before.

        Returns those that still run; others had ended or been cancelled, and leave now.
        """
        planned = {sequence: None for flight in self._flights for sequence in flight}
        self._flights.clear()
        self._parts.rewind()
        for sequence in planned:
            sequence.rewind()
            if sequence.cancelled or sequence.finish is not None:
                self._leave(sequence)
        return [sequence for sequence in planned if sequence in self._running]

    def cancel(self, sequence: Sequence) -> None:
        """Free a sequence wherever it is, as soon as nothing touches its blocks; one that has left already is none of ours."""
        if sequence in self._copying:
            sequence.cancelled = True
        elif sequence in self._running:
            sequence.cancelled = True
            self.cache.publish(sequence)  # what was copied, if no step has run with it
            self._leave(sequence)
        elif sequence in self._preempted:
            self._preempted.remove(sequence)

    def _abandon(self, sequence: Sequence) -> None:
        """Plan a broken sequence no more, and offer its blocks to nobody."""
        sequence.cancelled = True
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Plan it no more; free its blocks once no step touches them."""
        self._running.pop(sequence, None)
        if not sequence.num_steps:
            self.cache.close(sequence)

    def _ask(self, sequence: Sequence, row: StepRow) -> None:
        """Ask the engine's head for what may follow the row, as far as a later step could take it."""
        count, row.least_chance = self.wanted(sequence)
        if count >= 0:
            left = sequence.sampling.max_tokens - sequence.num_outputs - max(1, sequence.num_awaited) - 1
            row.serial, row.drafts = sequence.serial, max(0, min(count, left))
            end = row.start + len(row.tokens)
            row.following = 0 if row.num_samples else sequence.tokens[end]

    def _proposal(self, sequence: Sequence, budget: int) -> list[int]:
        limit = self._limit(sequence, budget)
        if limit <= 0:
            return []
        proposal = self._guess(sequence, limit)
        return proposal if not proposal or self._fits(sequence, len(sequence.tokens) + len(proposal)) else []

    def _guess(self, sequence: Sequence, limit: int) -> list[int]:
        """What a grammar forces, else as much of what is proposed as a grammar allows."""
        matcher = sequence.matcher
        if matcher is None:
            return self.propose(sequence, limit)
        start = matcher.num_settled
        output = sequence.tokens[sequence.generation.prompt_tokens + start :]
        if forced := matcher.forced(output, limit, start=start):
            return forced
        proposal = self.propose(sequence, limit)
        return proposal[: matcher.allowed(output, proposal, start=start)] if proposal else proposal

    def _room(self, sequence: Sequence, budget: int) -> Room:
        """See `RoomFor`. The device chooses nothing where penalties or grammars depend on what that is."""
        if not sequence.may_be_open:
            return NO_ROOM
        room = self.room_for(sequence, max(0, self._limit(sequence, budget)))
        is_too_much = room.num_tokens and not self._fits(sequence, sequence.longest + room.num_tokens)
        return room._replace(num_tokens=0) if is_too_much else room

    def _limit(self, sequence: Sequence, budget: int) -> int:
        outputs = sequence.num_outputs + sequence.num_awaited
        return min(budget, sequence.sampling.max_tokens - outputs - 1, self.max_context - sequence.longest - 1)

    def _outcomes(self, sequence: Sequence, budget: int) -> list[Outcome]:
        """What may be proposed behind the step that samples the sequence's next tokens."""
        limit = self._limit(sequence, budget)
        if limit <= 0 or sequence.num_steps > 1 or not sequence.may_be_open:
            return []
        outcomes = self.foresee(sequence, limit)
        return outcomes if not outcomes or self._fits(sequence, sequence.longest + width_of(outcomes)) else []

    def _fits(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give the sequence blocks for so many tokens. False: there are not enough."""
        try:
            self.cache.grow(sequence, num_tokens)
        except OutOfBlocks:
            return False
        return True

    def _make_room(self, sequence: Sequence, planned: list[Sequence]) -> bool:
        """A block for the next token, if need be from the newest sequence that is not in this step yet."""
        while not self._fits(sequence, sequence.longest):
            victim = next(s for s in reversed(self._running) if s not in planned)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        del self._running[sequence]
        self.cache.publish(sequence)  # likewise
        self.cache.close(sequence)
        self._preempted.append(sequence)
        self._preempted.sort(key=lambda s: s.arrival)
        self.num_preemptions += 1

    def _resume(self) -> None:
        while self._preempted:
            sequence = self._preempted[0]
            try:
                if self._running:
                    self.cache.check_room(sequence.length, spare=self.watermark)
                self.cache.open(sequence, sequence.length)
            except OutOfBlocks:
                return
            del self._preempted[0]
            self._running[sequence] = None
            self.resumed(sequence)
