"""Products of a few activation rows with weights of 4 bits in groups, in Gluon: codes go from memory to registers at once.

A warp multiplies 16 weight rows: what a thread reads of one of them, 16 bytes a read, is its part of the fragments of
`mma.sync` (m16n8k16), with the inputs of its codes in the order in which they lie. So no code goes through shared memory, no
thread waits for another, and a warp asks for the codes of its next step, or the next few, while it multiplies. The first reads
begin before the kernel's turn comes (programmatic dependent launch): they ask for weights only.

A thread's values are one element of each tensor here; `mma.sync` is an instruction of all threads of a warp on them.

Up to four activation rows may multiply INT4 weights as bytes instead (`streaming_bytes_gluon.py`). In bf16, of up to eight
activation rows or of twice eight (TILES), for which codes are unpacked once:

    A   16 weight rows × 16 inputs: rows g and g + 8 of thread 4 g + c
    B   16 inputs × 8 activation rows; of fewer, the last is there again
    D   weight rows g and g + 8 times activation rows 2 c and 2 c + 1

Codes of integers become 128 + code, one instruction less for each pair; what that is too much, and offsets, are multiplied by
sums of a group's activations, which a second product gives every thread where it needs them: its A has ones in rows g for the
inputs of low halves, in rows g + 8 for those of high halves.

Triton's interpreter does not run Gluon: `streaming.py` has the call. Tests compile it; those that compare results are marked
`gpu`.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false

from __future__ import annotations

import re

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from common.ops.hopper_gluon import AWAIT, LET_NEXT
from common.ops.linear.streaming_bytes_gluon import add_step_of_bytes, keep_in_bytes
from common.ops.linear.streaming_step_gluon import READ, four, halves, read_step, scaled
from common.ops.linear.unpack_code import FLOATS, NORMAL_FLOATS, SHIFTED_INTEGERS

LESS = gl.constexpr(-136.0)
"""A code's number, less its `SHIFTED_INTEGERS`."""

_PRODUCT = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"


def _both(unpack: str) -> gl.constexpr:
    """$0 … $3: numbers of the codes of row g, in $8; $4 … $7: those of row g + 8, in $9."""
    other = re.sub(r"\$([0-3])", lambda name: f"${int(name[1]) + 4}", unpack.replace("$4", "$9"))
    return gl.constexpr("\n".join(["{", unpack.replace("$4", "$8"), other, "}"]))


UNPACK_INTEGERS = _both(SHIFTED_INTEGERS.value)
UNPACK_FLOATS = _both(FLOATS.value)
UNPACK_NORMAL_FLOATS = _both(NORMAL_FLOATS.value)
MULTIPLY = gl.constexpr(
    f"""{_PRODUCT} {{$0, $1, $2, $3}}, {{$8, $12, $9, $13}}, {{$16, $17}}, {{$20, $21, $22, $23}};
    {_PRODUCT} {{$4, $5, $6, $7}}, {{$10, $14, $11, $15}}, {{$18, $19}}, {{$24, $25, $26, $27}};"""
)
"""$0 … $7: sums of the low halves, then of the high ones. $8 … $15: numbers of rows g and g + 8. $16 … $19: activations of the
low halves' inputs and of the high halves'. $20 … $27: the sums so far."""
ADD = gl.constexpr(
    f"""{{ .reg .b32 one, none; mov.b32 one, 0x3f803f80; mov.b32 none, 0;
    {_PRODUCT} {{$0, $1, $2, $3}}, {{one, none, one, none}}, {{$4, $5}}, {{$8, $9, $10, $11}};
    {_PRODUCT} {{$0, $1, $2, $3}}, {{none, one, none, one}}, {{$6, $7}}, {{$0, $1, $2, $3}}; }}"""
)
"""$0, $1: sums of two activation rows' inputs of the low halves; $2, $3: of the high ones. $4 … $7: activations, as $16 … $19
of `MULTIPLY`. $8 … $11: the sums so far."""


@gluon.jit
def _unpacked(g, h, CODE: gl.constexpr):
    """The numbers of a word of codes of either row, as `MULTIPLY` takes them."""
    text: gl.constexpr = UNPACK_INTEGERS if CODE == 0 else UNPACK_FLOATS if CODE == 1 else UNPACK_NORMAL_FLOATS
    return gl.inline_asm_elementwise(
        text,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r",
        [g, h],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _multiplied(numbers, low_0, low_1, high_0, high_1, sums):
    """`sums` and the products of one word of codes of either row."""
    g0, g1, g2, g3, h0, h1, h2, h3 = numbers
    a, b, c, d, e, f, i, j = sums
    return gl.inline_asm_elementwise(
        MULTIPLY,
        "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r,r,r,r,r,r,r,r,r,r,r,r,f,f,f,f,f,f,f,f",
        [g0, g1, g2, g3, h0, h1, h2, h3, low_0, low_1, high_0, high_1, a, b, c, d, e, f, i, j],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32, gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _added(low_0, low_1, high_0, high_1, sums):
    """`sums` of two activation rows' inputs, with those in four registers: see `ADD`."""
    a, b, c, d = sums
    return gl.inline_asm_elementwise(
        ADD,
        "=&f,=&f,=&f,=&f,r,r,r,r,f,f,f,f",
        [low_0, low_1, high_0, high_1, a, b, c, d],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _add_step(
    totals, held, x_rows, step, zero, RUN: gl.constexpr, CODE: gl.constexpr, OFFSETS: gl.constexpr, TILES: gl.constexpr
):
    """totals: of each eight activation rows four float32, D of the module. held: see `read_step`. x_rows: of each eight, the
    addresses of a thread's activations of step 0.

    Returns the totals with the step's products."""
    words, scale, offset = held
    SUMMED: gl.constexpr = OFFSETS or CODE == 0
    sums, x_sums = (), ()
    for _ in gl.static_range(TILES):
        sums += ((zero, zero, zero, zero, zero, zero, zero, zero),)
        x_sums += ((zero, zero, zero, zero),)
    for part in gl.static_range(RUN // 32):  # of a thread's inputs: 16 bytes of activations and two words of codes of each half
        lows, highs = (), ()
        for tile in gl.static_range(TILES):
            at = x_rows[tile] + (step.to(gl.int64) * (4 * RUN) + (part // 2 * 128 + part % 2 * 16))
            lows += (four(READ, at, None),)
            highs += (four(READ, at + 2 * RUN, None),)
        for word in gl.static_range(2):
            codes_of_g = words[part // 2 * 8 + part % 2 * 2 + word]
            numbers = _unpacked(codes_of_g, words[part // 2 * 8 + part % 2 * 2 + word + 4], CODE)
            more, x_more = (), ()
            for tile in gl.static_range(TILES):
                low, high = lows[tile], highs[tile]
                l0, l1, h0, h1 = low[2 * word], low[2 * word + 1], high[2 * word], high[2 * word + 1]
                more += (_multiplied(numbers, l0, l1, h0, h1, sums[tile]),)
                if SUMMED:
                    x_more += (_added(l0, l1, h0, h1, x_sums[tile]),)
            sums = more
            if SUMMED:
                x_sums = x_more
    low_g, high_g = halves(scale[0])
    low_h, high_h = halves(scale[1])
    if SUMMED:
        more_low_g, more_high_g, more_low_h, more_high_h = zero, zero, zero, zero
        if OFFSETS:
            more_low_g, more_high_g = halves(offset[0])
            more_low_h, more_high_h = halves(offset[1])
        if CODE == 0:
            more_low_g = gl.fma(low_g, LESS, more_low_g)
            more_high_g = gl.fma(high_g, LESS, more_high_g)
            more_low_h = gl.fma(low_h, LESS, more_low_h)
            more_high_h = gl.fma(high_h, LESS, more_high_h)
    found = ()
    for tile in gl.static_range(TILES):
        total, products, of_x = totals[tile], sums[tile], x_sums[tile]
        a = scaled(products[0], products[4], low_g, high_g, total[0])
        b = scaled(products[1], products[5], low_g, high_g, total[1])
        c = scaled(products[2], products[6], low_h, high_h, total[2])
        d = scaled(products[3], products[7], low_h, high_h, total[3])
        if SUMMED:
            a = scaled(of_x[0], of_x[2], more_low_g, more_high_g, a)
            b = scaled(of_x[1], of_x[3], more_low_g, more_high_g, b)
            c = scaled(of_x[0], of_x[2], more_low_h, more_high_h, c)
            d = scaled(of_x[1], of_x[3], more_low_h, more_high_h, d)
        found += ((a, b, c, d),)
    return found


@gluon.jit
def _summed(value, WARPS: gl.constexpr, PARTS: gl.constexpr, L: gl.constexpr):
    """The sum of PARTS neighbouring warps' values, in each of them."""
    if PARTS > 1:
        total = gl.sum(value.reshape([WARPS // PARTS, PARTS, 32]), 1)
        total = gl.expand_dims(total, 1).broadcast_to([WARPS // PARTS, PARTS, 32]).reshape([WARPS * 32])
        value = gl.convert_layout(total, L)
    return value


@gluon.jit
def _store(value, out, split, row, column, rows, width, inside):
    """value: of weight rows `column` and activation rows `row`."""
    place = (split * rows + row).to(gl.int64) * width + column
    gl.store(out + place, value.to(out.dtype.element_ty), mask=inside & (row < rows))


@gluon.jit(do_not_specialize=["rows", "steps", "steps_each"])
def streaming_kernel(
    x,  # bf16 [rows, K]
    weight,  # see `GroupedWeight`; this and the next three
    scales,
    offsets,
    channel,
    bias,  # [N] or None
    out,  # as `grouped_kernel`'s
    rows,  # at most 8 TILES
    N,
    K,
    steps,
    steps_each,  # of a warp
    RUN: gl.constexpr,  # 64 or 128
    CODE: gl.constexpr,
    GATED: gl.constexpr,
    WARPS: gl.constexpr,
    PARTS: gl.constexpr,  # warps that share 16 weight rows
    STAGES: gl.constexpr,
    TILES: gl.constexpr,  # of eight activation rows
    ROWS: gl.constexpr,  # activation rows that are multiplied as bytes, 1, 2 or 4; 0: all are as bf16
    HELD: gl.constexpr,  # steps of a program, of ROWS
    SHARED: gl.constexpr,  # declares the shared memory of ROWS, and gives its address
    EARLY: gl.constexpr,  # the next kernel may start at once, else when this one has read its weights
    PDL: gl.constexpr,
):
    L: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    thread = gl.arange(0, WARPS * 32, L)
    lane = thread % 32
    warp = thread // 32
    tile = gl.program_id(0) * (WARPS // PARTS) + warp // PARTS
    part = gl.program_id(1) * PARTS + warp % PARTS
    first = part * steps_each
    last = gl.minimum(first + steps_each, steps)
    if GATED:
        width = N // 2
        apart = width
        column = tile * 8 + lane // 4
        row = gl.minimum(column, width - 1)
    else:
        width = N
        apart: gl.constexpr = 8
        column = tile * 16 + lane // 4
        row = gl.minimum(column, width - 9)
    codes = weight.to(gl.int64) + row.to(gl.int64) * RUN + lane % 4 * 16
    if PDL and EARLY:
        gl.inline_asm_elementwise(LET_NEXT, "=r", [], gl.int32, is_pure=False, pack=1)
    ring = ()
    for stage in gl.static_range(STAGES):
        ring += (read_step(codes, scales, offsets, row, apart, first + stage, last, N, RUN),)
    if PDL:
        gl.inline_asm_elementwise(AWAIT, "=r", [], gl.int32, is_pure=False, pack=1)
    zero = gl.full([WARPS * 32], 0.0, gl.float32, L)
    if ROWS > 0:
        shared = gl.inline_asm_elementwise(SHARED, "=r,r", [thread], dtype=gl.int32, is_pure=False, pack=1)
        keep_in_bytes(shared, x, gl.program_id(1) * HELD, rows, K, thread, HELD, ROWS, RUN, WARPS * 32)
        byte = lane // 4 % (2 * ROWS)
        x_bytes = shared + byte * RUN + lane % 4 * 16 + warp % PARTS * steps_each * (4 * ROWS * RUN)
        x_units = shared + HELD * 4 * ROWS * RUN + gl.minimum(lane % 4, ROWS - 1) * 8 + warp % PARTS * steps_each * (16 * ROWS)
        swapped = byte % 2 * (RUN // 128 * 64)
        nothing = gl.full([WARPS * 32], 0, gl.int32, L)
        pair = (zero, zero)
        for turn in range(0, steps_each, STAGES):
            following = ()
            for stage in gl.static_range(STAGES):
                local = gl.minimum(turn + stage, steps_each - 1)
                place = x_bytes + local * (4 * ROWS * RUN)
                places = (place + swapped, place + (64 - swapped))
                units = x_units + local * (16 * ROWS)
                pair = add_step_of_bytes(pair, ring[stage], places, units, nothing, RUN, ROWS, offsets is not None)
                step = first + turn + stage + STAGES
                following += (read_step(codes, scales, offsets, row, apart, step, last, N, RUN),)
            ring = following
        totals = ((pair[0], zero, pair[1], zero),)
    else:
        x_rows, totals = (), ()
        for tile_of_x in gl.static_range(TILES):
            x_row = gl.minimum(lane // 4 + 8 * tile_of_x, rows - 1)
            x_rows += (x.to(gl.int64) + (x_row.to(gl.int64) * K + lane % 4 * 16) * 2,)
            totals += ((zero, zero, zero, zero),)
        for turn in range(0, steps_each, STAGES):
            following = ()
            for stage in gl.static_range(STAGES):
                step = first + turn + stage
                inside = gl.minimum(step, steps - 1)
                totals = _add_step(totals, ring[stage], x_rows, inside, zero, RUN, CODE, offsets is not None, TILES)
                following += (read_step(codes, scales, offsets, row, apart, step + STAGES, last, N, RUN),)
            ring = following
    if PDL and not EARLY:
        gl.inline_asm_elementwise(LET_NEXT, "=r", [], gl.int32, is_pure=False, pack=1)
    factor_g = gl.load(channel + row)
    factor_h = gl.load(channel + row + apart)
    split = gl.program_id(1)
    if bias is not None:
        bias_g = gl.where(split == 0, gl.load(bias + row).to(gl.float32), 0.0)
        bias_h = gl.where(split == 0, gl.load(bias + row + apart).to(gl.float32), 0.0)
    inside = (column < width) & (warp % PARTS == 0)
    for tile_of_x in gl.static_range(TILES):
        total = totals[tile_of_x]
        a = _summed(total[0], WARPS, PARTS, L) * factor_g
        b = _summed(total[1], WARPS, PARTS, L) * factor_g
        c = _summed(total[2], WARPS, PARTS, L) * factor_h
        d = _summed(total[3], WARPS, PARTS, L) * factor_h
        if bias is not None:
            a += bias_g
            b += bias_g
            c += bias_h
            d += bias_h
        token = lane % 4 if ROWS > 0 else 8 * tile_of_x + lane % 4 * 2
        if GATED:
            _store(a / (1.0 + gl.exp(-a)) * c, out, split, token, column, rows, width, inside)
            if ROWS == 0:
                _store(b / (1.0 + gl.exp(-b)) * d, out, split, token + 1, column, rows, width, inside)
        else:
            _store(a, out, split, token, column, rows, width, inside)
            _store(c, out, split, token, column + 8, rows, width, inside)
            if ROWS == 0:
                _store(b, out, split, token + 1, column, rows, width, inside)
                _store(d, out, split, token + 1, column + 8, rows, width, inside)
