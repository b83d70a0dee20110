"""What both ways to multiply in the kernel for few rows of 4-bit weights share: a step's codes and scales, and their use.

A step is two runs of RUN inputs: of a byte of codes, the low half belongs to the first run, the high half to the second.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

READ = gl.constexpr("ld.global.v4.u32 {$0, $1, $2, $3}, [$4];")
READ_ONCE = gl.constexpr(
    """{
    .reg .pred reads;
    setp.ne.s32 reads, $5, 0;
    @reads ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {$0, $1, $2, $3}, [$4];
    }"""
)


@gluon.jit
def four(text: gl.constexpr, address, reads):
    """Return 16 bytes at each address as four int32; any where `reads` is 0, if it is asked."""
    if reads is None:
        words = gl.inline_asm_elementwise(
            text, "=&r,=&r,=&r,=&r,l", [address], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1
        )
    else:
        words = gl.inline_asm_elementwise(
            text, "=&r,=&r,=&r,=&r,l,r", [address, reads], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1
        )
    return words


@gluon.jit
def read_step(codes, scales, offsets, row, apart, step, last, N, RUN: gl.constexpr):
    """Ask for a thread's codes of a step, for its words of scales and, if there are any, of offsets. From `last` on codes are
    any, which are finite numbers, and scales zeros.

    codes: addresses of a thread's first bytes of step 0. row: row g; `apart` rows after it is the other.

    Returns three tuples: words of row g, then of the other, four of each 64 bytes of a row; scales; offsets."""
    reads = (step < last).to(gl.int32)
    inside = step < last
    skipped = gl.minimum(step, last - 1).to(gl.int64) * N
    address = codes + skipped * RUN
    words = four(READ_ONCE, address, reads) + four(READ_ONCE, address + apart * RUN, reads)
    if RUN == 128:
        words = words + four(READ_ONCE, address + 64, reads) + four(READ_ONCE, address + (apart * RUN + 64), reads)
    at = skipped + row
    scale = (gl.load(scales + at, mask=inside, other=0), gl.load(scales + at + apart, mask=inside, other=0))
    offset = scale
    if offsets is not None:
        offset = (gl.load(offsets + at, mask=inside, other=0), gl.load(offsets + at + apart, mask=inside, other=0))
    return words, scale, offset


@gluon.jit
def halves(word):
    """int32, two float16. Returns both as float32."""
    low = (word & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    high = ((word >> 16) & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    return low, high


@gluon.jit
def scaled(low, high, low_scale, high_scale, total):
    """`total` and both sums times their scales; rounded in one order, so that an activation row's place changes nothing."""
    return gl.fma(low, low_scale, gl.fma(high, high_scale, total))
