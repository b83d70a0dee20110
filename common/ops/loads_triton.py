"""What keeps loads together: to save registers, the assembler spreads them among their uses, and waits for memory each time."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import triton
import triton.language as tl

AT_ONCE = tl.constexpr(4)
"""Partial sums read before the first of them is used: 8 numbers a thread each leave 1024 threads registers enough."""

_ZERO = tl.constexpr(
    """{
    .reg .pred none;
    .reg .b32 threads;
    mov.u32 threads, %ntid.x;
    setp.eq.u32 none, threads, 0;
    barrier.cta.red.popc.u32 $0, 0, none;
    }"""
)


@triton.jit
def loads_begun(ASSEMBLY: tl.constexpr):
    """0, once all loads above are on their way: none moves past a barrier, and what needs the barrier's result, see `held`,
    does not move up. It costs little, since nobody waits there for what was loaded."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(_ZERO, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    return 0


@triton.jit
def held(x, zero, ASSEMBLY: tl.constexpr):
    """x, float32, bit for bit, but not before `zero` is there."""
    if ASSEMBLY:
        return (x.to(tl.int32, bitcast=True) | zero).to(tl.float32, bitcast=True)
    return x
