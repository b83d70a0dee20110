"""How the attention kernels are cut for a shape: by rules that were measured, and the candidates a measurement goes through."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

Kind = Literal["decode", "prefill"]
PrefillBackend = Literal["hopper", "cudnn", "flash", "kernel"]

SHARED_BYTES = 227 * 1024
SHORT_QUERIES = 16
"""Rows of decode and verification have at most so many queries: one work list. With longer rows there are two."""
_LEAST_BLOCK_M = 16
_FEW_ROWS_PER_SM, _SOME_ROWS_PER_SM = 0.6, 3
"""Rows · KV heads / multiprocessors, up to which rows count as few, and as some; beyond that they are many."""


@dataclass(slots=True, frozen=True)
class AttentionConfig:
    """What one program does.

    block_m: queries × query heads of one matrix product.
    tile: keys of one.
    programs: how many an SM has at once, when keys are split.
    min_split_keys: of a split, at least.
    segment_keys: 0, or splits begin at its multiples, whatever the batch (batch-invariant).
    swap: keys, not queries, are the rows of the products (wgmma for decode; not for 8-bit KV).
    fused: the last program of a split row merges it, instead of a second kernel (not batch-invariant).
    prefetch: how many first tiles a program asks the L2 cache for while the kernel before attention still runs.
    """

    block_m: int
    tile: int
    warps: int
    stages: int
    programs: int
    min_split_keys: int = 128
    segment_keys: int = 0
    swap: bool = False
    fused: bool = False
    prefetch: int = 0


def choose_config(
    head_dim: int, group: int, dtype: torch.dtype, max_queries: int, *, rows_per_sm: float, invariant: bool
) -> AttentionConfig:
    """head_dim, group: of the model; dtype: of the pool; max_queries: the most that a row of the list has. rows_per_sm: rows ·
    KV heads / multiprocessors."""
    kind: Kind = "decode" if max_queries <= SHORT_QUERIES else "prefill"
    if invariant:
        # one for all rows, so that a query meets the same instructions in a prompt, in a step and in a verification
        config = default_config(head_dim, group, dtype, "decode")
        config = replace(config, block_m=max(32, config.block_m), tile=min(64, config.tile))
        return replace(config, warps=8, segment_keys=512, swap=False, fused=False)
    if max_queries == 1:
        return default_config(head_dim, group, dtype, kind, rows_per_sm=rows_per_sm)
    # with several queries the products are larger, and few rows' cut suits them
    config = widened(default_config(head_dim, group, dtype, kind), head_dim, group, dtype, max_queries)
    return _verifying(config, head_dim, dtype, rows_per_sm) if kind == "decode" else config


def default_config(head_dim: int, group: int, dtype: torch.dtype, kind: Kind, *, rows_per_sm: float = 0.0) -> AttentionConfig:
    """As sweeps on an H200 found best, or within some hundredths of it (docs/performance/kernels.md): the more rows there are,
    the smaller the tile of K and V, 16 KB to 4, and the more programs. Splits of few rows may be one tile: each goes through
    seven barriers, and few short rows leave multiprocessors idle that can take one."""
    row_bytes = _power_of_2(head_dim) * dtype.itemsize
    block_m = max(_LEAST_BLOCK_M, _power_of_2(group))
    if dtype == torch.float32:  # no tensor cores
        return AttentionConfig(block_m, 32 if head_dim <= 128 else 16, 8, 2, 2)
    if kind == "prefill":  # parts of prompts beside rows, of a few hundred tokens; longer ones go to other kernels
        if head_dim > 128:
            return AttentionConfig(max(128, block_m), 32, 8, 3, 1, min_split_keys=1024)
        if head_dim > 64:
            return AttentionConfig(max(64, block_m), 64, 4, 3, 2, min_split_keys=1024)
        return AttentionConfig(max(128, block_m), 64, 8, 3, 2, min_split_keys=1024)
    tile = min(128, max(32, 64 * 256 // row_bytes))
    if rows_per_sm <= _FEW_ROWS_PER_SM:
        return AttentionConfig(block_m, tile, 4, 3, 3, 64)
    if rows_per_sm <= _SOME_ROWS_PER_SM:
        return AttentionConfig(block_m, tile, 4, 4, 2, 64)
    if rows_per_sm <= 6:
        return AttentionConfig(block_m, max(32, tile // 2), 2, 4, 4, 64)
    return AttentionConfig(block_m, 32, 1, 2 if row_bytes >= 256 else 3, 8, 64)


def widened(config: AttentionConfig, head_dim: int, group: int, dtype: torch.dtype, max_queries: int) -> AttentionConfig:
    """For verification: all queries of a row in one product of up to 64 rows; shorter tiles, for the registers."""
    block_m = min(32 if dtype == torch.float32 else 64, _power_of_2(group * max_queries))
    if max_queries > SHORT_QUERIES or block_m <= config.block_m:
        return config
    tile = min(config.tile, 64 if head_dim <= 128 else 32)
    return replace(config, block_m=block_m, tile=tile, warps=8 if block_m == 64 else config.warps, swap=False)


def _verifying(config: AttentionConfig, head_dim: int, dtype: torch.dtype, rows_per_sm: float) -> AttentionConfig:
    """Return `config` as verification is fastest, measured on an H200 (docs/decisions/0120-a-warp-merges-a-result-row.md).

    Where there are many queries, an SM gets no more programs than it holds at once, since a row that is cut is merged query by
    query. Many rows of few queries each are faster with more programs, each with fewer stages.
    """
    if rows_per_sm <= _FEW_ROWS_PER_SM and config.block_m == _LEAST_BLOCK_M:
        return config
    if rows_per_sm > _SOME_ROWS_PER_SM and config.block_m == _LEAST_BLOCK_M:
        config = replace(config, stages=2)
    buffers = (2 * config.stages * config.tile + config.block_m) * _power_of_2(head_dim) * dtype.itemsize
    return replace(config, programs=max(1, min(config.programs, SHARED_BYTES // buffers)))


def attention_candidates(head_dim: int, group: int, dtype: torch.dtype, kind: Kind) -> Iterator[AttentionConfig]:
    """What a measurement should try, the default for few rows first; the best belongs in its rules."""
    base = default_config(head_dim, group, dtype, kind)
    yield base
    if kind == "decode":
        for fused, prefetch, keys in itertools.product((False, True), (0, 2), (64, 128, 256)):
            yield replace(base, fused=fused, prefetch=prefetch, min_split_keys=keys)
        for fused in (False, True):  # 64 KB each: two already have enough in flight, and cut fewer rows
            yield replace(base, fused=fused, programs=2)
    row_bytes = _power_of_2(head_dim) * dtype.itemsize
    swaps = (False, True) if kind == "decode" and dtype.itemsize == 2 else (False,)
    for tile, warps, stages, swap in itertools.product((32, 64, 128), (1, 2, 4, 8), (2, 3, 4), swaps):
        shared = 2 * (stages - 1) * tile * row_bytes + base.block_m * row_bytes
        crowded = tile * row_bytes > warps * 8192 if kind == "decode" else warps < base.block_m // 32
        if shared > SHARED_BYTES or crowded or (swap and (tile < 64 or warps < 4)) or (warps == 8 and tile * row_bytes < 16384):
            continue
        resident = max(1, min(8, SHARED_BYTES // (shared + 4096)))
        for programs in (resident, 2 * resident) if kind == "decode" else (1, 2, 4):
            yield replace(base, tile=tile, warps=warps, stages=stages, programs=programs, swap=swap)


def has_parts(head_dim: int, dtype: torch.dtype) -> bool:
    """Does cuDNN take such heads, with queries in `dtype`?"""
    return head_dim % 8 == 0 and head_dim <= 128 and dtype in (torch.bfloat16, torch.float16)


def has_ragged(head_dim: int, dtype: torch.dtype) -> bool:
    """Does FlashAttention-2 take such heads, with queries in `dtype`, of prompts of different lengths in one call?"""
    return head_dim % 8 == 0 and head_dim <= 256 and dtype in (torch.bfloat16, torch.float16)


def planned_length(length: int) -> int:
    """Return what cuDNN gets for a prompt of `length`: one of eight lengths between powers of two.

    The side of a causal square grows by an eighth at most, a twenty-fourth on average, which is a twelfth of its work.
    """
    step = max(1, _power_of_2(length) // 16)
    return -(-length // step) * step


def part_length(length: int, min_piece: int) -> int:
    """Return what cuDNN gets for `length` queries of a part: a square of a long one is padded by less than min_piece."""
    return min(planned_length(length), -(-length // min_piece) * min_piece)


def _power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
