"""Which rows of a step are open, as the device settles them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from common.engine.gpu.step_buffers import PackedStep
from common.engine.plan import StepRow
from common.ops.sampling.open_rows import OpenRow

OPEN_WARM_UP = OpenRow(row=0, first=0, length=1, sample=0, start=0, feed=0, verified=[0], outcomes=[])
"""For compiling before the first step."""


def open_rows_of(rows: Sequence[StepRow], packed: PackedStep, verified_slots: Mapping[int, int]) -> list[OpenRow]:
    """Rows whose tokens or positions depend on the outcome of the step before. verified_slots: see `PlannedLookup`."""
    found: list[OpenRow] = []
    sample = 0
    for index, row in enumerate(rows):
        if row.feed >= 0 and row.is_open:
            first, length = int(packed.firsts[index]), len(row.tokens)
            verified = [] if row.follows_lookup else row.verified
            slot = verified_slots.get(index, -1)
            found.append(OpenRow(index, first, length, sample, row.start, row.feed, verified, row.outcomes, slot))
        sample += row.num_samples
    return found
