"""Sums over columns: a tile of an expert's weight rows times the activations of some pairs, in float32.

The weights are the left operand, [BLOCK_N, K], unpacked or widened in registers; activations are read as [BLOCK_M, K].
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from common.ops.linear.dot_triton import widened
from common.ops.linear.grouped_triton import halves_of
from common.ops.linear.settled_triton import settled
from common.ops.linear.unpack_triton import unpacked
from common.ops.moe.unpack_triton import scaled_floats


@triton.jit
def sum_codes(
    x_rows,  # [BLOCK_M, 1] pointers
    shown,  # [BLOCK_M, 1]
    values,  # of the expert
    scale,
    offset,
    n,  # [BLOCK_N]
    first,
    last,
    N,
    K,
    steps,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    RUN: tl.constexpr,
    STEPS_AT_ONCE: tl.constexpr,
    EXPONENTS: tl.constexpr,  # mxfp4, else int4
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    FAST: tl.constexpr,
):
    """Sum 4-bit codes over words of scales first … last - 1, float32 [BLOCK_N, BLOCK_M], a run's product at a time."""
    lane = tl.arange(0, RUN)
    w_rows = values + n[:, None] * RUN + lane[None, :]
    step_bytes = tl.cast(N, tl.int64) * RUN
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for word_at in tl.range(first, last, num_stages=STAGES):
        word = tl.load(scale + tl.cast(word_at, tl.int64) * N + n)
        for part in tl.static_range(STEPS_AT_ONCE):
            step = word_at * STEPS_AT_ONCE + part
            depth = step * (2 * RUN) + lane
            if EVEN_K:
                if BLOCK_M <= 16:
                    a = tl.load(x_rows + depth[None, :], mask=shown, other=0.0)
                    b = tl.load(x_rows + (depth + RUN)[None, :], mask=shown, other=0.0)
                else:
                    a = tl.load(x_rows + depth[None, :])
                    b = tl.load(x_rows + (depth + RUN)[None, :])
            else:
                a = tl.load(x_rows + depth[None, :], mask=shown & (depth < K)[None, :], other=0.0)
                b = tl.load(x_rows + (depth + RUN)[None, :], mask=shown & (depth + RUN < K)[None, :], other=0.0)
            if STEPS_AT_ONCE > 1 and not EVEN_K:
                step = tl.minimum(step, steps - 1)  # past the end activations are zero
            packed = tl.load(w_rows + step * step_bytes)
            low, high = unpacked(packed, None, a.dtype, 1 if EXPONENTS else 0, FAST)
            if EXPONENTS:
                low_scale = (((word >> (16 * part)) & 0xFF) << 23).to(tl.float32, bitcast=True)[:, None]
                high_scale = (((word >> (16 * part + 8)) & 0xFF) << 23).to(tl.float32, bitcast=True)[:, None]
            else:
                left, right = halves_of(word)
                low_scale, high_scale = left[:, None], right[:, None]
            total += tl.dot(low, a.T, input_precision="ieee") * low_scale
            total += tl.dot(high, b.T, input_precision="ieee") * high_scale
            if offset is not None:
                left, right = halves_of(tl.load(offset + tl.cast(word_at, tl.int64) * N + n))
                total += left[:, None] * tl.sum(a.to(tl.float32), axis=1)[None, :]
                total += right[:, None] * tl.sum(b.to(tl.float32), axis=1)[None, :]
    return total


@triton.jit
def sum_words(
    x_rows,  # [BLOCK_M, 1] pointers
    shown,  # [BLOCK_M, 1]
    values,  # of the expert
    scale,
    n,  # [BLOCK_N]
    first,
    last,
    N,
    K,
    steps,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    RUN: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    FAST: tl.constexpr,
):
    """Sum mxfp4 codes over words of scales first … last - 1, float32 [BLOCK_N, BLOCK_M].

    A word is one product of 128 columns, not several of which each waits for the one before."""
    lane = tl.arange(0, RUN)
    w_rows = values + n[:, None] * RUN + lane[None, :]
    step_bytes = tl.cast(N, tl.int64) * RUN
    column = tl.arange(0, 4 * RUN)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for word_at in tl.range(first, last, num_stages=STAGES):
        word = tl.load(scale + tl.cast(word_at, tl.int64) * N + n)
        depth = word_at * (4 * RUN) + column
        if not EVEN_K:
            a = tl.load(x_rows + depth[None, :], mask=shown & (depth < K)[None, :], other=0.0)
        elif BLOCK_M <= 16:
            a = tl.load(x_rows + depth[None, :], mask=shown, other=0.0)
        else:
            a = tl.load(x_rows + depth[None, :])
        second = 2 * word_at + 1
        if not EVEN_K:
            second = tl.minimum(second, steps - 1)  # past the end activations are zero
        left_codes = tl.load(w_rows + 2 * word_at * step_bytes)
        right_codes = tl.load(w_rows + second * step_bytes)
        left = _step_floats(left_codes, word, a.dtype, BLOCK_N, RUN, FAST)
        right = _step_floats(right_codes, word >> 16, a.dtype, BLOCK_N, RUN, FAST)
        w = tl.join(left, right).permute(0, 2, 1).reshape(BLOCK_N, 4 * RUN)
        total = settled(tl.dot(w, a.T, total, input_precision="ieee"), FAST)
    return total


@triton.jit
def _step_floats(codes, exponents, dtype: tl.constexpr, BLOCK_N: tl.constexpr, RUN: tl.constexpr, FAST: tl.constexpr):
    """codes: [BLOCK_N, RUN]. exponents: int32 [BLOCK_N], of both runs, in the low half. Returns [BLOCK_N, 2 * RUN] numbers."""
    low, high = scaled_floats(codes, (exponents & 0xFF)[:, None], ((exponents >> 8) & 0xFF)[:, None], dtype, BLOCK_N, RUN, FAST)
    return tl.join(low, high).permute(0, 2, 1).reshape(BLOCK_N, 2 * RUN)


@triton.jit
def sum_numbers(
    x_rows,  # [BLOCK_M, 1] pointers
    x_scales,  # [BLOCK_M] pointers to the first 128 columns' scale, or None
    shown,  # [BLOCK_M, 1]
    values,  # of the expert
    scale,  # of the expert's blocks, or None
    n,  # [BLOCK_N]
    first,
    last,
    K,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    FAST: tl.constexpr,
):
    """Sum columns of steps first … last - 1, float32 [BLOCK_N, BLOCK_M]."""
    k = tl.arange(0, BLOCK_K)
    w_rows = values + n.to(tl.int64)[:, None] * K
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if scale is not None:
        scale += n // 128 * tl.cdiv(K, 128)
    for step in tl.range(first, last, num_stages=STAGES):
        depth = step * BLOCK_K + k
        if EVEN_K:
            w = tl.load(w_rows + depth[None, :])
            if BLOCK_M <= 16:
                a = tl.load(x_rows + depth[None, :], mask=shown, other=0.0)
            else:
                a = tl.load(x_rows + depth[None, :])
        else:
            w = tl.load(w_rows + depth[None, :], mask=(depth < K)[None, :], other=0.0)
            a = tl.load(x_rows + depth[None, :], mask=shown & (depth < K)[None, :], other=0.0)
        WIDENED: tl.constexpr = w.dtype != a.dtype
        if WIDENED:
            w = widened(w, a.dtype, FAST)
        if scale is not None or x_scales is not None:
            product = tl.dot(w, a.T, input_precision="ieee")
            if scale is not None:
                product *= tl.load(scale + step * BLOCK_K // 128)[:, None]
            if x_scales is not None:
                product *= tl.load(x_scales + step * BLOCK_K // 128)[None, :]
            total += product
        else:
            total = tl.dot(w, a.T, total, input_precision="ieee")
            if WIDENED:
                total = settled(total, FAST)
    return total
