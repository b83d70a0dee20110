"""Mixing the channels of a head by sums and differences in registers, a factor of the matrix at a time.

Each of log2(head_dim) steps adds and subtracts channels half a head, 1, 2, 4, … apart. Threads hold neighbours, so only some
of the steps need words of other threads: Triton moves them by shuffles and through 1 KB of shared memory a warp. A product on
tensor cores would round its input, read a matrix, and for the few heads of a program be mostly padding.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def hadamard_mixed(first, second, HEADS: tl.constexpr, HALF_BLOCK: tl.constexpr, HALF: tl.constexpr):
    """Both halves, float32 [HEADS, HALF_BLOCK], zeros from HALF on, times `hadamard_reference.hadamard(2 * HALF)`."""
    RUN: tl.constexpr = HALF & -HALF
    first, second = first + second, first - second
    for bit in tl.static_range(RUN.bit_length() - 1):
        first = _mixed_with(first, 1 << bit, HEADS, HALF_BLOCK)
        second = _mixed_with(second, 1 << bit, HEADS, HALF_BLOCK)
    SCALE: tl.constexpr = (2 * RUN) ** -0.5
    return first * SCALE, second * SCALE


@triton.jit
def _mixed_with(x, DISTANCE: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr):
    """Sums where DISTANCE's bit of a channel's number is 0, differences where it is 1."""
    pairs = x.reshape(HEADS, SIZE // (2 * DISTANCE), 2, DISTANCE).permute(0, 1, 3, 2)
    lower, upper = tl.split(pairs)
    return tl.join(lower + upper, lower - upper).permute(0, 1, 3, 2).reshape(HEADS, SIZE)
