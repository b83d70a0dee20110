"""Which rows a work list has, and into what they are cut."""

from __future__ import annotations

from dataclasses import dataclass

from common.ops.attention.form import Reach


@dataclass(slots=True, frozen=True)
class Cut:
    """Parameters of `work_triton.list_work`.

    target_items: what all items together should be.
    min_tiles_per_split: key tiles of a part of a split row, at least.
    min_queries, max_queries: of a row in the list.
    fresh_prefill_min: rows of so many queries or more without an earlier key are not in the list.
    part_min_queries, part_min_prefix: nor are rows of so many queries or more after so many keys or more.
    query_tile: queries of an item.
    tile: keys of a tile.
    segment: 0, or the tiles after whose multiples rows are split, whatever the batch.
    is_even: whether items are made longer until they are no more than `target_items`.
    reach: which keys a query sees.
    """

    target_items: int
    min_tiles_per_split: int
    min_queries: int
    max_queries: int
    fresh_prefill_min: int
    part_min_queries: int
    part_min_prefix: int
    query_tile: int
    tile: int
    segment: int
    is_even: bool
    reach: Reach
