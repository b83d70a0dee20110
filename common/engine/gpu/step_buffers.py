"""A step as a GPU takes it: one buffer on the device, filled by one copy from pinned memory.

A buffer is laid out for a `StepShape`, the capacities that a CUDA graph is captured for, and every field keeps its address.
The host writes one of a few pinned buffers in turn, so that a step can be prepared while the ones before it are copied or run.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from common.engine.gpu.block_tables import MAX_CHANGE_BYTES, BlockTables, max_table_ids, table_bytes
from common.engine.plan import StepRow
from common.ops.attention.work_list import DeviceRow
from common.protocol.errors import InvalidParameter

_ALIGN = 16
_MOST_LAYOUTS = 512
"""Views of pinned buffers that are kept."""


class StepShape(NamedTuple):
    """Capacities. `samples` equal to `tokens`: the logits of every token are wanted, in order."""

    tokens: int
    rows: int
    max_queries: int
    samples: int


Array = TypeVar("Array", torch.Tensor, NDArray[Any])


class Fields(NamedTuple, Generic[Array]):
    """Views of a step's buffer; `changes` is last, and only as much of it as is used is copied.

    tokens, positions, feeds: int64 [tokens]; feeds: see `ops.linear.embed`. samples: int64 [samples], which tokens are sampled.
    query_starts: int32 [rows + 1], context_lens: int32 [rows]; as in `ops.attention.work_list.DeviceBatch`.
    slots: int64 [groups, tokens], the entry of each cache group's pool, -1 for padding.
    block_starts: int32 [groups, rows], where the rows' tables begin in `BlockTables.ids`.
    changes: uint8, what is new in those (`BlockTables.write_changes`).
    """

    tokens: Array
    positions: Array
    feeds: Array
    samples: Array
    query_starts: Array
    context_lens: Array
    slots: Array
    block_starts: Array
    changes: Array


def layout(buffer: Array, shape: StepShape, num_groups: int = 1) -> Fields[Array]:
    """buffer: uint8, from `buffer_bytes`; a tensor or an array."""
    start = 0
    wide, narrow = (np.int64, np.int32) if isinstance(buffer, np.ndarray) else (torch.int64, torch.int32)

    def take(dtype: Any, item_bytes: int, count: int) -> Any:
        nonlocal start
        view = buffer[start : start + count * item_bytes].view(dtype)
        start += -(-count * item_bytes // _ALIGN) * _ALIGN
        return view

    def take_each(dtype: Any, item_bytes: int, count: int) -> Any:
        """[groups, count], each group's aligned like a field: kernels are compiled for the alignment of what they read."""
        stride = -(-count * item_bytes // _ALIGN) * _ALIGN // item_bytes
        return take(dtype, item_bytes, num_groups * stride).reshape(num_groups, stride)[:, :count]

    return Fields(
        tokens=take(wide, 8, shape.tokens),
        positions=take(wide, 8, shape.tokens),
        feeds=take(wide, 8, shape.tokens),
        samples=take(wide, 8, shape.samples),
        query_starts=take(narrow, 4, shape.rows + 1),
        context_lens=take(narrow, 4, shape.rows),
        slots=take_each(wide, 8, shape.tokens),
        block_starts=take_each(narrow, 4, shape.rows),
        changes=buffer[start:],
    )


def buffer_bytes(max_tokens: int, max_rows: int, change_bytes: int, num_groups: int = 1) -> int:
    """Bytes that hold any shape within these bounds, and `change_bytes` of what is new in block tables."""
    wide, narrow = (4 + num_groups) * max_tokens, (2 + num_groups) * (max_rows + 1)
    return 8 * wide + 4 * narrow + change_bytes + (7 + 2 * num_groups) * _ALIGN


def step_tokens(max_rows: int, token_budget: int) -> int:
    """Return the most tokens of a step: prompts and proposals, a token of each decoding row, and padding."""
    return token_budget + max_rows + 64


def device_bytes(num_blocks: Sequence[int], longest_blocks: int, max_rows: int, token_budget: int) -> int:
    """Return the bytes that a step's inputs and all block tables take on the device. For the arguments see `max_table_ids`."""
    max_tokens, num_groups = step_tokens(max_rows, token_budget), len(num_blocks)
    tables = table_bytes(max_table_ids(num_blocks, max_rows, longest_blocks), max_tokens * num_groups)
    return tables + buffer_bytes(max_tokens, max_tokens, MAX_CHANGE_BYTES, num_groups)


class PackedStep(NamedTuple):
    """What packing found out.

    changes: the bytes of the buffer with `BlockTables.write_changes`; nothing behind them is used.
    firsts, lengths, starts: int64 [rows]: where each row begins in the step, its tokens, and the position of its first.
    first_blocks: int64 [groups, rows], where the rows' tables begin in `BlockTables.ids`.
    """

    changes: slice
    firsts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    starts: NDArray[np.int64]
    first_blocks: NDArray[np.int64]


def device_rows(packed: PackedStep) -> list[list[DeviceRow]]:
    """Return the rows of a step in each cache group."""
    firsts, lengths, starts = packed.firsts.tolist(), packed.lengths.tolist(), packed.starts.tolist()
    return [list(map(DeviceRow, firsts, lengths, starts, blocks)) for blocks in packed.first_blocks.tolist()]


def blank(buffer: torch.Tensor, shape: StepShape, num_groups: int) -> None:
    """Make it a step of nothing but padding."""
    buffer.zero_()
    fields = layout(buffer, shape, num_groups)
    fields.slots.fill_(-1)
    fields.feeds.fill_(-1)


class StepPacker:
    """Writes plans into pinned buffers, and what is new of their block tables."""

    def __init__(self, tables: BlockTables, *, block_tokens: int, vocab_size: int) -> None:
        self._tables = tables
        self._block_tokens = block_tokens
        self._vocab_size = vocab_size
        self._layouts: dict[tuple[int, StepShape], tuple[NDArray[np.uint8], Fields[NDArray[Any]]]] = {}
        """By the `id` of a buffer and a shape. The buffer is kept with them, so that no other object gets its `id`."""

    def pack(self, rows: Sequence[StepRow], buffer: NDArray[np.uint8], shape: StepShape) -> PackedStep:
        """buffer: pinned memory. `rows` fit `shape`.

        :raises InvalidParameter: if a row can't be run; nothing has been launched then.
        """
        fields = self._fields(buffer, shape)
        num_rows = len(rows)
        given = [row.tokens for row in rows]
        lengths = np.fromiter(map(len, given), np.int64, num_rows)
        starts = np.fromiter([row.start for row in rows], np.int64, num_rows)
        counts = np.fromiter([row.num_samples for row in rows], np.int64, num_rows)
        fed = np.fromiter([row.feed for row in rows], np.int64, num_rows)
        ends = lengths.cumsum()
        firsts = ends - lengths
        num_tokens = int(ends[-1])
        placed = self._tables.place(rows)
        furthest = lengths + np.fromiter([len(row.verified) for row in rows], np.int64, num_rows)
        _check(lengths, starts, counts, furthest, placed.held.min(0) * self._block_tokens)

        tokens = fields.tokens
        tokens[:num_tokens] = np.fromiter(chain.from_iterable(given), np.int64, num_tokens)
        tokens[num_tokens:] = 0
        fields.feeds[:] = -1
        fields.feeds[firsts] = np.maximum(fed, -1)
        known = tokens[:num_tokens] if fed.max() < 0 else tokens[:num_tokens][fields.feeds[:num_tokens] < 0]
        if len(known) and (known.min() < 0 or known.max() >= self._vocab_size):
            raise InvalidParameter(f"a token id is outside the vocabulary of {self._vocab_size}")

        if num_tokens == num_rows:
            place, first_blocks = starts, placed.starts
        else:
            place = np.repeat(starts - firsts, lengths) + np.arange(num_tokens)
            first_blocks = np.repeat(placed.starts, lengths, 1)
        fields.positions[:num_tokens], fields.positions[num_tokens:] = place, 0
        self._place(fields.slots, first_blocks, place)
        fields.block_starts[:, :num_rows], fields.block_starts[:, num_rows:] = placed.starts, 0
        if shape.samples != shape.tokens:
            sample_ends = counts.cumsum()
            num_samples = int(sample_ends[-1])
            fields.samples[:num_samples] = np.repeat(ends - sample_ends, counts) + np.arange(num_samples)
            fields.samples[num_samples:] = 0
        fields.query_starts[0] = 0
        fields.query_starts[1 : num_rows + 1], fields.query_starts[num_rows + 1 :] = ends, num_tokens
        fields.context_lens[:num_rows], fields.context_lens[num_rows:] = starts + lengths, 0
        begin = len(buffer) - len(fields.changes)
        changes = slice(begin, begin + self._tables.write_changes(fields.changes))
        return PackedStep(changes, firsts, lengths, starts, placed.starts)

    def _fields(self, buffer: NDArray[np.uint8], shape: StepShape) -> Fields[NDArray[Any]]:
        key = id(buffer), shape
        found = self._layouts.get(key)
        if found is None:
            if len(self._layouts) == _MOST_LAYOUTS:  # shapes without a graph come in any number
                self._layouts.clear()
            found = self._layouts[key] = buffer, layout(buffer, shape, len(self._tables.num_blocks))
        return found[1]

    def _place(self, slots: NDArray[np.int64], first_blocks: NDArray[np.int64], place: NDArray[np.int64]) -> None:
        """slots: [groups, tokens, padding included]. first_blocks: [groups, tokens]. place: [tokens], their positions.

        :raises InvalidParameter: if a token has no block.
        """
        block, offset = np.divmod(place, self._block_tokens)
        ids = self._tables.slots.ids[first_blocks + block]
        if ids.min() < 0:
            raise InvalidParameter("a row has a hole where its tokens are written")
        num_tokens = len(place)
        np.multiply(ids, self._block_tokens, out=slots[:, :num_tokens], dtype=np.int64)
        slots[:, :num_tokens] += offset
        slots[:, num_tokens:] = -1


def _check(
    lengths: NDArray[np.int64],
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    furthest: NDArray[np.int64],
    held_tokens: NDArray[np.int64],
) -> None:
    """furthest: `lengths`, as if all that rows verify in the step before were accepted."""
    if lengths.min() < 1 or starts.min() < 0 or counts.min() < 0 or (counts > lengths).any():
        raise InvalidParameter("a row has no tokens, or wants more samples than it has tokens")
    if (starts + furthest > held_tokens).any():
        raise InvalidParameter("a row's blocks don't hold its tokens")
