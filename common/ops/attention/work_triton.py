"""The work list of a step's attention, made on the device: lengths change every step, the launches of a CUDA graph don't."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from common.ops.attention.cut import Cut
from common.ops.sizes import cdiv, next_power_of_2

if TYPE_CHECKING:
    from common.ops.attention.work_list import DeviceBatch, WorkList

_ITEMS = 32  # per program
_NUMBERS = [
    "num_rows",
    "max_items",
    "max_merges",
    "target_items",
    "min_tiles_per_split",
    "min_queries",
    "max_queries",
    "fresh_prefill_min",
    "part_min_queries",
    "part_min_prefix",
    "query_tile",
    "tile",
    "window",
    "chunk",
]


@triton.jit
def first_key(position, window, chunk):
    """As `Reach.first_key`."""
    first = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)
    return tl.where(chunk > 0, tl.maximum(first, position // tl.maximum(chunk, 1) * chunk), first)


@triton.jit
def _base_tile(position, window, chunk, tile, SEGMENT: tl.constexpr):
    """The first key tile of queries from `position` on; splits at segments' multiples begin at one."""
    base = first_key(position, window, chunk) // tile
    if SEGMENT > 0:
        base = base // SEGMENT * SEGMENT
    return base


@triton.jit
def _even_share(query_tiles, key_tiles, share, target_items):
    """The fewest tiles per item, `share` or more, for which all items together are no more than `target_items`: then they run
    at once. `share` if there are more rows than that."""
    if tl.sum(query_tiles, 0) <= target_items:
        low, high = share, tl.maximum(tl.max(key_tiles, 0), share)
        while low < high:
            middle = (low + high) // 2
            if tl.sum(query_tiles * tl.cdiv(key_tiles, middle), 0) <= target_items:
                high = middle
            else:
                low = middle + 1
        share = low
    return share


@triton.jit(do_not_specialize=_NUMBERS)
def work_kernel(
    query_starts,  # int32 [num_rows + 1]
    context_lens,  # int32 [num_rows]
    block_starts,  # int32 [num_rows]
    items,  # int32 [max_items, 8], written up to counts[0]
    merges,  # int32 [max_merges, 4], written up to counts[1]
    counts,  # int32 [2]
    num_rows,
    max_items,
    max_merges,
    target_items,  # see `Cut`, as what follows
    min_tiles_per_split,
    min_queries,
    max_queries,
    fresh_prefill_min,
    part_min_queries,
    part_min_prefix,
    query_tile,  # no constants: one build serves lists of decode and of prefill
    tile,
    window,
    chunk,
    ROWS: tl.constexpr,
    ITEMS: tl.constexpr,
    SEGMENT: tl.constexpr,
    EVEN: tl.constexpr,
):
    rows = tl.arange(0, ROWS)
    real = rows < num_rows
    queries = tl.load(query_starts + rows + 1, mask=real, other=0) - tl.load(query_starts + rows, mask=real, other=0)
    context = tl.load(context_lens + rows, mask=real, other=0)
    prefix = context - queries
    listed = (queries >= min_queries) & (queries <= max_queries) & (prefix >= 0)
    listed &= (prefix > 0) | (queries < fresh_prefill_min)
    listed &= (queries < part_min_queries) | (prefix < part_min_prefix)
    query_tiles = tl.where(listed, tl.cdiv(queries, query_tile), 0)
    # of the query tile that sees the most: only in rows of one is the first key known
    key_tiles = tl.cdiv(context, tile)
    bound = tl.where(window > 0, window, context) + query_tile - 1
    bound = tl.where(chunk > 0, tl.minimum(bound, chunk + query_tile - 1), bound)
    spread = tl.cdiv(bound, tile) + (SEGMENT if SEGMENT > 0 else 1)
    one = key_tiles - _base_tile(prefix, window, chunk, tile, SEGMENT)
    key_tiles = tl.where(query_tiles == 1, one, tl.minimum(key_tiles, spread))
    key_tiles = tl.where(listed, key_tiles, 0)
    if SEGMENT > 0:
        share = SEGMENT
        splits = tl.where(query_tiles == 1, tl.cdiv(key_tiles, SEGMENT), tl.minimum(key_tiles, 1))
    else:
        share = tl.maximum(tl.cdiv(tl.sum(query_tiles * key_tiles, 0), target_items), min_tiles_per_split)
        if EVEN:
            share = _even_share(query_tiles, key_tiles, share, target_items)
        splits = tl.cdiv(key_tiles, share)
        splits = tl.cdiv(key_tiles, tl.maximum(tl.cdiv(key_tiles, tl.maximum(splits, 1)), 1))
    work = query_tiles * splits
    # long items come first, so that none is left alone at the end; those of split rows before all, so that an item's index is
    # also its place among the partials
    divided = splits > 1
    num_split = tl.sum(tl.where(divided, work, 0), 0)
    num_items = tl.sum(work, 0)
    long = (splits == 1) & (2 * key_tiles > share)
    long_work = tl.where(long, work, 0)
    short_work = tl.where(divided | long, 0, work)
    begins = tl.where(long, num_split + tl.cumsum(long_work, 0), num_split + tl.sum(long_work, 0) + tl.cumsum(short_work, 0))
    begins = tl.where(divided, tl.cumsum(tl.where(divided, work, 0), 0), begins) - work
    merge_tiles = tl.where(divided, query_tiles, 0)
    merge_begins = tl.cumsum(merge_tiles, 0) - merge_tiles

    index = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    is_split = index < num_split
    mine = (index < num_items) & (index < max_items)
    found = (begins[None, :] <= index[:, None]) & (index[:, None] < (begins + work)[None, :])
    row = tl.sum(tl.where(found, rows[None, :], 0), 1)
    begin = tl.sum(tl.where(found, begins[None, :], 0), 1)
    merge = tl.sum(tl.where(found, merge_begins[None, :], 0), 1)
    key_tiles = tl.sum(tl.where(found, key_tiles[None, :], 0), 1)

    token = tl.load(query_starts + row)
    queries = tl.load(query_starts + row + 1) - token
    context = tl.load(context_lens + row)
    query_tiles = tl.cdiv(queries, query_tile)
    if SEGMENT > 0:
        each = tl.where(query_tiles == 1, SEGMENT, tl.maximum(key_tiles, 1))
    else:
        each = tl.maximum(tl.cdiv(key_tiles, tl.maximum(tl.cdiv(key_tiles, share), 1)), 1)
    splits = tl.maximum(tl.cdiv(key_tiles, each), 1)
    nth = query_tiles - 1 - (index - begin) // splits  # the last queries see the most keys: first
    split = (index - begin) % splits
    skipped = nth * query_tile
    queries = tl.minimum(queries - skipped, query_tile)
    start = context - tl.load(query_starts + row + 1) + token + skipped
    seen = tl.cdiv(start + queries, tile)
    base = _base_tile(start, window, chunk, tile, SEGMENT)
    first = base + split * each
    item = items + index * 8
    tl.store(item, token + skipped, mask=mine)
    tl.store(item + 1, queries, mask=mine)
    tl.store(item + 2, start, mask=mine)
    tl.store(item + 3, tl.load(block_starts + row), mask=mine)
    tl.store(item + 4, first, mask=mine)
    tl.store(item + 5, tl.maximum(tl.minimum(first + each, seen) - first, 0), mask=mine)
    parts = tl.cdiv(seen - base, each)
    tl.store(item + 6, tl.where(is_split, index - split, -1), mask=mine)
    tl.store(item + 7, split + (parts << 16), mask=mine)
    heads = mine & is_split & (split == 0)
    merge += (index - begin) // splits
    heads &= merge < max_merges
    target = merges + merge * 4
    tl.store(target, token + skipped, mask=heads)
    tl.store(target + 1, queries, mask=heads)
    tl.store(target + 2, index, mask=heads)
    tl.store(target + 3, parts, mask=heads)
    if tl.program_id(0) == 0:
        tl.store(counts, tl.minimum(num_items, max_items))
        tl.store(counts + 1, tl.minimum(tl.sum(merge_tiles, 0), max_merges))


def list_work(batch: DeviceBatch, work: WorkList, cut: Cut) -> None:
    """Fill a list's items, merges and counts. No allocation, no synchronisation."""
    num_rows = batch.num_rows
    work_kernel[(cdiv(len(work.items), _ITEMS),)](
        query_starts=batch.query_starts,
        context_lens=batch.context_lens,
        block_starts=batch.block_starts,
        items=work.items,
        merges=work.merges,
        counts=work.counts,
        num_rows=num_rows,
        max_items=len(work.items),
        max_merges=len(work.merges),
        target_items=cut.target_items,
        min_tiles_per_split=cut.min_tiles_per_split,
        min_queries=cut.min_queries,
        max_queries=cut.max_queries,
        fresh_prefill_min=cut.fresh_prefill_min,
        part_min_queries=cut.part_min_queries,
        part_min_prefix=cut.part_min_prefix,
        query_tile=cut.query_tile,
        tile=cut.tile,
        window=cut.reach.window,
        chunk=cut.reach.chunk,
        ROWS=next_power_of_2(num_rows),
        ITEMS=_ITEMS,
        SEGMENT=cut.segment,
        EVEN=cut.is_even and not cut.segment,
        num_warps=8,
    )
