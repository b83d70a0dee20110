"""A step's rows on the device, and the list of the work that their attention is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from common.ops.attention.configs import AttentionConfig


class DeviceRow(NamedTuple):
    """`length` queries from token `first` of the step, after `start` keys; its blocks begin at `block_ids[first_block]`."""

    first: int
    length: int
    start: int
    first_block: int


@dataclass(slots=True)
class DeviceBatch:
    """A step of up to `num_rows` sequences, in tensors of fixed size.

    query_starts: int32 [num_rows + 1]; row r's queries are tokens [query_starts[r], query_starts[r + 1]) of the step; unused
        rows are last and empty, and tokens past query_starts[num_rows] are padding.
    context_lens: int32 [num_rows], keys of each row after the step, its own tokens included.
    block_ids: int32 [capacity] and block_starts: int32 [num_rows]; row r's blocks are those from block_ids[block_starts[r]] on,
        as many as its keys need. Rows may be anywhere, in any order.
    max_queries: no row has more; num_tokens: of the step, padding included.
    rows: the same on the host, if it knows: prompts without a cached prefix are then found for SDPA.
    max_blocks: that all rows have together; None: as many as `block_ids` has.
    """

    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_ids: torch.Tensor
    block_starts: torch.Tensor
    max_queries: int
    num_tokens: int
    rows: Sequence[DeviceRow] | None = None
    max_blocks: int | None = None

    @property
    def num_rows(self) -> int:
        return len(self.context_lens)


@dataclass(slots=True)
class WorkList:
    """Rows of up to max_queries queries.

    items: int32 [max_items, 8]: first token, queries, position of the first, where the row's block ids begin, first key tile,
        key tiles, first slot of the partial results (-1: there is one result, written to the output), which of the parts this
        is + how many there are · 65536. Without key tiles it is not a part.
    merges: int32 [max_merges, 4]: first token, queries, first slot, slots.
    counts: int32 [2], how many of both there are.
    partials: float32 [slots, kv_heads, slot_rows, head_dim]; sums: float32 [slots, kv_heads, slot_rows], log2-sum-exps.
    arrivals: int32 [slots, kv_heads], zero between kernels; parts of a row written, at its first slot (fused merges).
    """

    config: AttentionConfig
    max_queries: int
    items: torch.Tensor
    merges: torch.Tensor
    counts: torch.Tensor
    partials: torch.Tensor
    sums: torch.Tensor
    arrivals: torch.Tensor
