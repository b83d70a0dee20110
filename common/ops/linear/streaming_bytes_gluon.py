"""INT4 weights on INT8 tensor cores, for the kernel for few rows (`streaming_gluon.py`): each activation is two bytes.

On an H200 the limit was arithmetic, not memory: unpacking eight codes to bf16 takes eight instructions, to bytes three, and
`mma.sync` multiplies twice as many bytes at once. So activations become 16-bit integers. Those that share a weight's scale are
multiples of one power of two, the unit, and the two bytes of each are in two columns of the product:

    x = (256 · upper + lower) · unit,   |x / unit| up to 32,639, and at least 16,384 for the largest

This is exact for activations of at least a 128th of the group's largest, which in bf16 have eight bits (but that 32,640 becomes
32,639). Smaller ones are rounded, by at most a 32,768th of the largest. Sums of products are exact, in int32. Offsets, and what
a number is less than its code, are multiplied by the sum of a group's activations. NaN and infinity make the unit NaN, and so
every result of the row.

    A   16 weight rows × 32 inputs: rows g and g + 8 of thread 4 g + c
    B   32 inputs × 8 columns, two for each of up to four activation rows; fewer rows are repeated
    D   weight rows g and g + 8 times both bytes of activation row c

Each program makes bytes of the activations that its warps multiply, and keeps them in shared memory. Gluon's tensors there have
no addresses, so an instruction of the kernel declares it (`SHARED`). Of a run of 128 inputs the lower bytes of both halves
change places: threads that read upper and lower bytes at once would else read from the same banks.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from common.ops.linear.streaming_step_gluon import READ, four, halves, scaled

_LESS = gl.constexpr(-8.0)
"""A code's number, less the code."""
_PRODUCT = "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32"
_MULTIPLY = gl.constexpr(
    """{
    .reg .b32 a<4>, h<4>;
    and.b32 a0, $8, 0x0f0f0f0f;
    and.b32 a1, $9, 0x0f0f0f0f;
    and.b32 a2, $10, 0x0f0f0f0f;
    and.b32 a3, $11, 0x0f0f0f0f;
    shr.b32 h0, $8, 4;
    shr.b32 h1, $9, 4;
    shr.b32 h2, $10, 4;
    shr.b32 h3, $11, 4;
    and.b32 h0, h0, 0x0f0f0f0f;
    and.b32 h1, h1, 0x0f0f0f0f;
    and.b32 h2, h2, 0x0f0f0f0f;
    and.b32 h3, h3, 0x0f0f0f0f;
    """
    + _PRODUCT
    + " {$0, $1, $2, $3}, {a0, a1, a2, a3}, {$12, $13}, {$16, $17, $18, $19};\n"
    + _PRODUCT
    + " {$4, $5, $6, $7}, {h0, h1, h2, h3}, {$14, $15}, {$20, $21, $22, $23}; }"
)
"""$8 to $11: words of codes of row g, of row g + 8, and the next word of either. $12, $13: activations of the low halves'
inputs; $14, $15: of the high halves'. $0 to $3 and $4 to $7: the sums $16 to $23 and the products."""
_READ_WORDS = gl.constexpr("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];")
_READ_PAIR = gl.constexpr("ld.shared.v2.f32 {$0, $1}, [$2];")
_WRITE_PAIR = gl.constexpr(
    """{
    .reg .pred writes;
    setp.ne.s32 writes, $3, 0;
    @writes st.shared.v2.b32 [$4], {$1, $2};
    mov.b32 $0, 0;
    }"""
)
_BARRIER = gl.constexpr("bar.sync 0; mov.b32 $0, 0;")


def _in_bytes() -> gl.constexpr:
    """$7 to $10: eight bf16; $6: 1 where a group is 16 threads, 0 where it is 8. $0, $1: their upper bytes; $2, $3: their lower
    ones; $4: the group's unit; $5: its sum.

    A float32 plus 1.5 · 2²³ (0x4B400000) has an integer in its last bits, rounded to even."""
    text = [
        "{",
        ".reg .b32 w<4>, m, o, e, f, q<8>, t<8>, s;",
        ".reg .f32 x, factor, unit, total;",
        ".reg .pred odd, wide;",
        "setp.ne.s32 wide, $6, 0;",
        *[f"and.b32 w{i}, ${7 + i}, 0x7fff7fff;" for i in range(4)],
        "max.NaN.bf16x2 w0, w0, w1;",
        "max.NaN.bf16x2 w2, w2, w3;",
        "max.NaN.bf16x2 m, w0, w2;",
        "shr.u32 o, m, 16;",
        "max.NaN.bf16x2 m, m, o;",
        *[line for apart in (1, 2, 4) for line in (f"shfl.sync.bfly.b32 o, m, {apart}, 31, -1;", "max.NaN.bf16x2 m, m, o;")],
        "shfl.sync.bfly.b32 o, m, 8, 31, -1;",
        "@wide max.NaN.bf16x2 m, m, o;",
        "bfe.u32 e, m, 7, 8;",
        "sub.s32 f, 268, e;",
        "min.s32 f, f, 253;",
        "shl.b32 o, f, 23;",
        "mov.b32 factor, o;",
        "sub.s32 o, 254, f;",
        "shl.b32 o, o, 23;",
        "setp.eq.u32 odd, e, 255;",
        "selp.b32 o, 0x7fffffff, o, odd;",
        "mov.b32 unit, o;",
        "mov.f32 $4, unit;",
    ]
    for i in range(8):
        source = f"${7 + i // 2}"
        text += [
            f"shl.b32 o, {source}, 16;" if i % 2 == 0 else f"and.b32 o, {source}, 0xffff0000;",
            "mov.b32 x, o;",
            "fma.rn.f32 x, x, factor, 0f4B400000;",
            f"mov.b32 q{i}, x;",
            f"sub.s32 q{i}, q{i}, 0x4B400000;",
            f"min.s32 q{i}, q{i}, 32639;",
            f"add.s32 t{i}, q{i}, 128;",
        ]
    for at in (0, 4):
        text += [
            f"prmt.b32 o, t{at}, t{at + 1}, 0x0051;",
            f"prmt.b32 e, t{at + 2}, t{at + 3}, 0x0051;",
            f"prmt.b32 ${at // 4}, o, e, 0x5410;",
            f"prmt.b32 o, q{at}, q{at + 1}, 0x0040;",
            f"prmt.b32 e, q{at + 2}, q{at + 3}, 0x0040;",
            f"prmt.b32 ${2 + at // 4}, o, e, 0x5410;",
        ]
    text += ["add.s32 s, q0, q1;", *[f"add.s32 s, s, q{i};" for i in range(2, 8)]]
    for apart in (1, 2, 4):
        text += [f"shfl.sync.bfly.b32 o, s, {apart}, 31, -1;", "add.s32 s, s, o;"]
    text += [
        "shfl.sync.bfly.b32 o, s, 8, 31, -1;",
        "@wide add.s32 s, s, o;",
        "cvt.rn.f32.s32 total, s;",
        "mul.f32 $5, total, unit;",
        "}",
    ]
    return gl.constexpr("\n".join(text))


_IN_BYTES = _in_bytes()


@gluon.jit
def _multiplied(words, at: gl.constexpr, low, high, sums):
    """`sums` and the products of two words of codes of either row."""
    a, b, c, d, e, f, i, j = sums
    pair: gl.constexpr = at % 4
    return gl.inline_asm_elementwise(
        _MULTIPLY,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [words[at], words[at + 4], words[at + 1], words[at + 5], low[pair], low[pair + 1], high[pair], high[pair + 1],
         a, b, c, d, e, f, i, j],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )  # fmt: skip


@gluon.jit
def _number(upper, lower):
    return (upper * 256 + lower).to(gl.float32)


@gluon.jit
def _less(scale, offset, OFFSETS: gl.constexpr):
    """What the sums of activations are multiplied by: what a number is less than its code, times its scale, and its offset."""
    low, high = halves(scale)
    less_low = low * _LESS
    less_high = high * _LESS
    if OFFSETS:
        low_offset, high_offset = halves(offset)
        less_low += low_offset
        less_high += high_offset
    return less_low, less_high


@gluon.jit
def add_step_of_bytes(total, held, x_bytes, x_units, zero, RUN: gl.constexpr, ROWS: gl.constexpr, OFFSETS: gl.constexpr):
    """total: two float32, of weight rows g and g + 8 and an activation row. held: see `read_step`. x_bytes: shared addresses of
    a thread's activations of the step, one for each 64 inputs of a run; x_units: of their unit and sum. zero: int32.

    Returns the total with the step's products."""
    words, scale, offset = held
    sums = (zero, zero, zero, zero, zero, zero, zero, zero)
    for part in gl.static_range(RUN // 64):
        low = four(_READ_WORDS, x_bytes[part], None)
        high = four(_READ_WORDS, x_bytes[part] + 2 * ROWS * RUN, None)
        sums = _multiplied(words, part * 8, low, high, sums)
        sums = _multiplied(words, part * 8 + 2, low, high, sums)
    low_unit, low_sum = _pair(x_units)
    high_unit, high_sum = _pair(x_units + 8 * ROWS)
    low_g, high_g = halves(scale[0])
    low_h, high_h = halves(scale[1])
    a = scaled(_number(sums[0], sums[1]), _number(sums[4], sums[5]), low_g * low_unit, high_g * high_unit, total[0])
    b = scaled(_number(sums[2], sums[3]), _number(sums[6], sums[7]), low_h * low_unit, high_h * high_unit, total[1])
    less_low_g, less_high_g = _less(scale[0], offset[0], OFFSETS)
    less_low_h, less_high_h = _less(scale[1], offset[1], OFFSETS)
    return scaled(low_sum, high_sum, less_low_g, less_high_g, a), scaled(low_sum, high_sum, less_low_h, less_high_h, b)


@gluon.jit
def _pair(address):
    """Two float32 of shared memory."""
    return gl.inline_asm_elementwise(
        _READ_PAIR, "=f,=f,r", [address], dtype=(gl.float32, gl.float32), is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def _write_pair(address, first, second, writes):
    """Write two int32 to shared memory, where `writes`."""
    gl.inline_asm_elementwise(
        _WRITE_PAIR, "=r,r,r,r,r", [first, second, writes.to(gl.int32), address], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def keep_in_bytes(
    shared,
    x,
    first,
    rows,
    K,
    thread,
    HELD: gl.constexpr,
    ROWS: gl.constexpr,
    RUN: gl.constexpr,
    THREADS: gl.constexpr,
):
    """Write a program's activations into shared memory, as bytes: of ROWS rows, HELD steps from step `first` on. Behind the
    last row is the last again, behind the last input zeros.

    shared: the address of [HELD, 2 runs, ROWS, 2 bytes, RUN] bytes, and of [HELD, 2 runs, ROWS] units and sums behind them."""
    PIECES: gl.constexpr = HELD * RUN // 4  # of a row: eight inputs each
    GROUP: gl.constexpr = RUN // 8
    SWAPPED: gl.constexpr = RUN // 128 * 64
    is_wide = gl.full([THREADS], RUN // 128, gl.int32, thread.type.layout)
    for begin in gl.static_range(0, ROWS * PIECES, THREADS):
        row = (begin + thread) // PIECES
        piece = (begin + thread) % PIECES
        column = first * (2 * RUN) + piece * 8
        inside = (column < K) & (row < ROWS)
        place = x.to(gl.int64) + (gl.minimum(row, rows - 1).to(gl.int64) * K + gl.minimum(column, K - 8)) * 2
        words = four(READ, place, None)
        upper_0, upper_1, lower_0, lower_1, unit, total = gl.inline_asm_elementwise(
            _IN_BYTES,
            "=&r,=&r,=&r,=&r,=&f,=&f,r,r,r,r,r",
            [
                is_wide,
                gl.where(inside, words[0], 0),
                gl.where(inside, words[1], 0),
                gl.where(inside, words[2], 0),
                gl.where(inside, words[3], 0),
            ],
            dtype=(gl.int32, gl.int32, gl.int32, gl.int32, gl.float32, gl.float32),
            is_pure=False,
            pack=1,
        )
        group = piece // GROUP
        inner = piece % GROUP * 8
        upper = shared + (group * ROWS + row) * (2 * RUN)
        _write_pair(upper + inner, upper_0, upper_1, row < ROWS)
        _write_pair(upper + RUN + (inner ^ SWAPPED), lower_0, lower_1, row < ROWS)
        units = shared + HELD * 4 * ROWS * RUN + (group * ROWS + row) * 8
        is_first = (row < ROWS) & (inner == 0)
        _write_pair(units, unit.to(gl.int32, bitcast=True), total.to(gl.int32, bitcast=True), is_first)
    gl.inline_asm_elementwise(_BARRIER, "=r,r", [thread], dtype=gl.int32, is_pure=False, pack=1)
