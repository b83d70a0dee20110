"""Which rows of a step are open, as the device settles them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from common.engine.gpu.step_buffers import PackedStep
from common.engine.plan import StepRow
from common.ops.sampling.open_rows import OpenRow

OPEN_WARM_UP = OpenRow(row=0, first=0, length=1, sample=0, start=0, feed=0, verified=[0], outcomes=[], posted=0)
"""For compiling before the first step."""


def open_rows_of(
    rows: Sequence[StepRow], packed: PackedStep, verified_slots: Mapping[int, int], taken: Collection[int], first_kept: int
) -> list[OpenRow]:
    """Rows whose tokens or positions depend on the outcome of the step before. verified_slots: see `PlannedLookup`. taken:
    slots of the board of which the step before verifies something; it is kept from slot `first_kept` on."""
    found: list[OpenRow] = []
    sample = 0
    for index, row in enumerate(rows):
        if row.feed >= 0 and row.is_open:
            first, length = int(packed.firsts[index]), len(row.tokens)
            verified = [] if row.follows_device else row.verified
            slot = verified_slots.get(index, -1)
            if slot < 0 and row.follows_device and row.board in taken:
                slot = first_kept + row.board
            on_board = (row.board, first_kept + row.board) if row.is_posted else (-1, 0)
            found.append(OpenRow(index, first, length, sample, row.start, row.feed, verified, row.outcomes, slot, *on_board))
        sample += row.num_samples
    return found
