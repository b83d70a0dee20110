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

from common.ops.scratch_cpu import Gathered, Scratch

TILE_TOKENS = 128
_MASKED = -1e30  # finite: a tile that a query sees nothing of then has weight exp(-1e30 - m) = 0 instead of NaN
_ROW_MULTIPLE = 4  # the CPU kernel treats query rows alike when they come in fours
_BATCHED_QUERIES = (1, 2, 4, 8, 16, 32)  # rows with this many tokens, rounded up, share a call
_QUERY_TILE = 256

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


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
    """Queries [begin, end) (token indices) see `num_open` tiles whole, and `num_tiles - num_open` more through `mask`."""

    begin: int
    end: int
    num_open: int
    num_tiles: int
    mask: torch.Tensor | None


@dataclass(slots=True)
class _LongRow:
    entries: torch.Tensor
    num_tiles: int
    queries: list[_QueryTile]


@dataclass(slots=True)
class AttentionPlan:
    """`plan_attention` makes it. Valid for one step and one pool."""

    num_tokens: int
    tile_tokens: int
    scratch: Scratch
    groups: list[_Group] = field(default_factory=list)
    long_rows: list[_LongRow] = field(default_factory=list)


def plan_attention(
    pool: torch.Tensor, num_heads: int, rows: Sequence[AttentionRow], num_tokens: int, scratch: Scratch | None = None
) -> AttentionPlan:
    """pool: see `paged_kv`; num_tokens: of the step, padding included.

    :raises ValueError: if a row has no tokens, too few blocks or unknown ones, or reaches past `num_tokens`, or heads don't
        divide.
    """
    num_blocks, layers, _, block_tokens, kv_heads, _ = pool.shape
    if num_heads % kv_heads:
        raise ValueError(f"{num_heads} query heads can't share {kv_heads} KV heads")
    for row in rows:
        used = row.blocks[: -(-(row.start + row.length) // block_tokens)]
        if row.length < 1 or row.start < 0 or len(used) * block_tokens < row.start + row.length:
            raise ValueError(f"{len(row.blocks)} blocks don't hold {row.length} tokens from {row.start}")
        if min(used) < 0 or max(used) >= num_blocks or row.first < 0 or row.first + row.length > num_tokens:
            raise ValueError(f"a row names blocks or tokens that don't exist: {row}")
    plan = AttentionPlan(num_tokens, -(-TILE_TOKENS // block_tokens) * block_tokens, scratch or Scratch())
    batches: dict[int, list[AttentionRow]] = {}
    group_size = num_heads // kv_heads
    for row in rows:
        queries = next((size for size in _BATCHED_QUERIES if row.length <= size), 0)
        if queries:
            batches.setdefault(queries, []).append(row)
        else:
            plan.long_rows.append(_plan_long(row, block_tokens, 2 * layers, plan.tile_tokens, group_size))
    for queries, batch in batches.items():
        group = _plan_group(batch, queries, block_tokens, 2 * layers, plan.tile_tokens, group_size)
        if queries == 1 and isinstance(group.tokens, slice):
            group.decoding = _plan_decoding(group, pool, group_size, plan)
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


def _plan_group(
    rows: list[AttentionRow],
    queries: int,
    block_tokens: int,
    block_stride: int,
    tile_tokens: int,
    group_size: int,
) -> _Group:
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
        entries=torch.from_numpy(entries * block_stride),
        mask=_mask(positions[tile_rows], tile_begins, tile_tokens, group_size),
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


def _plan_long(row: AttentionRow, block_tokens: int, block_stride: int, tile_tokens: int, group_size: int) -> _LongRow:
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
        mask = _mask(np.broadcast_to(positions, (len(begins), len(positions))), begins, tile_tokens, group_size)
        tile = _QueryTile(
            row.first + begin, row.first + begin + len(positions), num_open, reached, mask if len(begins) else None
        )
        queries.append(tile)
    return _LongRow(torch.from_numpy(entries * block_stride), num_tiles, queries)


def _mask(positions: np.ndarray, begins: np.ndarray, tile_tokens: int, group_size: int) -> torch.Tensor:
    """positions: [tiles, queries]; begins: [tiles], the tile's first key position. Returns [tiles, 1, query rows, tile_tokens]:
    each query `group_size` times, rounded up to a multiple of `_ROW_MULTIPLE` with rows that see everything."""
    tiles, queries = positions.shape
    num_rows = queries * group_size
    mask = torch.zeros(tiles, 1, -(-num_rows // _ROW_MULTIPLE) * _ROW_MULTIPLE, tile_tokens)
    keys = torch.from_numpy(begins[:, None] + np.arange(tile_tokens))
    hidden = keys[:, None, :] > torch.from_numpy(np.repeat(positions, group_size, axis=1))[:, :, None]
    mask[:, 0, :num_rows].masked_fill_(hidden, _MASKED)
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
        merged, _ = _flash(q, keys, values, attn_mask=group.mask, scale=scale)
    else:
        tiled, sums = _flash(q.index_select(0, group.tile_rows), keys, values, attn_mask=group.mask, scale=scale)
        merged = _merge_groups(tiled, sums, group.rows_with_tile, group.tile_rows)
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
        merged, _ = _flash(decoding.queries, decoding.keys, decoding.values, attn_mask=group.mask, scale=scale)
    else:
        queries = decoding.queries.index_select(0, group.tile_rows)
        tiled, sums = _flash(queries, decoding.keys, decoding.values, attn_mask=group.mask, scale=scale)
        merged = _merge_groups(tiled, sums, group.rows_with_tile, group.tile_rows)
    out[group.tokens].view(heads.shape).copy_(merged[:, :, : heads.shape[2]])


def _merge_groups(tiled: torch.Tensor, sums: torch.Tensor, rows_with_tile: list[int], tile_rows: torch.Tensor) -> torch.Tensor:
    """tiled: [tiles, kv_heads, query rows, head_dim]; sums: log-sum-exps [tiles, kv_heads, query rows].

    Returns [rows, …]. Products and sums are separate operations, so that no machine fuses them on one path and not on
    another; the weights are rounded from float64, so that vector and scalar code agree.
    """
    top = sums[: rows_with_tile[0]].clone()
    begin = rows_with_tile[0]
    for count in rows_with_tile[1:]:
        torch.maximum(top[:count], sums[begin : begin + count], out=top[:count])
        begin += count
    weights = (sums - top.index_select(0, tile_rows)).double().exp_().float()
    weighted = tiled.mul_(weights[..., None])
    total, merged = weights[: rows_with_tile[0]], weighted[: rows_with_tile[0]]
    begin = rows_with_tile[0]
    for count in rows_with_tile[1:]:
        total[:count] += weights[begin : begin + count]
        merged[:count] += weighted[begin : begin + count]
        begin += count
    return merged.div_(total[..., None])


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
    if padding := -used % _ROW_MULTIPLE:
        q = F.pad(q, (0, 0, 0, padding))
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    for begin, end, mask in ((0, tile.num_open, None), (tile.num_open, tile.num_tiles, tile.mask)):
        if end > begin:
            tiled, sums = _flash(
                q.expand(end - begin, -1, -1, -1), keys[begin:end], values[begin:end], attn_mask=mask, scale=scale
            )
            parts += zip(tiled.unbind(0), sums.unbind(0), strict=True)
    merged = _merge_tiles(parts)[:, :used]
    out[tile.begin : tile.end].view(count, kv_heads, -1, head_dim).copy_(
        merged.view(kv_heads, count, -1, head_dim).transpose(0, 1)
    )


def _merge_tiles(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """As `_merge_groups`, for the tiles of one row: outputs [kv_heads, query rows, head_dim], log-sum-exps [kv_heads, rows]."""
    if len(parts) == 1:
        return parts[0][0]
    sums = torch.stack([one for _, one in parts])
    weights = (sums - sums.amax(0)).double().exp_().float()
    total, merged = weights[0].clone(), parts[0][0] * weights[0, ..., None]
    for (tiled, _), weight in zip(parts[1:], weights[1:], strict=True):
        total += weight
        merged += tiled * weight[..., None]
    return merged.div_(total[..., None])
