"""4-bit codes to numbers in registers: two codes a byte, four bytes of a register at a time.

Arithmetic units of the integer kind are what limits a product with 4-bit weights: at 4 TB/s a multiprocessor of an H200 gets 35
codes a cycle, and has 64 such units. So two codes are made bf16 at once.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

import triton
import triton.language as tl


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
        """{
        .reg .b32 t, u, m;
        mov.b32 m, 0x43084308;
        prmt.b32 t, $4, 0, 0x4140;
        prmt.b32 u, $4, 0, 0x4342;
        lop3.b32 $0, t, 0x000f000f, 0x43004300, 0xea;
        lop3.b32 $1, u, 0x000f000f, 0x43004300, 0xea;
        shr.b32 t, t, 4;
        shr.b32 u, u, 4;
        lop3.b32 $2, t, 0x000f000f, 0x43004300, 0xea;
        lop3.b32 $3, u, 0x000f000f, 0x43004300, 0xea;
        sub.bf16x2 $0, $0, m;
        sub.bf16x2 $1, $1, m;
        sub.bf16x2 $2, $2, m;
        sub.bf16x2 $3, $3, m;
        }""",
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
        """{
        .reg .b32 t, w, m;
        mov.b32 m, 0x7e807e80;
        shl.b32 w, $4, 4;
        prmt.b32 t, w, 0, 0x9180;
        shl.b32 t, t, 2;
        and.b32 t, t, 0x81c081c0;
        mul.bf16x2 $0, t, m;
        prmt.b32 t, w, 0, 0xb3a2;
        shl.b32 t, t, 2;
        and.b32 t, t, 0x81c081c0;
        mul.bf16x2 $1, t, m;
        prmt.b32 t, $4, 0, 0x9180;
        shl.b32 t, t, 2;
        and.b32 t, t, 0x81c081c0;
        mul.bf16x2 $2, t, m;
        prmt.b32 t, $4, 0, 0xb3a2;
        shl.b32 t, t, 2;
        and.b32 t, t, 0x81c081c0;
        mul.bf16x2 $3, t, m;
        }""",
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
        """{
        .reg .b32 s, q, a, b, h, l;
        and.b32 s, $4, 0x77777777;
        and.b32 q, $4, 0x88888888;
        shr.b32 q, q, 1;
        or.b32 q, q, 0x32103210;
        prmt.b32 a, 0xbebfbfbf, 0x00bdbebe, s;
        prmt.b32 b, 0x3e3e3e3d, 0x3f3f3f3e, s;
        prmt.b32 h, a, b, q;
        prmt.b32 a, 0xca063280, 0x00ba3d92, s;
        prmt.b32 b, 0xad7c25a3, 0x803910e2, s;
        prmt.b32 l, a, b, q;
        prmt.b32 $0, l, h, 0x6240;
        prmt.b32 $2, l, h, 0x7351;
        shr.b32 s, s, 16;
        shr.b32 q, q, 16;
        prmt.b32 a, 0xbebfbfbf, 0x00bdbebe, s;
        prmt.b32 b, 0x3e3e3e3d, 0x3f3f3f3e, s;
        prmt.b32 h, a, b, q;
        prmt.b32 a, 0xca063280, 0x00ba3d92, s;
        prmt.b32 b, 0xad7c25a3, 0x803910e2, s;
        prmt.b32 l, a, b, q;
        prmt.b32 $1, l, h, 0x6240;
        prmt.b32 $3, l, h, 0x7351;
        }""",
        "=&r,=&r,=&r,=&r,r",
        [packed],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )
