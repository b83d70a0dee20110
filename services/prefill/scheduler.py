"""Which prompt tokens the next step computes. Pure: no clock, no bus, no tensors.

    admit ─► (copying: a prefix arrives from elsewhere) ─► queued ─► planned in chunks ─► committed: first token ─► done
    cancel frees at once, or, while a step or a copy touches the blocks, as soon as that has ended.

Order: least remaining work first, aged, so that a short prompt does not wait behind a long one, and the long one still runs.
"""

from __future__ import annotations

from common.engine.plan import StepPlan, StepResult
from common.engine.sequence import Sequence, SequenceCache
from common.protocol.errors import ContextLengthExceeded, OutOfCredits


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
        self._queued: dict[Sequence, float] = {}
        self._copying: dict[Sequence, float] = {}
        self._in_flight: list[Sequence] = []
        self._step = 0

    @property
    def num_held(self) -> int:
        return len(self._queued) + len(self._copying)

    @property
    def num_running(self) -> int:
        return len(self._in_flight)

    @property
    def num_waiting(self) -> int:
        return self.num_held - self.num_running

    @property
    def credits(self) -> int:
        return max(0, self.max_running - self.num_held)

    @property
    def uncomputed_tokens(self) -> int:
        return sum(sequence.num_uncomputed for sequence in (*self._queued, *self._copying))

    def admit(self, sequence: Sequence, now: float) -> None:
        """Take a prompt and all the blocks it needs.

        :raises OutOfCredits, OutOfBlocks: nothing has been taken; another worker may. :raises ContextLengthExceeded: none can.
        """
        needed = self.cache.blocks_for(len(sequence.tokens))
        if needed > self.cache.pool.num_blocks:
            raise ContextLengthExceeded(
                f"{len(sequence.tokens)} tokens need {needed} KV blocks; this worker has {self.cache.pool.num_blocks}: "
                "raise --kv-cache-mb"
            )
        if self.credits == 0:
            raise OutOfCredits(f"{self.num_held} prompts are in work already")
        self.cache.open(sequence, len(sequence.tokens))
        self._queued[sequence] = now

    def begin_copy(self, sequence: Sequence) -> None:
        """A copy into the sequence's blocks begins: not planned and not freed until `end_copy`."""
        assert sequence not in self._in_flight, "begin the copy before a step can be planned with it"
        self._copying[sequence] = self._queued.pop(sequence)

    def end_copy(self, sequence: Sequence, num_computed: int) -> None:
        since = self._copying.pop(sequence)
        if sequence.cancelled:
            self.cache.close(sequence)
            return
        sequence.num_computed = max(sequence.num_computed, num_computed)
        self._queued[sequence] = since

    def plan(self, now: float) -> StepPlan | None:
        """The next step, or None when there is nothing to run."""
        assert not self._in_flight, "one step at a time"
        budget, rows, computing = self.token_budget, [], set[bytes]()
        order = sorted(self._queued, key=lambda s: s.num_uncomputed - (now - self._queued[s]) * self.aging_tokens_per_s)
        for sequence in order:
            if budget <= 0:
                break
            if not self.cache.catch_up(sequence, budget, computing):
                continue
            count = min(budget, sequence.num_uncomputed)
            rows.append(sequence.row(count))
            self._in_flight.append(sequence)
            budget -= count
        if not rows:
            return None
        self._step += 1
        return StepPlan(step=self._step, rows=rows)

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[Sequence]:
        """Take a step's result. Returns the sequences whose first token was sampled; their blocks are still owned."""
        done = []
        planned, self._in_flight = self._in_flight, []
        for sequence, row, samples in zip(planned, plan.rows, result.rows, strict=True):
            sequence.num_computed += len(row.tokens)
            if sequence.cancelled:
                self._queued.pop(sequence)
                self.cache.close(sequence)
                continue
            if row.num_samples:
                sequence.append(samples, 1, max_context=self.max_context)
                self._queued.pop(sequence)
                done.append(sequence)
            self.cache.publish(sequence)
        return done

    def abandon(self) -> list[Sequence]:
        """The step in flight failed: its sequences leave, their blocks are freed."""
        planned, self._in_flight = self._in_flight, []
        for sequence in planned:
            self._queued.pop(sequence, None)
            self.cache.close(sequence)
        return planned

    def cancel(self, sequence: Sequence) -> None:
        """Free a sequence wherever it is; one that has left already is none of ours."""
        if sequence in self._copying or sequence in self._in_flight:
            sequence.cancelled = True
        elif self._queued.pop(sequence, None) is not None:
            self.cache.close(sequence)
