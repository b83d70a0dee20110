"""Sort pairs of token and expert by expert, and cut each expert's into tiles, in one launch without atomics."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from common.ops import backend
from common.ops.sizes import next_power_of_2

TILE_FIELDS = tl.constexpr(4)
_MAX_BLOCK = 8192


class SortedPairs(NamedTuple):
    """order: int32 [pairs], those of expert 0, of expert 1, …, each expert's in their own order.
    tiles: int32 [slots, 4]: expert, first place in `order`, number of pairs, place behind them. A slot may have no pairs.
    places: int32 [pairs], where in `order` a pair is; None if not asked for."""

    order: torch.Tensor
    tiles: torch.Tensor
    places: torch.Tensor | None


@triton.jit(do_not_specialize=["pairs"])
def sort_kernel(
    ids,  # int32 [pairs]
    order,  # int32 [pairs], written
    tiles,  # int32 [pairs // BLOCK_M + EXPERTS, 4], written
    places,  # int32 [pairs], written, or None
    pairs,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    expert = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    lower = tl.zeros((BLOCK,), tl.int32)
    equal = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, pairs, BLOCK):
        found = tl.load(ids + begin + columns, mask=begin + columns < pairs, other=EXPERTS)
        lower += (found < expert).to(tl.int32)
        equal += (found == expert).to(tl.int32)
    before = tl.sum(lower, 0)
    end = before + tl.sum(equal, 0)
    # an expert's slots begin at before // BLOCK_M + expert: those of lower experts are never more
    slot = before // BLOCK_M + expert
    for place in range(slot, end // BLOCK_M + expert + 1):
        first = before + (place - slot) * BLOCK_M
        entry = tiles + place * TILE_FIELDS
        tl.store(entry, expert)
        tl.store(entry + 1, first)
        count = tl.maximum(0, tl.minimum(BLOCK_M, end - first))
        tl.store(entry + 2, count)
        tl.store(entry + 3, first + count)
    for begin in range(0, pairs, BLOCK):
        found = tl.load(ids + begin + columns, mask=begin + columns < pairs, other=EXPERTS)
        mine = (found == expert).to(tl.int32)
        sorted_place = before + tl.cumsum(mine, 0) - 1
        tl.store(order + sorted_place, begin + columns, mask=mine != 0)
        if places is not None:
            tl.store(places + begin + columns, sorted_place, mask=mine != 0)
        before += tl.sum(mine, 0)


def sorted_pairs(ids: torch.Tensor, experts: int, block_m: int, *, with_places: bool = False) -> SortedPairs:
    """ids: int32 [rows, top_k], contiguous. block_m: pairs of a tile."""
    pairs = ids.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    tiles = torch.empty(pairs // block_m + experts, TILE_FIELDS.value, dtype=torch.int32, device=ids.device)
    places = torch.empty_like(order) if with_places else None
    pdl = backend.pdl(ids)
    sort_kernel[(experts,)](
        ids=ids,
        order=order,
        tiles=tiles,
        places=places,
        pairs=pairs,
        EXPERTS=experts,
        BLOCK=min(_MAX_BLOCK, max(128, next_power_of_2(pairs))),
        BLOCK_M=block_m,
        PDL=pdl,
        num_warps=16 if pairs > 4096 else 8 if pairs > 1024 else 4,
        launch_pdl=pdl,
    )
    return SortedPairs(order, tiles, places)
