"""Decode steps whose inputs the device derives from those of the step before, instead of the host.

    rows ─► follow? ─► what is new of tables, and rows that do not go on ─► advance the inputs on the device ─► the step's graph

A row goes on if it had the same place in the step before, and computes the one token that it sampled there. Its inputs are then
those of the step before, one position further (`ops/sampling/advance_rows.py`): nothing of it is packed. In steps of few rows
others may begin or end beside them, and are sent alone (`ops/sampling/given_rows.py`). Packing takes the host longer than
launching the graph. Rows with proposals, penalties, masks or texts to look up depend on more than the last sample; their steps
are packed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from common.engine.gpu.block_tables import BlockTables
from common.engine.gpu.step_buffers import StepShape
from common.engine.plan import StepRow
from common.engine.sampling import asks_alike
from common.ops.attention.work_list import DeviceRow
from common.ops.sampling.advance_rows import advance_rows
from common.ops.sampling.given_row_layout import (
    ENDS,
    GIVEN,
    GOES_ON,
    MAX_CHANGES,
    MAX_ROWS,
    PLACE_SHIFT,
    GivenRows,
    given_words,
)
from common.ops.sampling.given_rows import advance_with_given
from common.ops.sampling.open_row_inputs import StepInputs

_MOST_SPARE = 4
"""A step may stay in a shape of so many rows, however few it has."""
_SPARE_STEPS = 8
"""After so many steps in a shape that is larger than they need, one is packed in its own."""
_NO_CHANGES = np.zeros(0, np.int64), np.zeros(0, np.int32)
_NOTHING = torch.zeros(0, dtype=torch.uint8)


class Known(NamedTuple):
    """A step whose inputs are on the device.

    first_blocks: int64 [groups, rows], where the rows' tables begin. spare_steps: how many steps up to this one were in a shape
    that is larger than they need; 0: it is not.
    """

    rows: Sequence[StepRow]
    shape: StepShape
    first_blocks: NDArray[np.int64]
    spare_steps: int = 0

    @property
    def device_rows(self) -> list[list[DeviceRow]]:
        """The rows in each cache group."""
        starts = [row.start for row in self.rows]
        return [
            [DeviceRow(index, 1, start, block) for index, (start, block) in enumerate(zip(starts, blocks, strict=True))]
            for blocks in self.first_blocks.tolist()
        ]


class Following(NamedTuple):
    """A step that follows the one launched last, which had `num_before` rows. given: the indices of rows that don't go on."""

    step: Known
    given: list[int]
    num_before: int


class Continuing:
    """inputs_of: where a step of a shape has its inputs; at the same addresses each time. shape_of: in which shape a step would
    be packed; None: in one of its own. depth: steps under way at once, with the one that is submitted."""

    def __init__(
        self,
        tables: BlockTables,
        *,
        block_tokens: int,
        vocab_size: int,
        depth: int,
        inputs_of: Callable[[StepShape], StepInputs],
        shape_of: Callable[[Sequence[StepRow]], StepShape | None],
    ) -> None:
        self._tables = tables
        self._block_tokens = block_tokens
        self._vocab_size = vocab_size
        self._inputs_of = inputs_of
        self._shape_of = shape_of
        self._known: Known | None = None
        self._graphs: dict[tuple[StepShape, bool], torch.cuda.CUDAGraph] = {}
        """By shape, and whether some of the rows are given."""
        num_groups, device = len(tables.num_blocks), tables.ids.device
        words = given_words(num_groups)
        staging = [torch.zeros(words, dtype=torch.int64, pin_memory=device.type == "cuda") for _ in range(depth)]
        self._staging = [(one, GivenRows(one.numpy(), num_groups)) for one in staging]
        self._given = GivenRows(torch.zeros(words, dtype=torch.int64, device=device), num_groups)
        self._turn = 0

    def warm_up(self, shape: StepShape) -> None:
        """Compile what advances steps: on one of `shape` that is nothing but padding."""
        self._given.words.zero_()
        for has_given in (False, True):
            self._advance(self._inputs_of(shape), has_given=has_given)

    def packed(self, step: Known) -> None:
        """A step was packed and launched. It can be continued if all of its rows are plain."""
        is_plain = all(_is_plain(row) and asks_alike(row.sampling) for row in step.rows)
        self._known = step if is_plain else None

    def follow(self, rows: Sequence[StepRow]) -> Following | None:
        """Return the step of `rows` if the device can derive it from the one that was launched last; None: pack it. That one is
        forgotten.

        :raises InvalidParameter: see `BlockTables.place`.
        """
        known, self._known = self._known, None
        if known is None:
            return None
        spare_steps = self._spare_steps(rows, known)
        if spare_steps is None or (given := self._given_rows(rows, known.rows)) is None:
            return None
        first_blocks = self._tables.place(rows).starts
        if first_blocks is not known.first_blocks:
            both = min(len(rows), len(known.rows))
            moved = (first_blocks[:, :both] != known.first_blocks[:, :both]).any(0).nonzero()[0].tolist()
            if moved:
                given = sorted({*given, *moved})
        if (given or len(rows) != len(known.rows)) and known.shape.rows > MAX_ROWS:
            return None
        return Following(Known(rows, known.shape, first_blocks, spare_steps), given, len(known.rows))

    def continued(self, step: Known) -> None:
        """A step that `follow` returned was launched."""
        self._known = step

    def advance(self, following: Following, *, is_captured: bool) -> None:
        """Launch what makes the inputs of the step before those of this one. is_captured: whether such steps are CUDA graphs;
        then this becomes one, too."""
        slots, step, changes = self._tables.slots, following.step, _NO_CHANGES
        if slots.has_changed:
            found = slots.changes()
            if step.shape.rows <= MAX_ROWS and len(found[0]) <= MAX_CHANGES:
                changes = found
            else:
                self._tables.apply(_NOTHING)
        has_given = bool(following.given) or len(changes[0]) > 0 or len(step.rows) != following.num_before
        if has_given:
            self._send(following, *changes)
        self._launch(step.shape, has_given=has_given, is_captured=is_captured)
        slots.sent()

    def _spare_steps(self, rows: Sequence[StepRow], known: Known) -> int | None:
        """Return what `Known` says of it for a step of these rows in the shape of the step before; None: it can't be."""
        num_rows = len(rows)
        if num_rows == len(known.rows):
            spare_steps = known.spare_steps and known.spare_steps + 1
        elif num_rows > known.shape.rows:
            return None
        elif self._shape_of(rows) == known.shape:
            return 0
        elif known.shape.rows > max(2 * num_rows, _MOST_SPARE):
            return None
        else:
            spare_steps = known.spare_steps + 1
        return None if spare_steps > _SPARE_STEPS else spare_steps

    def _given_rows(self, rows: Sequence[StepRow], before: Sequence[StepRow]) -> list[int] | None:
        """Return the indices of rows that don't go on; None if a row depends on more than the last sample, or is not in order:
        packing says why."""
        given: list[int] = []
        block_tokens, num_before = self._block_tokens, len(before)
        for index, row in enumerate(rows):
            if not _is_plain(row):
                return None
            last = before[index] if index < num_before else None
            if last is None or row.feed != index or row.start != last.start + 1:
                if row.feed >= num_before or row.start < 0 or (row.feed < 0 and not 0 <= row.tokens[0] < self._vocab_size):
                    return None
                given.append(index)
            if (last is None or row.sampling is not last.sampling) and not asks_alike(row.sampling):
                return None
            block = row.start // block_tokens
            for table in (row.blocks, *row.more_blocks):
                if block >= len(table) or table[block] < 0:
                    return None
        return given

    def _send(self, following: Following, places: NDArray[np.int64], ids: NDArray[np.int32]) -> None:
        """Start copying what the host says of a step."""
        self._turn = (self._turn + 1) % len(self._staging)
        staging, host = self._staging[self._turn]
        step, num_rows = following.step, len(following.step.rows)
        host.head[:] = num_rows, len(places)
        host.kinds[:num_rows], host.kinds[num_rows:] = GOES_ON, ENDS
        for index in following.given:
            row = step.rows[index]
            host.kinds[index], host.positions[index] = GIVEN, row.start
            host.tokens[index], host.feeds[index] = (0, row.feed) if row.feed >= 0 else (row.tokens[0], -1)
            host.starts[:, index] = step.first_blocks[:, index]
        if num_changes := len(places):
            np.left_shift(places, PLACE_SHIFT, out=host.changes[:num_changes])
            host.changes[:num_changes] += ids
        used = host.used(num_changes)
        self._given.words[:used].copy_(staging[:used], non_blocking=True)

    def _launch(self, shape: StepShape, *, has_given: bool, is_captured: bool) -> None:
        graph = self._graphs.get((shape, has_given))
        if graph is not None:
            graph.replay()
            return
        inputs = self._inputs_of(shape)
        self._advance(inputs, has_given=has_given)
        if is_captured:
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")  # nothing is allocated meanwhile
            try:
                self._advance(inputs, has_given=has_given)
            finally:
                graph.capture_end()
            self._graphs[shape, has_given] = graph  # a capture that failed is not replayed

    def _advance(self, inputs: StepInputs, *, has_given: bool) -> None:
        if has_given:
            advance_with_given(inputs, self._given)
        else:
            advance_rows(inputs)


def _is_plain(row: StepRow) -> bool:
    """Return whether a row computes and samples one token, whatever its sampling."""
    return (
        len(row.tokens) == 1
        and row.num_samples == 1
        and row.text is None
        and not row.verified
        and not row.outcomes
        and not row.is_posted
        and row.serial < 0
        and row.constraint is None
        and not row.num_read
        and not row.drafts
    )
