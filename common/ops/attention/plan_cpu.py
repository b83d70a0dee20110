"""The plan of a step's attention on a CPU: which tiles of keys each query attends to, and through which masks.

A plan is made once per step and used by every layer. See `paged_cpu` for how it is carried out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from common.ops.attention.form import UNLIMITED, AttentionForm, Reach
from common.ops.attention.rows_cpu import row_multiple
from common.ops.attention.scratch_cpu import Gathered, Scratch

TILE_TOKENS = 128
_MASKED = -1e30  # finite: a tile that a query sees nothing of then has weight exp(-1e30 - m) = 0 instead of NaN
_BATCHED_QUERIES = (1, 2, 4, 8, 16, 32)  # rows with this many tokens, rounded up, share a call
_QUERY_TILE = 256


class AttentionRow(NamedTuple):
    """One sequence: queries are tokens [first, first + length) of the step, at positions start, start + 1, …

    `blocks` hold positions [0, start + length), and may hold more. Blocks that no query sees may be anything.
    """

    first: int
    length: int
    start: int
    blocks: Sequence[int] | NDArray[np.int32]


@dataclass(slots=True)
class Group:
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
    decoding: Decoding | None = None


@dataclass(slots=True)
class Decoding:
    """What all layers share of a group of one-token rows side by side: a call costs more than the numbers in it.

    pool: one block of one layer's K or V per row. entries: `Group.entries` of K and V in each layer, [2 · layer + (0: K,
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
class QueryTile:
    """Queries [begin, end) (token indices) of a row.

    num_rows: query rows of a KV head, padding included.
    spans: tiles [first, last) of those gathered, and through which mask they are seen (None: whole), in order.
    """

    begin: int
    end: int
    num_rows: int
    spans: list[tuple[int, int, torch.Tensor | None]]


@dataclass(slots=True)
class LongRow:
    """A row of many queries: its keys are gathered once, its queries go by tiles."""

    entries: torch.Tensor
    num_tiles: int
    queries: list[QueryTile]


class _Sizes(NamedTuple):
    """Sizes of a pool and of what reads it.

    block_stride: rows of one layer's K or V from one block to the next. tile_tokens: keys of a tile. group_size: query heads of
    a KV head. row_multiple: query rows are padded to a multiple of it. reach: of the layers."""

    block_tokens: int
    block_stride: int
    tile_tokens: int
    group_size: int
    row_multiple: int
    reach: Reach

    def first_keys(self, positions: np.ndarray) -> np.ndarray:
        """As `Reach.first_key`, of many positions."""
        window, chunk = self.reach
        first = np.maximum(positions - window + 1, 0) if window else np.zeros_like(positions)
        return np.maximum(first, positions // chunk * chunk) if chunk else first

    def rows(self, queries: int) -> int:
        """Query rows of a KV head, padding included."""
        return -(-queries * self.group_size // self.row_multiple) * self.row_multiple


@dataclass(slots=True)
class PlannedRows:
    """What the layers of one reach do in a step."""

    groups: list[Group] = field(default_factory=list)
    long_rows: list[LongRow] = field(default_factory=list)


@dataclass(slots=True)
class AttentionPlan:
    """`plan_attention` makes it. Valid for one step and one pool."""

    pool: torch.Tensor
    num_heads: int
    rows: Sequence[AttentionRow]
    num_tokens: int
    tile_tokens: int
    scratch: Scratch
    by_reach: dict[tuple[Reach, bool], PlannedRows] = field(default_factory=dict)

    def planned(self, form: AttentionForm) -> PlannedRows:
        """Return what layers of this form do; it is planned when the first of them asks.

        :raises NotInvariant: see `row_multiple`.
        """
        key = form.reach, form.soft_cap > 0
        found = self.by_reach.get(key)
        if found is None:
            found = self.by_reach[key] = _plan_rows(self, *key)
        return found


def check_attention(head_dim: int, block_tokens: int, threads: int, *, is_capped: bool = False) -> None:
    """:raises NotInvariant: if plans for such heads and blocks can't be computed independently of the batch on this CPU."""
    row_multiple(head_dim, _tile_tokens(block_tokens), threads, is_capped=is_capped)


def _tile_tokens(block_tokens: int) -> int:
    return -(-TILE_TOKENS // block_tokens) * block_tokens


def plan_attention(
    pool: torch.Tensor,
    num_heads: int,
    rows: Sequence[AttentionRow],
    num_tokens: int,
    scratch: Scratch | None = None,
    *,
    reach: Reach = UNLIMITED,
) -> AttentionPlan:
    """pool: see `paged_kv`; num_tokens: of the step, padding included; reach: the furthest of the layers that use the plan:
    blocks before what it sees may be anything.

    :raises ValueError: if a row has no tokens, too few blocks or unknown ones, or reaches past `num_tokens`, or heads don't
        divide.
    :raises NotInvariant: see `row_multiple`.
    """
    num_blocks, _, _, block_tokens, kv_heads, head_dim = pool.shape
    if num_heads % kv_heads:
        raise ValueError(f"{num_heads} query heads can't share {kv_heads} KV heads")
    for row in rows:
        last = -(-(row.start + row.length) // block_tokens)
        used = row.blocks[reach.first_key(max(0, row.start)) // block_tokens : last]
        if row.length < 1 or row.start < 0 or len(row.blocks) < last:
            raise ValueError(f"{len(row.blocks)} blocks don't hold {row.length} tokens from {row.start}")
        if min(used) < 0 or max(used) >= num_blocks or row.first < 0 or row.first + row.length > num_tokens:
            raise ValueError(f"a row names blocks or tokens that don't exist: {row}")
    check_attention(head_dim, block_tokens, torch.get_num_threads())
    return AttentionPlan(pool, num_heads, rows, num_tokens, _tile_tokens(block_tokens), scratch or Scratch())


def _plan_rows(plan: AttentionPlan, reach: Reach, is_capped: bool) -> PlannedRows:
    _, layers, _, block_tokens, kv_heads, head_dim = plan.pool.shape
    multiple = row_multiple(head_dim, plan.tile_tokens, torch.get_num_threads(), is_capped=is_capped)
    sizes = _Sizes(block_tokens, 2 * layers, plan.tile_tokens, plan.num_heads // kv_heads, multiple, reach)
    planned = PlannedRows()
    batches: dict[int, list[AttentionRow]] = {}
    for row in plan.rows:
        queries = next((size for size in _BATCHED_QUERIES if row.length <= size), 0)
        if queries:
            batches.setdefault(queries, []).append(row)
        else:
            planned.long_rows.append(_plan_long(row, sizes))
    for queries, batch in batches.items():
        group = _plan_group(batch, queries, sizes)
        if queries == 1 and isinstance(group.tokens, slice):
            group.decoding = _plan_decoding(group, plan, sizes.group_size)
        planned.groups.append(group)
    return planned


class _Tiles(NamedTuple):
    """The tiles [first, last) of a row that a query of it sees, and their blocks."""

    first: int
    last: int
    blocks: np.ndarray


def _tiles(row: AttentionRow, sizes: _Sizes) -> _Tiles:
    """Return a row's tiles; blocks of them that no query sees are replaced by one that is in use: its numbers are finite."""
    end = row.start + row.length
    seen = sizes.reach.first_key(row.start)
    per_tile = sizes.tile_tokens // sizes.block_tokens
    first, last = seen // sizes.tile_tokens, -(-end // sizes.tile_tokens)
    begin, used = seen // sizes.block_tokens, -(-end // sizes.block_tokens)
    blocks = np.full((last - first) * per_tile, row.blocks[begin], np.int64)
    blocks[begin - first * per_tile : used - first * per_tile] = row.blocks[begin:used]
    return _Tiles(first, last, blocks)


def _plan_group(rows: list[AttentionRow], queries: int, sizes: _Sizes) -> Group:
    tile_tokens = sizes.tile_tokens
    tiled = [(row, _tiles(row, sizes)) for row in rows]
    tiled.sort(key=lambda pair: pair[1].first - pair[1].last)
    rows = [row for row, _ in tiled]
    firsts = np.array([tiles.first for _, tiles in tiled])
    num_tiles = np.array([tiles.last - tiles.first for _, tiles in tiled])
    per_tile = tile_tokens // sizes.block_tokens
    table = np.zeros((len(rows), int(num_tiles[0]) * per_tile), np.int64)
    for i, (_, tiles) in enumerate(tiled):
        table[i, : len(tiles.blocks)] = tiles.blocks
    rows_with_tile = [int((num_tiles > tile).sum()) for tile in range(int(num_tiles[0]))]
    entries = np.concatenate(
        [table[:count, tile * per_tile : (tile + 1) * per_tile].ravel() for tile, count in enumerate(rows_with_tile)]
    )
    tile_rows = np.concatenate([np.arange(count) for count in rows_with_tile])
    tile_begins = (np.repeat(np.arange(len(rows_with_tile)), rows_with_tile) + firsts[tile_rows]) * tile_tokens

    counts = np.array([row.length for row in rows])
    within = np.minimum(np.arange(queries), counts[:, None] - 1)  # short rows repeat their last query
    positions = within + np.array([row.start for row in rows])[:, None]
    tokens = (within + np.array([row.first for row in rows])[:, None]).ravel()
    contiguous = queries == 1 and bool((tokens == tokens[0] + np.arange(len(tokens))).all())
    kept = np.flatnonzero((np.arange(queries) < counts[:, None]).ravel())
    return Group(
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


def _plan_decoding(group: Group, plan: AttentionPlan, group_size: int) -> Decoding:
    pool = plan.pool
    _, layers, _, block_tokens, kv_heads, head_dim = pool.shape
    flat = pool.view(-1, block_tokens * kv_heads * head_dim)
    gathered = [Gathered.take(plan.scratch, name, len(group.entries), flat) for name in ("keys", "values")]
    keys, values = (each.wide.view(-1, plan.tile_tokens, kv_heads, head_dim).transpose(1, 2) for each in gathered)
    queries = torch.zeros(group.num_rows, kv_heads, group.mask.shape[2], head_dim)
    return Decoding(
        pool=flat,
        entries=(group.entries + torch.arange(2 * layers)[:, None]).unbind(0),
        gathered=(gathered[0], gathered[1]),
        keys=keys,
        values=values,
        queries=queries,
        heads=queries[:, :, :group_size],
    )


def _plan_long(row: AttentionRow, sizes: _Sizes) -> LongRow:
    tile_tokens = sizes.tile_tokens
    tiles = _tiles(row, sizes)
    queries: list[QueryTile] = []
    for begin in range(0, row.length, _QUERY_TILE):
        positions = row.start + np.arange(begin, min(begin + _QUERY_TILE, row.length))
        seen = sizes.first_keys(positions)
        first, last = int(seen[0]) // tile_tokens, int(positions[-1]) // tile_tokens + 1
        open_first = min(-(-int(seen[-1]) // tile_tokens), last)  # every query sees tiles [open_first, open_last) whole
        open_last = max((int(positions[0]) + 1) // tile_tokens, open_first)
        spans: list[tuple[int, int, torch.Tensor | None]] = []
        for one, other, is_open in ((first, open_first, False), (open_first, open_last, True), (open_last, last, False)):
            if other > one:
                begins = np.arange(one, other) * tile_tokens
                mask = None if is_open else _mask(np.broadcast_to(positions, (len(begins), len(positions))), begins, sizes)
                spans.append((one - tiles.first, other - tiles.first, mask))
        first_query = row.first + begin
        queries.append(QueryTile(first_query, first_query + len(positions), sizes.rows(len(positions)), spans))
    return LongRow(torch.from_numpy(tiles.blocks * sizes.block_stride), tiles.last - tiles.first, queries)


def _mask(positions: np.ndarray, begins: np.ndarray, sizes: _Sizes) -> torch.Tensor:
    """positions: [tiles, queries]; begins: [tiles], the tile's first key position. Returns [tiles, 1, query rows, tile_tokens]:
    each query once per head of its group, then rows of padding that see everything."""
    tiles, queries = positions.shape
    mask = torch.zeros(tiles, 1, sizes.rows(queries), sizes.tile_tokens)
    keys = torch.from_numpy(begins[:, None] + np.arange(sizes.tile_tokens))[:, None, :]
    hidden = keys > torch.from_numpy(np.repeat(positions, sizes.group_size, axis=1))[:, :, None]
    if any(sizes.reach):
        hidden |= keys < torch.from_numpy(np.repeat(sizes.first_keys(positions), sizes.group_size, axis=1))[:, :, None]
    mask[:, 0, : queries * sizes.group_size].masked_fill_(hidden, _MASKED)
    return mask
