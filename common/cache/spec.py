"""What a model keeps per token, and how that lies in a block. Torch-free: sizes and offsets only.

A *component* is one kind of state of a layer (the K and V of grouped-query attention, a latent, a ring, a recurrent
state). A *group* is every (layer, component) of equal retention: they share one block table, and one block holds all of
them for `block_tokens` tokens as one contiguous region (block-first), so that one copy moves it. A *layout* is a model's
groups plus the pool's size.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from common.cache.retention import KEEP_ALL, Retention

Kind = Literal["paged", "window", "chunk", "state"]
Rollback = Literal["truncate", "ring", "snapshot"]


class Component(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of state of one layer.

    `entry_bytes` is the size of one entry, which covers `tokens_per_entry` tokens (a state has one entry per block, however
    many tokens). `layout` names the byte format inside. `window`: tokens of a window or a chunk, 0 for all. `shard`: what
    tensor parallelism does to it. `rollback`: how the last tokens are undone after rejected speculation.
    """

    name: str
    kind: Kind
    entry_bytes: int
    layout: str
    tokens_per_entry: int = 1
    window: int = 0
    shard: str = "replicated"
    rollback: Rollback = "truncate"

    def bytes_per_block(self, block_tokens: int) -> int:
        if self.kind == "state":
            return self.entry_bytes
        if block_tokens % self.tokens_per_entry:
            raise ValueError(f"{self.name}: blocks of {block_tokens} tokens hold no whole number of entries")
        return block_tokens // self.tokens_per_entry * self.entry_bytes


class Member(msgspec.Struct, frozen=True, array_like=True):
    """`component` as layer `layer` has it."""

    layer: int
    component: Component


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Members of equal retention. A block of the group holds each member's part, one after the other."""

    name: str
    members: tuple[Member, ...]
    block_tokens: int

    @property
    def retention(self) -> Retention:
        """What is kept of a sequence: that of the members' components, which is equal."""
        component = self.members[0].component
        if component.kind == "chunk":
            return Retention(chunk=component.window)
        return Retention(window=component.window)

    @property
    def block_bytes(self) -> int:
        return sum(member.component.bytes_per_block(self.block_tokens) for member in self.members)

    def offset_bytes(self, layer: int, component: str) -> int:
        """Where the part of (`layer`, `component`) begins inside a block.

        :raises KeyError: if the group has no such member.
        """
        offset = 0
        for member in self.members:
            if (member.layer, member.component.name) == (layer, component):
                return offset
            offset += member.component.bytes_per_block(self.block_tokens)
        raise KeyError((layer, component))


class CacheLayout(msgspec.Struct, frozen=True, kw_only=True):
    """A model's groups, and how many blocks the pool has. `fingerprint` names model, precision and layout.

    Each group has a pool of its own, of blocks of its own size: the first group `num_blocks`, the others `more_blocks`.
    """

    groups: tuple[GroupSpec, ...]
    num_blocks: int = 0
    more_blocks: tuple[int, ...] = ()
    fingerprint: str = ""

    @property
    def block_tokens(self) -> int:
        """Tokens; the grain of prefix reuse: a prefix can be shared only where every group has a whole block."""
        return math.lcm(*(group.block_tokens for group in self.groups))

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of the first group."""
        return self.groups[0].block_bytes

    @property
    def pools(self) -> list[tuple[GroupSpec, int]]:
        """Each group, and how many blocks it has."""
        return list(zip(self.groups, (self.num_blocks, *self.more_blocks), strict=True))

    @property
    def memory_bytes(self) -> int:
        return sum(group.block_bytes * num_blocks for group, num_blocks in self.pools)

    @property
    def longest_sequence(self) -> int:
        """Tokens that the pools hold for one sequence, beside a block that is kept free."""
        return min(group.retention.longest(num_blocks - 1, group.block_tokens) for group, num_blocks in self.pools)

    def bytes_for(self, num_tokens: int) -> int:
        """Return the memory for one sequence of `num_tokens` tokens, and a block of each group that is kept free."""
        return sum(
            group.block_bytes * (group.retention.blocks_for(num_tokens, group.block_tokens) + 1) for group in self.groups
        )

    def digest(self) -> str:
        """A short name of the groups alone (not of the pool's size), as one ingredient of a fingerprint."""
        return hashlib.blake2b(msgspec.json.encode(self.groups), digest_size=8).hexdigest()

    def sized(self, num_blocks: int, fingerprint: str, *more_blocks: int) -> CacheLayout:
        return msgspec.structs.replace(self, num_blocks=num_blocks, more_blocks=more_blocks, fingerprint=fingerprint)


class LayerCache(msgspec.Struct, frozen=True, kw_only=True):
    """What a layer's attention keeps of each token, K and V, and of which tokens."""

    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    retention: Retention = KEEP_ALL


def attention_layout(layers: Sequence[LayerCache], block_tokens: int) -> CacheLayout:
    """Return a group for each retention that `layers` have, the longest first.

    A block of a group is [its layers, 2, block_tokens, kv_heads, head_dim], where all have the same heads.

    :raises ValueError: if a layer keeps a window and chunks.
    """
    retentions = sorted({layer.retention for layer in layers}, key=lambda kept: (not kept.keeps_all, -kept.span, kept.name))
    groups: list[GroupSpec] = []
    for retention in retentions:
        members = [(index, layer) for index, layer in enumerate(layers) if layer.retention == retention]
        groups.append(
            GroupSpec(
                name=retention.name,
                members=tuple(Member(index, _kv_component(layer)) for index, layer in members),
                block_tokens=block_tokens,
            )
        )
    return CacheLayout(groups=tuple(groups))


def gqa_layout(num_layers: int, num_kv_heads: int, head_dim: int, dtype_bytes: int, block_tokens: int) -> CacheLayout:
    """Grouped-query attention (Llama, Qwen3): one paged group; a block is [layers, 2, block_tokens, kv_heads, head_dim]."""
    layer = LayerCache(num_kv_heads=num_kv_heads, head_dim=head_dim, dtype_bytes=dtype_bytes)
    return attention_layout([layer] * num_layers, block_tokens)


def _kv_component(layer: LayerCache) -> Component:
    retention = layer.retention
    if retention.window and retention.chunk:
        raise ValueError("a layer keeps a window or chunks, not both")
    return Component(
        name="kv",
        kind="paged" if retention.keeps_all else "window" if retention.window else "chunk",
        entry_bytes=2 * layer.num_kv_heads * layer.head_dim * layer.dtype_bytes,
        layout=f"kv_split{8 * layer.dtype_bytes}",  # all K of the block, then all V
        window=retention.span,
        shard="kv_head",
    )


def group_name(name: str, group: int) -> str:
    """Return the name of a cache group's segment, or the fingerprint of its blocks, from the first group's."""
    return f"{name}-{group}" if group else name
