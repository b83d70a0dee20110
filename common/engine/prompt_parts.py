"""Which parts of prompts a step computes, beside the rows that decode. Pure: no clock, no bus, no tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection

from common.engine.plan import PACKED_TOKENS, StepRow, part_of
from common.engine.sequence import Sequence
from common.engine.sequence_cache import SequenceCache
from common.engine.shares import TurnTaking


class PromptParts:
    """The prompts of a scheduler, tenants by turns. A block that a step computes for one prompt is not computed for another in
    that step, nor in one that is planned while it is in flight."""

    def __init__(self, cache: SequenceCache) -> None:
        self._cache = cache
        self.turns = TurnTaking()
        self._computing = set[bytes]()
        """Hashes of the blocks that the step planned last computes."""

    def plan(
        self,
        prompts: Collection[Sequence],
        remaining: Callable[[Sequence], float],
        *,
        budget: int,
        num_samples: int,
        ahead: bool,
    ) -> list[tuple[Sequence, StepRow]]:
        """Return a row for each prompt that the step computes a part of.

        remaining: of one tenant's prompts the one with the least comes first. num_samples: those of the step's rows so far; if
        there are none, and no row is returned, no step is planned. ahead: whether the step planned last is in flight.
        """
        for sequence in prompts:
            self._cache.catch_up(sequence)
        computing = self._computing if ahead else set[bytes]()
        before = frozenset(computing)
        parts: list[tuple[Sequence, StepRow]] = []
        left = budget
        for sequence in self.turns.in_turn(sorted(prompts, key=remaining)):
            if left <= 0 or budget - left >= PACKED_TOKENS:
                break
            num_tokens = self._cache.cover(sequence, part_of(sequence.num_planned, sequence.num_unplanned, left))
            if not num_tokens or not self._cache.claim(sequence, num_tokens, computing):
                continue
            row = sequence.plan(num_tokens, [], num_samples)
            parts.append((sequence, row))
            num_samples += row.num_samples
            left -= num_tokens
            is_last = row.num_samples > 0 or not sequence.num_unplanned
            self.turns.served(sequence.tenant, num_tokens, sequence.generation.weight, ends=is_last)
        if num_samples or parts:
            self._computing = computing - before
        return parts

    def rewind(self) -> None:
        """The steps in flight failed: nobody computes anything."""
        self._computing.clear()
