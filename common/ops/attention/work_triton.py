"""The work list of a step's attention, made on the device: lengths change every step, the launches of a CUDA graph don't."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

_ITEMS = 32  # per program
_NUMBERS = [
    "num_rows",
    "max_items",
    "max_merges",
    "wanted",
    "fewest",
    "least",
    "most",
    "fresh",
    "chunk",
    "prefix",
    "query_tile",
    "tile",
]


@triton.jit(do_not_specialize=_NUMBERS)
def work_kernel(
    query_starts,  # int32 [num_rows + 1]
    context_lens,  # int32 [num_rows]
    block_starts,  # int32 [num_rows + 1]
    items,  # int32 [max_items, 8], written up to counts[0]
    merges,  # int32 [max_merges, 4], written up to counts[1]
    counts,  # int32 [2]
    num_rows,
    max_items,
    max_merges,
    wanted,  # items, if the keys were shared out evenly
    fewest,  # tiles of a split
    least,  # rows of fewer queries are not for this list,
    most,  # nor are rows of more,
    fresh,  # nor rows of at least so many queries and no earlier key,
    chunk,  # nor rows of at least so many
    prefix,  # and at least so many earlier keys
    query_tile,  # queries of an item; no constants: one build serves lists of decode and of prefill
    tile,  # keys of a tile
    ROWS: tl.constexpr,
    ITEMS: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    rows = tl.arange(0, ROWS)
    real = rows < num_rows
    queries = tl.load(query_starts + rows + 1, mask=real, other=0) - tl.load(query_starts + rows, mask=real, other=0)
    context = tl.load(context_lens + rows, mask=real, other=0)
    listed = (queries >= least) & (queries <= most) & (context >= queries) & ((context > queries) | (queries < fresh))
    listed &= (queries < chunk) | (context - queries < prefix)
    query_tiles = tl.where(listed, tl.cdiv(queries, query_tile), 0)
    key_tiles = tl.where(listed, tl.cdiv(context, tile), 0)
    if SEGMENT > 0:
        share = SEGMENT
        splits = tl.where(query_tiles == 1, tl.cdiv(key_tiles, SEGMENT), tl.minimum(key_tiles, 1))
    else:
        share = tl.maximum(tl.cdiv(tl.sum(query_tiles * key_tiles, 0), wanted), fewest)
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

    token = tl.load(query_starts + row)
    queries = tl.load(query_starts + row + 1) - token
    context = tl.load(context_lens + row)
    query_tiles = tl.cdiv(queries, query_tile)
    key_tiles = tl.cdiv(context, tile)
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
    first = split * each
    item = items + index * 8
    tl.store(item, token + skipped, mask=mine)
    tl.store(item + 1, queries, mask=mine)
    tl.store(item + 2, start, mask=mine)
    tl.store(item + 3, tl.load(block_starts + row), mask=mine)
    tl.store(item + 4, first, mask=mine)
    tl.store(item + 5, tl.maximum(tl.minimum(first + each, seen) - first, 0), mask=mine)
    parts = tl.cdiv(seen, each)
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


def list_work(
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    block_starts: torch.Tensor,
    items: torch.Tensor,
    merges: torch.Tensor,
    counts: torch.Tensor,
    *,
    query_tile: int,
    tile: int,
    segment: int,
    wanted: int,
    fewest: int,
    least: int,
    most: int,
    fresh: int,
    chunk: int,
    prefix: int,
) -> None:
    """Fills items, merges and counts; see `attention_work.WorkList`. No allocation, no synchronisation."""
    num_rows = len(context_lens)
    work_kernel[(triton.cdiv(len(items), _ITEMS),)](
        query_starts=query_starts,
        context_lens=context_lens,
        block_starts=block_starts,
        items=items,
        merges=merges,
        counts=counts,
        num_rows=num_rows,
        max_items=len(items),
        max_merges=len(merges),
        wanted=wanted,
        fewest=fewest,
        least=least,
        most=most,
        fresh=fresh,
        chunk=chunk,
        prefix=prefix,
        query_tile=query_tile,
        tile=tile,
        ROWS=triton.next_power_of_2(num_rows),
        ITEMS=_ITEMS,
        SEGMENT=segment,
        num_warps=8,
    )
