"""What a model keeps per token, and how that lies in a block. Torch-free: sizes and offsets only.

A *component* is one kind of state of a layer (the K and V of grouped-query attention, a latent, a ring, a recurrent
state). A *group* is every (layer, component) of equal retention: they share one block table, and one block holds all of
them for `block_tokens` tokens as one contiguous region (block-first), so that one copy moves it. A *layout* is a model's
groups plus the pool's size.
"""

from __future__ import annotations

import hashlib
import math
from typing import Literal

import msgspec

Kind = Literal["paged", "window", "chunk", "state"]
Rollback = Literal["truncate", "ring", "snapshot"]


class Component(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of state of one layer.

    `entry_bytes` is the size of one entry, which covers `tokens_per_entry` tokens (a state has one entry per block, however
    many tokens). `layout` names the byte format inside. `window`: tokens kept, 0 for all. `shard`: what tensor parallelism
    does to it. `rollback`: how the last tokens are undone after rejected speculation.
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

    All groups draw from one pool of equal blocks, so a block is as large as the largest group needs.
    """

    groups: tuple[GroupSpec, ...]
    num_blocks: int = 0
    fingerprint: str = ""

    @property
    def block_tokens(self) -> int:
        """Tokens; the grain of prefix reuse: a prefix can be shared only where every group has a whole block."""
        return math.lcm(*(group.block_tokens for group in self.groups))

    @property
    def block_bytes(self) -> int:
        return max(group.block_bytes for group in self.groups)

    def digest(self) -> str:
        """A short name of the groups alone (not of the pool's size), as one ingredient of a fingerprint."""
        return hashlib.blake2b(msgspec.json.encode(self.groups), digest_size=8).hexdigest()

    def sized(self, num_blocks: int, fingerprint: str) -> CacheLayout:
        return msgspec.structs.replace(self, num_blocks=num_blocks, fingerprint=fingerprint)


def gqa_layout(num_layers: int, num_kv_heads: int, head_dim: int, dtype_bytes: int, block_tokens: int) -> CacheLayout:
    """Grouped-query attention (Llama, Qwen3): one paged group; a block is [layers, 2, block_tokens, kv_heads, head_dim]."""
    kv = Component(
        name="kv",
        kind="paged",
        entry_bytes=2 * num_kv_heads * head_dim * dtype_bytes,
        layout=f"kv_split{8 * dtype_bytes}",  # all K of the block, then all V
        shard="kv_head",
    )
    group = GroupSpec(name="kv", members=tuple(Member(layer, kv) for layer in range(num_layers)), block_tokens=block_tokens)
    return CacheLayout(groups=(group,))


def group_name(name: str, group: int) -> str:
    """Return the name of a cache group's segment, or the fingerprint of its blocks, from the first group's."""
    return f"{name}-{group}" if group else name
