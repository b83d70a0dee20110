"""Decode steps whose inputs the device derives from those of the step before, instead of the host.

    rows ─► follow? ─► new blocks of their tables, if any ─► advance the inputs on the device ─► replay the graph

A step continues the one before it if it has the same rows in the same order, and each computes the one token that it sampled
there. Its inputs are then those of the step before, one position further (`ops/sampling/advance_rows.py`): nothing is packed,
and only new blocks are sent. Packing takes the host longer than launching the graph. Rows with proposals, penalties, masks or
texts to look up depend on more than the last sample; their steps are packed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from common.engine.gpu.block_tables import BlockTables
from common.engine.gpu.step_buffers import PackedStep, StepShape
from common.engine.plan import StepRow
from common.engine.sampling import asks_alike
from common.ops.sampling.advance_rows import advance_rows
from common.ops.sampling.open_row_inputs import StepInputs


class Known(NamedTuple):
    """A step whose inputs are on the device."""

    rows: Sequence[StepRow]
    shape: StepShape
    packed: PackedStep


class Continuing:
    """inputs_of: where a step of a shape has its inputs; at the same addresses each time."""

    def __init__(self, tables: BlockTables, *, block_tokens: int, inputs_of: Callable[[StepShape], StepInputs]) -> None:
        self._tables = tables
        self._block_tokens = block_tokens
        self._inputs_of = inputs_of
        self._known: Known | None = None
        self._graphs: dict[StepShape, torch.cuda.CUDAGraph] = {}

    def packed(self, step: Known) -> None:
        """A step was packed and launched. It can be continued if all of its rows are plain."""
        is_plain = all(_is_plain(row) and asks_alike(row.sampling) for row in step.rows)
        self._known = step if is_plain else None

    def follow(self, rows: Sequence[StepRow]) -> Known | None:
        """Return the step of `rows` if it continues the one that was launched last; None: pack it. That one is forgotten.

        :raises InvalidParameter: see `BlockTables.place`.
        """
        known, self._known = self._known, None
        if known is None or len(rows) != len(known.rows):
            return None
        block_tokens = self._block_tokens
        for index, (row, before) in enumerate(zip(rows, known.rows, strict=True)):
            start = row.start
            if row.feed != index or start != before.start + 1 or row.sampling is not before.sampling or not _is_plain(row):
                return None
            block = start // block_tokens
            for table in (row.blocks, *row.more_blocks):
                if block >= len(table) or table[block] < 0:
                    return None
        placed = self._tables.place(rows)
        if placed.starts is not known.packed.first_blocks and (placed.starts != known.packed.first_blocks).any():
            return None
        return Known(rows, known.shape, known.packed._replace(starts=known.packed.starts + 1))

    def continued(self, step: Known) -> None:
        """A step that `follow` returned was launched."""
        self._known = step

    def advance(self, shape: StepShape, *, is_captured: bool) -> None:
        """Launch the advance of the inputs of a step of this shape. is_captured: whether such steps are CUDA graphs; then the
        advance becomes one, too."""
        graph = self._graphs.get(shape)
        if graph is not None:
            graph.replay()
            return
        inputs = self._inputs_of(shape)
        advance_rows(inputs)
        if is_captured:
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")  # nothing is allocated meanwhile
            try:
                advance_rows(inputs)
            finally:
                graph.capture_end()
            self._graphs[shape] = graph  # a capture that failed is not replayed


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
