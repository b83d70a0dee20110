"""The KV pool of one cache group, and which layers read it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import torch

from common.cache.grouped_pool import HOLE
from common.cache.retention import KEEP_ALL, Retention
from common.engine.plan import BlockCopy, StepRow
from common.models.blocks.attention import AttentionBlock
from common.models.spec import ModelSpec
from common.protocol.errors import ConfigError, InvalidParameter


class LayerGroup(NamedTuple):
    """pool: [num_blocks, len(layers), 2, block_tokens, kv_heads, head_dim], contiguous; layer layers[i] keeps its KV at i."""

    pool: torch.Tensor
    layers: Sequence[int]
    retention: Retention = KEEP_ALL

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that the pool holds."""
        return self.retention.longest(self.pool.shape[0], self.pool.shape[3])

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


def check_groups(groups: Sequence[LayerGroup], model: ModelSpec, dtypes: Collection[torch.dtype]) -> None:
    """:raises ConfigError: if the pools' shapes or dtypes are not the model's, or a layer is not in one of them."""
    for pool, layers, _ in groups:
        if (
            pool.ndim != 6
            or pool.shape[1:3] != (len(layers), 2)
            or pool.shape[4:] != (model.num_kv_heads, model.head_dim)
            or pool.shape[3] != groups[0].pool.shape[3]
            or not pool.is_contiguous()
        ):
            raise ConfigError(f"a KV pool of shape {list(pool.shape)} does not fit this model")
        if pool.dtype not in dtypes or pool.dtype != groups[0].pool.dtype:
            raise ConfigError(f"a {pool.dtype} KV pool does not fit this model: it keeps {' or '.join(map(str, dtypes))}")
    if sorted(layer for group in groups for layer in group.layers) != list(range(model.num_layers)):
        raise ConfigError(f"the cache groups don't have each of {model.num_layers} layers once")


def check_copies(groups: Sequence[LayerGroup], copies: Sequence[BlockCopy]) -> None:
    """:raises InvalidParameter: if there is no such group or block."""
    for group, *blocks in copies:
        if not 0 <= group < len(groups) or min(blocks) < 0 or max(blocks) >= len(groups[group].pool):
            raise InvalidParameter(f"no block can be copied from {blocks[0]} to {blocks[1]} in cache group {group}")


def make_copies(groups: Sequence[LayerGroup], copies: Sequence[BlockCopy]) -> None:
    """Copy blocks within pools; `check_copies` allows it. A block is contiguous, so each is one copy of memory."""
    for group, source, target in copies:
        pool = groups[group].pool
        pool[target].copy_(pool[source], non_blocking=True)


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
