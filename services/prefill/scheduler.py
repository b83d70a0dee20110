"""Which prompt tokens the next step computes. Pure: no clock, no bus, no tensors.

    admit ─► (copying: a prefix arrives from elsewhere) ─► queued ─► planned in chunks ─► committed: first token ─► done
                                            one that is kept decodes here, a row of each step, to its end ◄────┘
    cancel frees at once, or, while a step or a copy touches the blocks, as soon as that has ended.

Order: tenants by turns; of one tenant, least remaining work first, aged, so that a short prompt does not wait behind a long
one, and the long one still runs. A step of priority counts as PRIORITY_STEP_S of age.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from common.engine.plan import StepPlan, StepResult, StepRow
from common.engine.prompt_parts import PromptParts
from common.engine.sequence import Sequence, uncomputed_tokens
from common.engine.sequence_cache import SequenceCache
from common.engine.shares import PRIORITY_STEP_S
from common.protocol.errors import ContextLengthExceeded, OutOfBlocks, OutOfCredits


class PrefillScheduler:
    def __init__(
        self,
        cache: SequenceCache,
        *,
        token_budget: int,
        max_running: int,
        max_context: int,
        aging_tokens_per_s: float = 512.0,
    ) -> None:
        self.cache = cache
        self.token_budget = token_budget
        self.max_running = max_running
        self.max_context = max_context
        self.aging_tokens_per_s = aging_tokens_per_s
        self.advanced: list[Sequence] = []
        """Of the step that was committed last: prompts with more to compute."""
        self._queued: dict[Sequence, float] = {}
        self._copying: dict[Sequence, float] = {}
        self._kept = set[Sequence]()
        self._flights: deque[list[Sequence]] = deque()
        self._parts = PromptParts(cache)
        self._step = 0

    @property
    def num_held(self) -> int:
        return len(self._queued) + len(self._copying)

    @property
    def num_running(self) -> int:
        return len({sequence for flight in self._flights for sequence in flight})

    @property
    def num_waiting(self) -> int:
        return self.num_held - self.num_running

    @property
    def credits(self) -> int:
        return max(0, self.max_running - self.num_held)

    @property
    def uncomputed_tokens(self) -> int:
        return uncomputed_tokens((*self._queued, *self._copying))

    def admit(self, sequence: Sequence, now: float, *, keeps: bool = False) -> None:
        """Take a prompt and the blocks it needs. `keeps`: it decodes here, and has the blocks of its longest answer at once, so
        that it never has to make room for another.

        :raises OutOfCredits, OutOfBlocks: nothing has been taken; another worker may. :raises ContextLengthExceeded: none can.
        """
        whole = min(sequence.length + sequence.sampling.max_tokens - sequence.num_outputs, self.max_context) if keeps else 0
        longest = self.cache.longest(spare=0)
        if sequence.length > longest:
            needed, there = self.cache.blocks_for(sequence.length), self.cache.blocks_for(longest)
            raise ContextLengthExceeded(
                f"{sequence.length} tokens need {needed} KV blocks; this worker has {there}: raise --kv-cache-mb"
            )
        if self.credits == 0:
            raise OutOfCredits(f"{self.num_held} prompts are in work already")
        if whole > self.cache.longest_sequence:  # what decode workers keep free is kept free here: answers end at one length
            raise OutOfBlocks(needed=self.cache.blocks_for(whole), free=self.cache.blocks_for(self.cache.longest_sequence))
        self.cache.open(sequence, max(whole, sequence.length))
        self._queued[sequence] = now
        if keeps:
            self._kept.add(sequence)

    def begin_copy(self, sequence: Sequence) -> None:
        """A copy into the sequence's blocks begins: not planned and not freed until `end_copy`."""
        assert not sequence.num_steps, "begin the copy before a step can be planned with it"
        self._copying[sequence] = self._queued.pop(sequence)

    def end_copy(self, sequence: Sequence, num_computed: int) -> None:
        since = self._copying.pop(sequence)
        if sequence.cancelled:
            self.cache.close(sequence)
            return
        self.cache.copied(sequence, num_computed)
        self._queued[sequence] = since

    def holds(self, sequence: Sequence) -> bool:
        """Whether the sequence can be planned."""
        return sequence in self._queued

    def plan(self, now: float, only: Collection[Sequence] | None = None) -> StepPlan | None:
        """The next step, or None when there is nothing to run. It may be planned while the one before it runs.

        `only`: the sequences that may be in it; None: all.
        """
        ahead, rows, planned = bool(self._flights), list[StepRow](), list[Sequence]()
        candidates = self._queued if only is None else [sequence for sequence in self._queued if sequence in only]
        for sequence in [sequence for sequence in candidates if self._may_decode(sequence)]:
            if self.cache.cover(sequence, 1):
                rows.append(sequence.plan(1, [], len(rows)))
                planned.append(sequence)
        queued = [
            sequence
            for sequence in candidates
            if sequence.is_ready
            and not sequence.num_awaited
            and not sequence.cancelled
            and sequence.num_unplanned > (sequence in self._kept)
        ]
        for sequence, row in self._parts.plan(
            queued, lambda s: self._remaining(s, now), budget=self.token_budget, num_samples=len(rows), ahead=ahead
        ):
            rows.append(row)
            planned.append(sequence)
        if not rows:
            return None
        self._flights.append(planned)
        self._step += 1
        for sequence in planned:
            sequence.planned_step = self._step
        return StepPlan(step=self._step, rows=rows)

    def planned(self, step: int) -> list[Sequence]:
        """Return whose rows a step in flight computes, in their order; nobody's if it is none."""
        index = len(self._flights) - 1 - (self._step - step)
        return self._flights[index] if 0 <= index < len(self._flights) else []

    def _may_decode(self, sequence: Sequence) -> bool:
        """Whether a kept sequence has a token to go on from: the last one, or what the step just before samples."""
        if sequence not in self._kept or sequence.num_unplanned != 1 or not sequence.is_ready or sequence.cancelled:
            return False
        if not sequence.num_awaited:
            return True
        is_next = bool(self._flights) and sequence.planned_step == self._step and sequence.matcher is None
        return is_next and sequence.may_go_on(self.max_context)

    def _remaining(self, sequence: Sequence, now: float) -> float:
        """Tokens to compute, less what its age makes up for."""
        age_s = now - self._queued[sequence] - sequence.generation.priority * PRIORITY_STEP_S
        return sequence.num_unplanned - age_s * self.aging_tokens_per_s

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[Sequence]:
        """Take the oldest step's result. Returns the sequences that have news: a first token was sampled, or more was read. The
        blocks of those that have ended are still owned, but for broken ones'."""
        done, self.advanced = [], []
        for sequence, row, samples in zip(self._flights.popleft(), plan.rows, result.rows, strict=True):
            ended = sequence.cancelled or sequence.finish is not None
            sequence.ran(row)
            if ended:
                self._leave(sequence)
                continue
            if sequence.is_read:
                sequence.read(samples)
                done.append(sequence)
                if sequence.finish is not None:
                    self._queued.pop(sequence)
            elif row.num_samples:
                taken = sequence.append(samples, 1, max_context=self.max_context)
                done.append(sequence)
                if sequence not in self._kept:
                    self._queued.pop(sequence)
                else:
                    sequence.went_on(taken)
            if sequence.is_broken:  # its blocks are offered to nobody
                sequence.cancelled = True
                self._leave(sequence)
                continue
            self.cache.publish(sequence)
            if not row.num_samples and not sequence.is_read:
                self.advanced.append(sequence)
            if sequence in self._kept and sequence.finish is not None:
                self._leave(sequence)
        return done

    def rewind(self) -> list[Sequence]:
        """A step in flight failed, and with it those after it: their sequences go back to what was computed before.

        Returns those that are still queued; others had been cancelled, and leave now.
        """
        planned = {sequence: None for flight in self._flights for sequence in flight}
        self._flights.clear()
        self._parts.rewind()
        for sequence in planned:
            sequence.rewind()
            if sequence.cancelled or (sequence in self._kept and sequence.finish is not None):
                self._leave(sequence)
        return [sequence for sequence in planned if sequence in self._queued]

    def cancel(self, sequence: Sequence) -> None:
        """Free a sequence wherever it is, as soon as nothing touches its blocks; one that has left already is none of ours."""
        if sequence in self._copying:
            sequence.cancelled = True
        elif sequence in self._queued:
            sequence.cancelled = True
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Plan it no more; free its blocks once no step touches them."""
        self._queued.pop(sequence, None)
        if not sequence.num_steps:
            self._kept.discard(sequence)
            self.cache.close(sequence)
