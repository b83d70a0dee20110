"""The KV pool of one cache group on a CPU, and which layers read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from common.cache.grouped_pool import HOLE
from common.cache.retention import KEEP_ALL, Retention
from common.engine.plan import StepRow
from common.models.blocks.attention import AttentionBlock
from common.protocol.errors import InvalidParameter


class LayerGroup(NamedTuple):
    """pool: [num_blocks, len(layers), 2, block_tokens, kv_heads, head_dim], contiguous; layer layers[i] keeps its KV at i."""

    pool: torch.Tensor
    layers: Sequence[int]
    retention: Retention = KEEP_ALL

    def check(self, row: StepRow, table: Sequence[int]) -> None:
        """:raises InvalidParameter: if the row's block table does not have what the row reads and writes."""
        num_blocks, block_tokens = self.pool.shape[0], self.pool.shape[3]
        end = row.start + len(row.tokens)
        if len(table) * block_tokens < end:
            raise InvalidParameter(f"{len(table)} blocks of {block_tokens} tokens don't hold {end} tokens")
        used = table if self.retention.keeps_all else table[self._first(row) : -(-end // block_tokens)]
        if min(used) < 0 or max(used) >= num_blocks:
            raise InvalidParameter(f"a row names a block outside the pool of {num_blocks}")

    def whole_table(self, row: StepRow, table: Sequence[int]) -> Sequence[int]:
        """Return the block table with a block in every place: in those that the row does not read, one that it does."""
        if self.retention.keeps_all:
            return table
        first = self._first(row)
        return [table[first]] * first + [table[first] if block == HOLE else block for block in table[first:]]

    def _first(self, row: StepRow) -> int:
        return self.retention.first_token(row.start) // self.pool.shape[3]


class LayerAttention(Protocol):
    def __call__(self, qkv: torch.Tensor, block: AttentionBlock, layer: int) -> torch.Tensor: ...


class GroupedAttention:
    """Attention of a step whose layers keep KV in several pools: that of each layer's group, with its place there."""

    def __init__(self, groups: Sequence[LayerGroup], attentions: Sequence[LayerAttention]) -> None:
        self._places = {
            layer: (attention, place)
            for group, attention in zip(groups, attentions, strict=True)
            for place, layer in enumerate(group.layers)
        }

    def __call__(self, qkv: torch.Tensor, block: AttentionBlock, layer: int) -> torch.Tensor:
        attention, place = self._places[layer]
        return attention(qkv, block, place)
