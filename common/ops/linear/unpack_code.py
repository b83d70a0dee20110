"""Instructions that make bf16 of 4-bit codes, for the kernels in Triton and in Gluon: eight codes of a register at a time.

Of each: $4 are four bytes, $0 and $1 the numbers of their low halves, $2 and $3 those of their high halves.
"""

from __future__ import annotations

import triton.language as tl

_BITS = """
    .reg .b32 t, u;
    prmt.b32 t, $4, 0, 0x4140;
    prmt.b32 u, $4, 0, 0x4342;
    lop3.b32 $0, t, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 $1, u, 0x000f000f, 0x43004300, 0xea;
    shr.b32 t, t, 4;
    shr.b32 u, u, 4;
    lop3.b32 $2, t, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 $3, u, 0x000f000f, 0x43004300, 0xea;
"""

SHIFTED_INTEGERS = tl.constexpr("{" + _BITS + "}")
"""A code becomes the last bits of bf16's 128: 128 + code, 136 more than its number."""

INTEGERS = tl.constexpr(
    "{"
    + _BITS
    + """
    .reg .b32 m;
    mov.b32 m, 0x43084308;
    sub.bf16x2 $0, $0, m;
    sub.bf16x2 $1, $1, m;
    sub.bf16x2 $2, $2, m;
    sub.bf16x2 $3, $3, m;
    }"""
)
"""As `SHIFTED_INTEGERS`, of which 136 is subtracted: exact."""

FLOATS = tl.constexpr(
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
    }"""
)
"""E2M1's bits are shifted into bf16's: exponents are 126 too small, which a product puts right, also of subnormals."""

NORMAL_FLOATS = tl.constexpr(
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
    }"""
)
"""NF4's table, rounded to bf16, as bytes in registers: codes are selectors of `prmt`, four at a time, for each half of the
table and each byte of a number; their upper bits choose between the halves."""

SCALED_FLOATS = tl.constexpr(
    """{
    .reg .b32 t, w;
    shl.b32 w, $4, 4;
    prmt.b32 t, w, 0, 0x9180;
    shl.b32 t, t, 2;
    and.b32 t, t, 0x81c081c0;
    mul.bf16x2 $0, t, $5;
    prmt.b32 t, w, 0, 0xb3a2;
    shl.b32 t, t, 2;
    and.b32 t, t, 0x81c081c0;
    mul.bf16x2 $1, t, $6;
    prmt.b32 t, $4, 0, 0x9180;
    shl.b32 t, t, 2;
    and.b32 t, t, 0x81c081c0;
    mul.bf16x2 $2, t, $7;
    prmt.b32 t, $4, 0, 0xb3a2;
    shl.b32 t, t, 2;
    and.b32 t, t, 0x81c081c0;
    mul.bf16x2 $3, t, $8;
    }"""
)
"""As FLOATS, times $5 to $8, which make up for the exponents as well."""
