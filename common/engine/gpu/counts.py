"""Counts of the tokens that penalised sequences hold, kept on a GPU from step to step.

A sequence that is penalised gets a slot, a row of `table`. A step counts what is new since the one before: one token as a rule,
which the host may not know yet; all of the history when a sequence is new here, or has gone back. Proposed tokens are counted
once they are accepted, so a rejected one needs nothing undone: see `Adjustment.output`. When all slots are taken by the step
itself, further sequences have none, and their histories are counted anew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from common.engine.history import History
from common.engine.plan import StepRow
from common.engine.sampling import penalised
from common.ops.sampling.counts_device import Addition, CountUpdate, HostCountUpdate, add_counts, pack_additions

MAX_BYTES = 256 << 20
"""Of the table: 523 sequences with a vocabulary of 128k."""

NO_SLOT = -1


@dataclass(slots=True)
class _Slot:
    index: int
    counted: int = 0


class PlannedCounts(NamedTuple):
    """Of one step. slots: of each row, `NO_SLOT` for those without. update: what is to be counted first, if anything.
    counted: how many tokens of each sequence are counted then."""

    slots: list[int]
    update: HostCountUpdate | None
    counted: dict[int, int]


class PenaltyCounts:
    """`table`: int32 [slots, vocab_size], 2 · occurrences in the output, + 1 if in the prompt; None until it is needed."""

    def __init__(self, max_slots: int, device: torch.device) -> None:
        self.table: torch.Tensor | None = None
        self._max_slots = max_slots
        self._device = device
        self._slots: OrderedDict[int, _Slot] = OrderedDict()
        """By key of the sequence, that used longest ago first."""

    def plan(self, rows: Sequence[StepRow], vocab_size: int) -> PlannedCounts:
        """Give slots to the step's penalised sequences, and find out what is new of them. `count` must follow."""
        slots = [NO_SLOT] * len(rows)
        counted: dict[int, int] = {}
        additions: list[Addition] = []
        for index, row in enumerate(rows):
            history = row.history
            if not row.num_samples or not penalised(row.sampling):
                continue
            if not isinstance(history, History) or history.key in counted:
                continue
            slot = self._slot_of(history.key, vocab_size, counted)
            if slot is None:
                continue
            end = row.start + len(row.tokens) - row.num_samples + 1
            start = slot.counted
            if start > end:  # it went back: a step failed, or another runs in its place
                start = 0
            if start < end or not end:
                tokens = history[start:end]
                prompt = max(0, min(row.prompt_tokens - start, len(tokens)))
                additions.append(Addition(slot.index, tokens, prompt, max(row.feed, 0), clears=start == 0))
            slots[index], counted[history.key] = slot.index, end
        return PlannedCounts(slots, pack_additions(additions) if additions else None, counted)

    def count(self, planned: PlannedCounts, previous_tokens: torch.Tensor) -> None:
        """Launch what `plan` found. previous_tokens: of the step before, which fed rows are fed with."""
        if planned.update is not None:
            assert self.table is not None
            try:
                add_counts(self.table, CountUpdate.on(self._device, planned.update), previous_tokens)
            except BaseException:
                self.forget()  # nobody knows what has been counted
                raise
        for key, end in planned.counted.items():
            self._slots[key].counted = end

    def forget(self) -> None:
        """Every sequence is counted anew."""
        self._slots.clear()

    def _slot_of(self, key: int, vocab_size: int, used: dict[int, int]) -> _Slot | None:
        """used: keys of this step, whose slots nobody else may have."""
        slot = self._slots.get(key)
        if slot is None:
            if self.table is None:
                count = max(1, min(self._max_slots, MAX_BYTES // (4 * vocab_size)))
                self.table = torch.empty(count, vocab_size, dtype=torch.int32, device=self._device)
            if len(self._slots) < len(self.table):
                slot = _Slot(len(self._slots))
            else:
                oldest = next(iter(self._slots))
                if oldest in used:
                    return None
                slot = _Slot(self._slots.pop(oldest).index)
            self._slots[key] = slot
        self._slots.move_to_end(key)
        return slot
