"""A step as a GPU takes it: one buffer on the device, filled by one copy from pinned memory.

A buffer is laid out for a `StepShape`, the capacities that a CUDA graph is captured for, and every field keeps its address.
The host writes one of a few pinned buffers in turn, so that a step can be prepared while the ones before it are copied or run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from common.cache.grouped_pool import HOLE
from common.engine.plan import StepRow
from common.protocol.errors import InvalidParameter

_ALIGN = 16


class StepShape(NamedTuple):
    """Capacities. `samples` equal to `tokens`: the logits of every token are wanted, in order."""

    tokens: int
    rows: int
    max_queries: int
    samples: int


class Fields(NamedTuple):
    """Views of a step's buffer; `block_ids` is last, and only as much of it as is used is copied.

    tokens, positions, feeds: int64 [tokens]; feeds: see `ops.linear.embed`. samples: int64 [samples], which tokens are sampled.
    slots: of each cache group, int64 [tokens], the pool's entry, -1 for padding. The rest is int32 and as in
    `ops.attention.work_list.DeviceBatch`; block_starts are of each group, and `block_ids` holds the tables of one group after
    the other.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    feeds: torch.Tensor
    samples: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    slots: list[torch.Tensor]
    block_starts: list[torch.Tensor]
    block_ids: torch.Tensor


def layout(buffer: torch.Tensor, shape: StepShape, num_groups: int = 1) -> Fields:
    """buffer: uint8, from `buffer_bytes`."""
    start = 0

    def take(dtype: torch.dtype, count: int) -> torch.Tensor:
        nonlocal start
        view = buffer[start : start + count * dtype.itemsize].view(dtype)
        start += -(-count * dtype.itemsize // _ALIGN) * _ALIGN
        return view

    return Fields(
        tokens=take(torch.int64, shape.tokens),
        positions=take(torch.int64, shape.tokens),
        feeds=take(torch.int64, shape.tokens),
        samples=take(torch.int64, shape.samples),
        query_starts=take(torch.int32, shape.rows + 1),
        context_lens=take(torch.int32, shape.rows),
        slots=[take(torch.int64, shape.tokens) for _ in range(num_groups)],
        block_starts=[take(torch.int32, shape.rows + 1) for _ in range(num_groups)],
        block_ids=take(torch.int32, (len(buffer) - start) // 4),
    )


def buffer_bytes(max_tokens: int, max_rows: int, num_block_ids: int, num_groups: int = 1) -> int:
    """Bytes that hold any shape within these bounds."""
    wide, narrow = (4 + num_groups) * max_tokens, (2 + num_groups) * (max_rows + 1) + num_block_ids
    return 8 * wide + 4 * narrow + (7 + 2 * num_groups) * _ALIGN


@dataclass(slots=True)
class PackedStep:
    """What packing found out. int64 [rows]: where each row begins in the step, its tokens, and the position of its first.

    blocks: of each cache group, each row's block ids as they were packed. A row's list may grow on another thread meanwhile.
    """

    used_bytes: int
    firsts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    starts: NDArray[np.int64]
    blocks: list[list[NDArray[np.int32]]]


class StepPacker:
    """Writes plans into pinned buffers. Block ids of decoding rows are remembered: their lists only grow, but for blocks that
    no later token reads.

    num_blocks: of each cache group.
    """

    def __init__(self, *, block_tokens: int, num_blocks: Sequence[int], vocab_size: int) -> None:
        self._block_tokens = block_tokens
        self._num_blocks = num_blocks
        self._vocab_size = vocab_size
        self._known: dict[int, tuple[list[int], NDArray[np.int32]]] = {}

    def pack(self, rows: Sequence[StepRow], fields: Fields, shape: StepShape) -> PackedStep:
        """fields: `layout` of a pinned buffer. `rows` fit `shape`.

        :raises InvalidParameter: if a row can't be run; nothing has been launched then.
        """
        host = [field.numpy() for field in fields if isinstance(field, torch.Tensor)]
        tokens, positions, feeds, samples, query_starts, context_lens, block_ids = host
        lengths = np.array([len(row.tokens) for row in rows], np.int64)
        starts = np.array([row.start for row in rows], np.int64)
        counts = np.array([row.num_samples for row in rows], np.int64)
        ends = np.cumsum(lengths)
        firsts = ends - lengths
        num_rows, num_tokens = len(rows), int(ends[-1])
        if any(1 + len(row.more_blocks) != len(self._num_blocks) for row in rows):
            raise InvalidParameter(f"a row has other block tables than one for each of {len(self._num_blocks)} cache groups")
        blocks = [
            [self._blocks_of(row, row.more_blocks[group - 1] if group else row.blocks) for row in rows]
            for group in range(len(self._num_blocks))
        ]
        held = np.array([[len(ids) for ids in tables] for tables in blocks], np.int64)
        _check(lengths, starts, counts, held.min(0) * self._block_tokens)
        block_ends = np.cumsum(held).reshape(held.shape)
        num_ids = int(block_ends[-1, -1])
        if num_ids > len(block_ids):
            raise InvalidParameter(f"a step names {num_ids} KV blocks; this engine's buffers hold {len(block_ids)}")
        np.concatenate([ids for tables in blocks for ids in tables], out=block_ids[:num_ids])
        for num_blocks, begin, end in zip(self._num_blocks, block_ends[:, 0] - held[:, 0], block_ends[:, -1], strict=True):
            mine = block_ids[begin:end]
            if mine.min() < HOLE or mine.max() >= num_blocks:
                raise InvalidParameter(f"a row names a block outside the pool of {num_blocks}")

        tokens[:num_tokens] = np.fromiter(chain.from_iterable([row.tokens for row in rows]), np.int64, num_tokens)
        tokens[num_tokens:] = 0
        fed = np.array([row.feed for row in rows], np.int64)
        feeds[:] = -1
        feeds[firsts[fed >= 0]] = fed[fed >= 0]
        known = tokens[:num_tokens][feeds[:num_tokens] < 0]
        if len(known) and (known.min() < 0 or known.max() >= self._vocab_size):
            raise InvalidParameter(f"a token id is outside the vocabulary of {self._vocab_size}")

        place = np.repeat(starts - firsts, lengths) + np.arange(num_tokens)
        positions[:num_tokens], positions[num_tokens:] = place, 0
        for group, (slots, block_starts) in enumerate(zip(fields.slots, fields.block_starts, strict=True)):
            self._place(slots.numpy(), block_ids, np.repeat(block_ends[group] - held[group], lengths), place)
            firsts_of_rows = block_starts.numpy()
            firsts_of_rows[0] = block_ends[group, 0] - held[group, 0]
            firsts_of_rows[1 : num_rows + 1], firsts_of_rows[num_rows + 1 :] = block_ends[group], block_ends[group, -1]
        np.maximum(block_ids[:num_ids], 0, out=block_ids[:num_ids])  # what nobody reads is still an address
        if shape.samples != shape.tokens:
            sample_ends = np.cumsum(counts)
            num_samples = int(sample_ends[-1])
            samples[:num_samples] = np.repeat(ends - sample_ends, counts) + np.arange(num_samples)
            samples[num_samples:] = 0
        query_starts[0] = 0
        query_starts[1 : num_rows + 1], query_starts[num_rows + 1 :] = ends, num_tokens
        context_lens[:num_rows], context_lens[num_rows:] = starts + lengths, 0
        used = fields.block_ids.data_ptr() - fields.tokens.data_ptr() + 4 * num_ids
        return PackedStep(used, firsts, lengths, starts, blocks)

    def _place(
        self, slots: NDArray[np.int64], block_ids: NDArray[np.int32], first_block: NDArray[np.int64], place: NDArray[np.int64]
    ) -> None:
        """:raises InvalidParameter: if a token has no block."""
        num_tokens = len(place)
        ids = block_ids[first_block + place // self._block_tokens].astype(np.int64)
        if ids.min() < 0:
            raise InvalidParameter("a row has a hole where its tokens are written")
        slots[:num_tokens] = ids * self._block_tokens + place % self._block_tokens
        slots[num_tokens:] = -1

    def _blocks_of(self, row: StepRow, blocks: list[int]) -> NDArray[np.int32]:
        if len(row.tokens) > 1 or not row.num_samples:
            return np.array(blocks, np.int32)  # a prompt's blocks may still be exchanged for cached ones
        entry = self._known.get(id(blocks))
        if entry is None or entry[0] is not blocks or len(entry[1]) > len(blocks):
            if len(self._known) > 4096:
                self._known.clear()
            entry = self._known[id(blocks)] = (blocks, np.array(blocks, np.int32))
        elif len(entry[1]) < len(blocks):
            grown = np.concatenate((entry[1], np.array(blocks[len(entry[1]) :], np.int32)))
            entry = self._known[id(blocks)] = (blocks, grown)
        return entry[1]


def _check(
    lengths: NDArray[np.int64], starts: NDArray[np.int64], counts: NDArray[np.int64], held_tokens: NDArray[np.int64]
) -> None:
    if lengths.min() < 1 or starts.min() < 0 or counts.min() < 0 or (counts > lengths).any():
        raise InvalidParameter("a row has no tokens, or wants more samples than it has tokens")
    if (starts + lengths > held_tokens).any():
        raise InvalidParameter("a row's blocks don't hold its tokens")
