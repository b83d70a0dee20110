"""4-bit codes to numbers in registers: two codes a byte, four bytes of a register at a time.

Arithmetic units of the integer kind are what limits a product with 4-bit weights: at 4 TB/s a multiprocessor of an H200 gets 35
codes a cycle, and has 64 such units. So two codes are made bf16 at once.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from common.ops.linear.unpack_code import FLOATS, INTEGERS, NORMAL_FLOATS


@triton.jit
def unpacked(packed, table, dtype: tl.constexpr, CODE: tl.constexpr, FAST: tl.constexpr):
    """packed: uint8. Returns the numbers of the low halves and those of the high ones, in `dtype`.

    CODE 0: code - 8, 1: E2M1, 2: `table`, float32 [16]. FAST: by instructions of Hopper and later, where `dtype` is bf16."""
    if FAST and dtype == tl.bfloat16:
        if CODE == 0:
            low, high = _integers(packed)
        elif CODE == 1:
            low, high = _floats(packed)
        else:
            low, high = _normal_floats(packed)
    else:
        low = _number(packed & 15, table, CODE).to(dtype)
        high = _number(packed >> 4, table, CODE).to(dtype)
    return low, high


@triton.jit
def times(numbers, scales, dtype: tl.constexpr, FAST: tl.constexpr):
    """numbers · scales, both in `dtype` and of the same shape; two at once where FAST and bf16."""
    if FAST and dtype == tl.bfloat16:
        product = tl.inline_asm_elementwise(
            "mul.bf16x2 $0, $1, $2;", "=r,r,r", [numbers, scales], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        product = (numbers.to(tl.float32) * scales.to(tl.float32)).to(dtype)
    return product


@triton.jit
def times_plus(numbers, scales, offsets, dtype: tl.constexpr, FAST: tl.constexpr):
    """numbers · scales + offsets, rounded once; all of `dtype` and one shape. Two at once where FAST and bf16."""
    if FAST and dtype == tl.bfloat16:
        total = tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;",
            "=r,r,r,r",
            [numbers, scales, offsets],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    else:
        total = (numbers.to(tl.float32) * scales.to(tl.float32) + offsets.to(tl.float32)).to(dtype)
    return total


@triton.jit
def _number(code, table, CODE: tl.constexpr):
    """float32."""
    if CODE == 0:
        value = code.to(tl.float32) - 8.0
    elif CODE == 1:
        exponent = ((code >> 1) & 3).to(tl.float32)
        mantissa = (code & 1).to(tl.float32)
        value = tl.where(exponent == 0.0, 0.5 * mantissa, (1.0 + 0.5 * mantissa) * tl.exp2(exponent - 1.0))
        value = tl.where(code >= 8, -value, value)
    else:
        value = tl.load(table + code.to(tl.int32))
    return value


@triton.jit
def _integers(packed):
    """A code becomes the last bits of bf16's 128, of which 136 is subtracted: exact."""
    return tl.inline_asm_elementwise(
        INTEGERS,
        "=&r,=&r,=&r,=&r,r",
        [packed],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def _floats(packed):
    """E2M1's bits are shifted into bf16's: exponents are 126 too small, which a product puts right, also of subnormals."""
    return tl.inline_asm_elementwise(
        FLOATS,
        "=&r,=&r,=&r,=&r,r",
        [packed],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def _normal_floats(packed):
    """NF4's table, rounded to bf16, as bytes in registers: codes are selectors of `prmt`, four at a time, for each half of the
    table and each byte of a number; their upper bits choose between the halves."""
    return tl.inline_asm_elementwise(
        NORMAL_FLOATS,
        "=&r,=&r,=&r,=&r,r",
        [packed],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )
