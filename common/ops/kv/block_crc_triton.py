"""The CRC-32 of blocks, a program for each block at a time.

A CRC is the remainder of the message, as a polynomial over GF(2), by the CRC's own. So it can be summed from parts, each times
the power of x that stands for its distance from the end. Here word j of each row of `LANES` words is lane j's:

    lane    = (word 0 * x^(32 LANES) + word LANES) * x^(32 LANES) + word 2 LANES ...
    CRC     = sum over lanes of lane_j * x^(32 (LANES - j)),   and the initial and final inversion

The product with a constant is 32 shifts, ands and xors. Leading zeros don't change a remainder, so the first row of a block
that is not whole rows begins with them. Bits are reflected, as zlib has them: bit 31 is x^0, bit 0 is x^31.

Not a part of the decode path, which is a chain of dependent launches: it is launched plainly, after all that came before it in
its stream.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false
from __future__ import annotations

import functools
from contextlib import nullcontext

import torch
import triton
import triton.language as tl

from common.ops.sizes import next_power_of_2

POLYNOMIAL = tl.constexpr(0xEDB88320)  # CRC-32 of zlib, reflected, without x^32
ONE = 0x80000000
LANES, NUM_WARPS = 4096, 8
"""Words of 4 bytes that a program takes at a time, and its warps."""
CANDIDATES = ((2048, 4), (2048, 8), (4096, 8), (8192, 8), (4096, 16))


@triton.jit
def _add_term(product, a, b):
    """Add b to the product if a has x^0; return it, a / x without that, and b * x modulo the polynomial."""
    product = product ^ (b & (tl.zeros_like(a) - (a >> 31)))
    return product, a << 1, (b >> 1) ^ (POLYNOMIAL & (tl.zeros_like(b) - (b & 1)))


@triton.jit
def _times(a, b, UNROLLED: tl.constexpr):
    """Return a * b modulo the polynomial. a: a tensor. b: a number, of which all multiples are kept where this is UNROLLED in
    a loop, or a tensor, for whose multiples there are no registers."""
    product = tl.zeros_like(a)
    if UNROLLED:
        for _ in tl.static_range(32):
            product, a, b = _add_term(product, a, b)
    else:
        for _ in range(32):
            product, a, b = _add_term(product, a, b)
    return product


@triton.jit(do_not_specialize=["num_blocks", "step"])
def block_crc_kernel(
    pool,  # int32 [blocks, WORDS]
    block_ids,  # [num_blocks]
    out,  # int32 [num_blocks]
    weights,  # int32 [LANES], x^(32 (LANES - lane))
    num_blocks,
    step,  # int32, x^(32 LANES)
    WORDS: tl.constexpr,
    LANES: tl.constexpr,
):
    ROWS: tl.constexpr = (WORDS + LANES - 1) // LANES
    lanes = tl.arange(0, LANES)
    first = lanes - (ROWS * LANES - WORDS)  # negative: zeros before the block
    weight = tl.load(weights + lanes).to(tl.uint32, bitcast=True)
    step = step.to(tl.uint32, bitcast=True)
    index = tl.program_id(0)
    while index < num_blocks:
        words = pool + tl.load(block_ids + index).to(tl.int64) * WORDS
        state = tl.load(words + first, mask=first >= 0, other=0).to(tl.uint32, bitcast=True)
        state = tl.where(first == 0, state ^ 0xFFFFFFFF, state)
        for row in range(1, ROWS):
            word = tl.load(words + row * LANES + first).to(tl.uint32, bitcast=True)
            state = _times(state, step, True) ^ word
        crc = tl.xor_sum(_times(state, weight, False), axis=0) ^ 0xFFFFFFFF
        tl.store(out + index, crc.to(tl.int32, bitcast=True))
        index += tl.num_programs(0)


def block_crc_triton(
    pool: torch.Tensor,
    block_ids: torch.Tensor,
    out: torch.Tensor,
    max_programs: int | None,
    *,
    lanes: int = LANES,
    num_warps: int = NUM_WARPS,
) -> None:
    """As `block_crc`, shapes checked by it."""
    words, count = pool.shape[1] // 4, len(block_ids)
    lanes = min(lanes, next_power_of_2(words))
    with torch.cuda.device(pool.device) if pool.is_cuda else nullcontext():
        weights, step = _weights(lanes, pool.device)
        block_crc_kernel[(min(count, max_programs or count),)](
            pool=pool.view(torch.int32),
            block_ids=block_ids,
            out=out,
            weights=weights,
            num_blocks=count,
            step=step,
            WORDS=words,
            LANES=lanes,
            num_warps=num_warps,
        )


@functools.cache
def _weights(lanes: int, device: torch.device) -> tuple[torch.Tensor, int]:
    """Return x^(32 (lanes - lane)) of each lane, int32 [lanes], on the device, and x^(32 lanes)."""
    powers = [_times_x32(ONE)]
    while len(powers) < lanes:
        powers.append(_times_x32(powers[-1]))
    signed = torch.tensor(powers[::-1], dtype=torch.int64).to(torch.int32)
    return signed.to(device), int(signed[0])


def _times_x32(value: int) -> int:
    """Return the value times x^32 modulo the polynomial."""
    for _ in range(32):
        value = (value >> 1) ^ (POLYNOMIAL.value if value & 1 else 0)
    return value
