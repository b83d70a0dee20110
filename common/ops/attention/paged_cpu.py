"""`paged_attention` on a CPU: causal attention of a ragged batch over paged, block-first KV.

A plan is made once per step and used by every layer. The keys are read in tiles of fixed length, counted from position 0, and
brought to float32, whatever the pool keeps; each (row, tile) pair is one entry of a batched attention call, and a row's tiles
are merged by their log-sum-exps, first tile first (split-KV, as in FlashDecoding). So ragged rows cost no padding beyond their
last tile, and what a query gets does not depend on other rows, on how its prompt was cut into chunks, or on whether it was part
of a prompt, a decode step or a verification: see docs/decisions/0003-batch-invariance.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from common.ops.attention.merge_cpu import merge_groups, merge_tiles
from common.ops.attention.rows_cpu import NotInvariant as NotInvariant
from common.ops.attention.rows_cpu import flash, row_multiple
from common.ops.attention.scratch_cpu import Gathered, Scratch

TILE_TOKENS = 128
_MASKED = -1e30  # finite: a tile that a query sees nothing of then has weight exp(-1e30 - m) = 0 instead of NaN
_BATCHED_QUERIES = (1, 2, 4, 8, 16, 32)  # rows with this many tokens, rounded up, share a call
_QUERY_TILE = 256


class AttentionRow(NamedTuple):
    """One sequence: queries are tokens [first, first + length) of the step, at positions start, start + 1, …

    `blocks` hold positions [0, start + length), and may hold more.
    """

    first: int
    length: int
    start: int
    blocks: Sequence[int]


@dataclass(slots=True)
class _Group:
    """Rows of about equally many queries. Tiles are ordered by tile index, then row; rows by falling number of tiles.

    tokens: which tokens are the queries [rows * queries]; source/target: which of them to keep, and as which tokens
    (None: `tokens` is a slice, all are kept). tile_rows: int64 [tiles], None when each row has one tile.
    """

    num_rows: int
    num_queries: int
    tokens: slice | torch.Tensor
    source: torch.Tensor | None
    target: torch.Tensor | None
    rows_with_tile: list[int]
    tile_rows: torch.Tensor | None
    entries: torch.Tensor
    mask: torch.Tensor
    decoding: _Decoding | None = None


@dataclass(slots=True)
class _Decoding:
    """What all layers share of a group of one-token rows side by side: a call costs more than the numbers in it.

    pool: one block of one layer's K or V per row. entries: `_Group.entries` of K and V in each layer, [2 · layer + (0: K,
    1: V)]. keys, values: views of what is gathered, [tiles, kv_heads, tile_tokens, head_dim]. queries: [rows, kv_heads, group
    size rounded up, head_dim], zero where rounded up; heads: its view without those.
    """

    pool: torch.Tensor
    entries: tuple[torch.Tensor, ...]
    gathered: tuple[Gathered, Gathered]
    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor
    heads: torch.Tensor


@dataclass(slots=True)
class _QueryTile:
    """Queries [begin, end) (token indices) see `num_open` tiles whole, and `num_tiles - num_open` more through `mask`.

    num_rows: query rows of a KV head, padding included.
    """

    begin: int
    end: int
    num_rows: int
    num_open: int
    num_tiles: int
    mask: torch.Tensor | None


@dataclass(slots=True)
class _LongRow:
    entries: torch.Tensor
    num_tiles: int
    queries: list[_QueryTile]


class _Sizes(NamedTuple):
    """Sizes of a pool and of what reads it.

    block_stride: rows of one layer's K or V from one block to the next. tile_tokens: keys of a tile. group_size: query heads of
    a KV head. row_multiple: query rows are padded to a multiple of it."""

    block_tokens: int
    block_stride: int
    tile_tokens: int
    group_size: int
    row_multiple: int

    def rows(self, queries: int) -> int:
        """Query rows of a KV head, padding included."""
        return -(-queries * self.group_size // self.row_multiple) * self.row_multiple


@dataclass(slots=True)
class AttentionPlan:
    """`plan_attention` makes it. Valid for one step and one pool."""

    num_tokens: int
    tile_tokens: int
    scratch: Scratch
    groups: list[_Group] = field(default_factory=list)
    long_rows: list[_LongRow] = field(default_factory=list)


def check_attention(head_dim: int, block_tokens: int, threads: int) -> None:
    """:raises NotInvariant: if plans for such heads and blocks can't be computed independently of the batch on this CPU."""
    row_multiple(head_dim, _tile_tokens(block_tokens), threads)


def _tile_tokens(block_tokens: int) -> int:
    return -(-TILE_TOKENS // block_tokens) * block_tokens


def plan_attention(
    pool: torch.Tensor, num_heads: int, rows: Sequence[AttentionRow], num_tokens: int, scratch: Scratch | None = None
) -> AttentionPlan:
    """pool: see `paged_kv`; num_tokens: of the step, padding included.

    :raises ValueError: if a row has no tokens, too few blocks or unknown ones, or reaches past `num_tokens`, or heads don't
        divide.
    :raises NotInvariant: see `row_multiple`.
    """
    num_blocks, layers, _, block_tokens, kv_heads, head_dim = pool.shape
    if num_heads % kv_heads:
        raise ValueError(f"{num_heads} query heads can't share {kv_heads} KV heads")
    for row in rows:
        used = row.blocks[: -(-(row.start + row.length) // block_tokens)]
        if row.length < 1 or row.start < 0 or len(used) * block_tokens < row.start + row.length:
            raise ValueError(f"{len(row.blocks)} blocks don't hold {row.length} tokens from {row.start}")
        if min(used) < 0 or max(used) >= num_blocks or row.first < 0 or row.first + row.length > num_tokens:
            raise ValueError(f"a row names blocks or tokens that don't exist: {row}")
    tile_tokens = _tile_tokens(block_tokens)
    multiple = row_multiple(head_dim, tile_tokens, torch.get_num_threads())
    sizes = _Sizes(block_tokens, 2 * layers, tile_tokens, num_heads // kv_heads, multiple)
    plan = AttentionPlan(num_tokens, tile_tokens, scratch or Scratch())
    batches: dict[int, list[AttentionRow]] = {}
    for row in rows:
        queries = next((size for size in _BATCHED_QUERIES if row.length <= size), 0)
        if queries:
            batches.setdefault(queries, []).append(row)
        else:
            plan.long_rows.append(_plan_long(row, sizes))
    for queries, batch in batches.items():
        group = _plan_group(batch, queries, sizes)
        if queries == 1 and isinstance(group.tokens, slice):
            group.decoding = _plan_decoding(group, pool, sizes.group_size, plan)
        plan.groups.append(group)
    return plan


def attend_cpu(query: torch.Tensor, pool: torch.Tensor, layer: int, plan: AttentionPlan, scale: float) -> torch.Tensor:
    """query: [tokens, heads, head_dim] in the pool's dtype. Returns the same shape; padding tokens get zeros.

    The step's own K and V must be in the pool.

    :raises ValueError: if `query` is not what the plan was made for.
    """
    kv_heads, head_dim = pool.shape[4:]
    if query.shape[0] != plan.num_tokens or query.shape[2] != head_dim or query.dtype != pool.dtype:
        raise ValueError(f"the plan is for [{plan.num_tokens}, heads, {head_dim}] {pool.dtype}, not {list(query.shape)}")
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    for group in plan.groups:
        if group.decoding is not None:
            _attend_decoding(query, layer, group, group.decoding, scale, out)
            continue
        _attend_group(query, pool, layer, plan, group, scale, out)
    for row in plan.long_rows:
        keys, values = _gather(pool, layer, row.entries, row.num_tiles, plan)
        for tile in row.queries:
            _attend_tile(query, keys, values, tile, scale, out, kv_heads)
    return out


# ── planning ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _plan_group(rows: list[AttentionRow], queries: int, sizes: _Sizes) -> _Group:
    block_tokens, tile_tokens = sizes.block_tokens, sizes.tile_tokens
    rows = sorted(rows, key=lambda row: -(row.start + row.length))
    num_tiles = np.array([-(-(row.start + row.length) // tile_tokens) for row in rows])
    per_tile = tile_tokens // block_tokens
    table = np.empty((len(rows), int(num_tiles[0]) * per_tile), np.int64)
    for i, row in enumerate(rows):
        used = -(-(row.start + row.length) // block_tokens)
        table[i, :used] = row.blocks[:used]
        table[i, used:] = row.blocks[0]  # masked; any block with finite numbers will do
    rows_with_tile = [int((num_tiles > tile).sum()) for tile in range(int(num_tiles[0]))]
    entries = np.concatenate(
        [table[:count, tile * per_tile : (tile + 1) * per_tile].ravel() for tile, count in enumerate(rows_with_tile)]
    )
    tile_rows = np.concatenate([np.arange(count) for count in rows_with_tile])
    tile_begins = np.repeat(np.arange(len(rows_with_tile)) * tile_tokens, rows_with_tile)

    counts = np.array([row.length for row in rows])
    within = np.minimum(np.arange(queries), counts[:, None] - 1)  # short rows repeat their last query
    positions = within + np.array([row.start for row in rows])[:, None]
    tokens = (within + np.array([row.first for row in rows])[:, None]).ravel()
    contiguous = queries == 1 and bool((tokens == tokens[0] + np.arange(len(tokens))).all())
    kept = np.flatnonzero((np.arange(queries) < counts[:, None]).ravel())
    return _Group(
        num_rows=len(rows),
        num_queries=queries,
        tokens=slice(int(tokens[0]), int(tokens[0]) + len(tokens)) if contiguous else torch.from_numpy(tokens),
        source=None if contiguous else torch.from_numpy(kept),
        target=None if contiguous else torch.from_numpy(tokens[kept]),
        rows_with_tile=rows_with_tile,
        tile_rows=torch.from_numpy(tile_rows) if len(rows_with_tile) > 1 else None,
        entries=torch.from_numpy(entries * sizes.block_stride),
        mask=_mask(positions[tile_rows], tile_begins, sizes),
    )


def _plan_decoding(group: _Group, pool: torch.Tensor, group_size: int, plan: AttentionPlan) -> _Decoding:
    _, layers, _, block_tokens, kv_heads, head_dim = pool.shape
    flat = pool.view(-1, block_tokens * kv_heads * head_dim)
    gathered = [Gathered.take(plan.scratch, name, len(group.entries), flat) for name in ("keys", "values")]
    keys, values = (each.wide.view(-1, plan.tile_tokens, kv_heads, head_dim).transpose(1, 2) for each in gathered)
    queries = torch.zeros(group.num_rows, kv_heads, group.mask.shape[2], head_dim)
    return _Decoding(
        pool=flat,
        entries=(group.entries + torch.arange(2 * layers)[:, None]).unbind(0),
        gathered=(gathered[0], gathered[1]),
        keys=keys,
        values=values,
        queries=queries,
        heads=queries[:, :, :group_size],
    )


def _plan_long(row: AttentionRow, sizes: _Sizes) -> _LongRow:
    block_tokens, tile_tokens = sizes.block_tokens, sizes.tile_tokens
    end = row.start + row.length
    used = -(-end // block_tokens)
    num_tiles = -(-end // tile_tokens)
    entries = np.full(num_tiles * tile_tokens // block_tokens, row.blocks[0], np.int64)
    entries[:used] = row.blocks[:used]
    queries: list[_QueryTile] = []
    for begin in range(0, row.length, _QUERY_TILE):
        positions = row.start + np.arange(begin, min(begin + _QUERY_TILE, row.length))
        num_open = (int(positions[0]) + 1) // tile_tokens
        reached = int(positions[-1]) // tile_tokens + 1
        begins = np.arange(num_open, reached) * tile_tokens
        mask = _mask(np.broadcast_to(positions, (len(begins), len(positions))), begins, sizes)
        tile = _QueryTile(
            begin=row.first + begin,
            end=row.first + begin + len(positions),
            num_rows=sizes.rows(len(positions)),
            num_open=num_open,
            num_tiles=reached,
            mask=mask if len(begins) else None,
        )
        queries.append(tile)
    return _LongRow(torch.from_numpy(entries * sizes.block_stride), num_tiles, queries)


def _mask(positions: np.ndarray, begins: np.ndarray, sizes: _Sizes) -> torch.Tensor:
    """positions: [tiles, queries]; begins: [tiles], the tile's first key position. Returns [tiles, 1, query rows, tile_tokens]:
    each query once per head of its group, then rows of padding that see everything."""
    tiles, queries = positions.shape
    mask = torch.zeros(tiles, 1, sizes.rows(queries), sizes.tile_tokens)
    keys = torch.from_numpy(begins[:, None] + np.arange(sizes.tile_tokens))
    hidden = keys[:, None, :] > torch.from_numpy(np.repeat(positions, sizes.group_size, axis=1))[:, :, None]
    mask[:, 0, : queries * sizes.group_size].masked_fill_(hidden, _MASKED)
    return mask


# ── running ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _gather(
    pool: torch.Tensor, layer: int, entries: torch.Tensor, num_tiles: int, plan: AttentionPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of tiles: [tiles, kv_heads, tile_tokens, head_dim] each, float32, in scratch memory."""
    _, _, _, block_tokens, kv_heads, head_dim = pool.shape
    flat = pool.view(-1, block_tokens * kv_heads * head_dim)
    found: list[torch.Tensor] = []
    for which, name in enumerate(("keys", "values")):
        buffers = Gathered.take(plan.scratch, name, len(entries), flat)
        buffers.fill(flat, entries + (2 * layer + which))
        found.append(buffers.wide.view(num_tiles, plan.tile_tokens, kv_heads, head_dim).transpose(1, 2))
    return found[0], found[1]


def _attend_group(
    query: torch.Tensor, pool: torch.Tensor, layer: int, plan: AttentionPlan, group: _Group, scale: float, out: torch.Tensor
) -> None:
    kv_heads, head_dim = pool.shape[4:]
    group_size = query.shape[1] // kv_heads
    rows, queries = group.num_rows, group.num_queries
    used = queries * group_size
    q = query[group.tokens].view(rows, queries, kv_heads, group_size, head_dim)
    q = q.transpose(1, 2).reshape(rows, kv_heads, used, head_dim).float()
    if group.mask.shape[2] > used:
        q = F.pad(q, (0, 0, 0, group.mask.shape[2] - used))
    keys, values = _gather(pool, layer, group.entries, group.mask.shape[0], plan)
    if group.tile_rows is None:
        merged, _ = flash(q, keys, values, attn_mask=group.mask, scale=scale)
    else:
        tiled, sums = flash(q.index_select(0, group.tile_rows), keys, values, attn_mask=group.mask, scale=scale)
        merged = merge_groups(tiled, sums, group.rows_with_tile, group.tile_rows)
    merged = merged[:, :, :used].unflatten(2, (queries, group_size)).transpose(1, 2)
    if group.source is not None and group.target is not None:
        out.index_copy_(0, group.target, merged.reshape(-1, *out.shape[1:]).index_select(0, group.source).to(out.dtype))


def _attend_decoding(
    query: torch.Tensor, layer: int, group: _Group, decoding: _Decoding, scale: float, out: torch.Tensor
) -> None:
    """What `_attend_group` computes, in fewer calls."""
    heads = decoding.heads
    heads.copy_(query[group.tokens].view(heads.shape))
    for which, gathered in enumerate(decoding.gathered):
        gathered.fill(decoding.pool, decoding.entries[2 * layer + which])
    if group.tile_rows is None:
        merged, _ = flash(decoding.queries, decoding.keys, decoding.values, attn_mask=group.mask, scale=scale)
    else:
        queries = decoding.queries.index_select(0, group.tile_rows)
        tiled, sums = flash(queries, decoding.keys, decoding.values, attn_mask=group.mask, scale=scale)
        merged = merge_groups(tiled, sums, group.rows_with_tile, group.tile_rows)
    out[group.tokens].view(heads.shape).copy_(merged[:, :, : heads.shape[2]])


def _attend_tile(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tile: _QueryTile,
    scale: float,
    out: torch.Tensor,
    kv_heads: int,
) -> None:
    count, heads, head_dim = tile.end - tile.begin, query.shape[1], query.shape[2]
    used = count * (heads // kv_heads)
    q = query[tile.begin : tile.end].float().view(count, kv_heads, -1, head_dim)
    q = q.transpose(0, 1).reshape(1, kv_heads, used, head_dim)
    if tile.num_rows > used:
        q = F.pad(q, (0, 0, 0, tile.num_rows - used))
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    for begin, end, mask in ((0, tile.num_open, None), (tile.num_open, tile.num_tiles, tile.mask)):
        if end > begin:
            tiled, sums = flash(
                q.expand(end - begin, -1, -1, -1), keys[begin:end], values[begin:end], attn_mask=mask, scale=scale
            )
            parts += zip(tiled.unbind(0), sums.unbind(0), strict=True)
    merged = merge_tiles(parts)[:, :used]
    out[tile.begin : tile.end].view(count, kv_heads, -1, head_dim).copy_(
        merged.view(kv_heads, count, -1, head_dim).transpose(0, 1)
    )
