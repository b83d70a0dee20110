"""E2M1 codes times the power of two of their block, in one multiplication of two numbers at once."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from common.ops.linear.unpack_code import SCALED_FLOATS
from common.ops.linear.unpack_triton import unpacked


@triton.jit
def scaled_floats(
    packed,  # uint8 [BLOCK_N, RUN]
    low_exponent,  # int32 [BLOCK_N, 1], E8M0 of at most 127: `packed_weight` leaves the rest to a factor of the row
    high_exponent,
    dtype: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RUN: tl.constexpr,
    FAST: tl.constexpr,
):
    """Return the numbers of the low halves and those of the high ones, [BLOCK_N, RUN] in `dtype`, exactly.

    FAST, for bf16: a code's bits are shifted into bf16's, where its exponent is 126 too small, which the scale makes up for."""
    if FAST and dtype == tl.bfloat16:
        low_scale = ((low_exponent + 126) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
        high_scale = ((high_exponent + 126) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
        low, high = _products(packed, tl.broadcast_to(low_scale, [BLOCK_N, RUN]), tl.broadcast_to(high_scale, [BLOCK_N, RUN]))
    else:
        low, high = unpacked(packed, None, tl.float32, 1, False)
        low = (low * (low_exponent << 23).to(tl.float32, bitcast=True)).to(dtype)
        high = (high * (high_exponent << 23).to(tl.float32, bitcast=True)).to(dtype)
    return low, high


@triton.jit
def _products(packed, low_scale, high_scale):
    return tl.inline_asm_elementwise(
        SCALED_FLOATS,
        "=&r,=&r,=&r,=&r,r,r,r,r,r",
        [packed, low_scale, high_scale],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )
