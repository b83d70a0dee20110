"""Products of a few activation rows with weights of 4 bits in groups, in Gluon: codes go from memory to registers at once.

A warp multiplies 16 weight rows: what a thread reads of one of them, 16 bytes a read, is its part of the fragments of
`mma.sync` (m16n8k16), with the inputs of its codes in the order in which they lie. So no code goes through shared memory, no
thread waits for another, and reads of several steps are under way in every warp. The first of them begin before the kernel's
turn comes (programmatic dependent launch): they ask for weights only.

A thread's values are one element of each tensor here; `mma.sync` is an instruction of all threads of a warp on them.

Up to four activation rows may multiply INT4 weights as bytes instead (`streaming_bytes_gluon.py`). In bf16:

    A   16 weight rows × 16 inputs: rows g and g + 8 of thread 4 g + c
    B   16 inputs × 8 activation rows; of fewer, the last is there again
    D   weight rows g and g + 8 times activation rows 2 c and 2 c + 1

Codes of integers become 128 + code, one instruction less for each pair; what that is too much, and offsets, are multiplied by
sums of a group's activations, which a second product, with ones, gives every thread where it needs them.

Triton's interpreter does not run Gluon: `streaming.py` has the call. Tests compile it; those that compare results are marked
`gpu`.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from common.ops.hopper_gluon import AWAIT, LET_NEXT
from common.ops.linear.streaming_bytes_gluon import add_step_of_bytes, keep_in_bytes
from common.ops.linear.streaming_step_gluon import READ, four, halves, read_step, scaled
from common.ops.linear.unpack_code import FLOATS, NORMAL_FLOATS, SHIFTED_INTEGERS

LESS = gl.constexpr(-136.0)
"""A code's number, less its `SHIFTED_INTEGERS`."""

_PRODUCT = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"


def _multiply(unpack: str) -> gl.constexpr:
    """$0 … $7: sums of the low halves, then of the high ones. $8, $9: codes of rows g and g + 8. $10 … $13: activations of
    the low halves' inputs and of the high halves'. $14 … $21: the sums so far."""
    parts = [_renamed(unpack, source, name) for source, name in (("$8", "g"), ("$9", "h"))]
    low = f"{_PRODUCT} {{$0, $1, $2, $3}}, {{g0, h0, g1, h1}}, {{$10, $11}}, {{$14, $15, $16, $17}};"
    high = f"{_PRODUCT} {{$4, $5, $6, $7}}, {{g2, h2, g3, h3}}, {{$12, $13}}, {{$18, $19, $20, $21}};"
    return gl.constexpr("\n".join(["{", ".reg .b32 g<4>, h<4>;", *parts, low, high, "}"]))


def _renamed(unpack: str, source: str, name: str) -> str:
    text = unpack.replace("$4", source)
    for index in range(4):
        text = text.replace(f"${index}", f"{name}{index}")
    return text


MULTIPLY_INTEGERS = _multiply(SHIFTED_INTEGERS.value)
MULTIPLY_FLOATS = _multiply(FLOATS.value)
MULTIPLY_NORMAL_FLOATS = _multiply(NORMAL_FLOATS.value)
SUM = gl.constexpr(
    "{ .reg .b32 one; mov.b32 one, 0x3f803f80;\n"
    + _PRODUCT
    + " {$0, $1, $2, $3}, {one, one, one, one}, {$4, $5}, {$6, $7, $8, $9}; }"
)


@gluon.jit
def _multiplied(g, h, low_0, low_1, high_0, high_1, sums, CODE: gl.constexpr):
    """`sums` and the products of one word of codes of either row."""
    text: gl.constexpr = MULTIPLY_INTEGERS if CODE == 0 else MULTIPLY_FLOATS if CODE == 1 else MULTIPLY_NORMAL_FLOATS
    a, b, c, d, e, f, i, j = sums
    return gl.inline_asm_elementwise(
        text,
        "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r,r,r,r,r,r,f,f,f,f,f,f,f,f",
        [g, h, low_0, low_1, high_0, high_1, a, b, c, d, e, f, i, j],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32, gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _added(first, second, sums):
    """`sums` of activations, of two activation rows (twice: the product has two equal halves), and those of two registers."""
    a, b, c, d = sums
    return gl.inline_asm_elementwise(
        SUM,
        "=&f,=&f,=&f,=&f,r,r,f,f,f,f",
        [first, second, a, b, c, d],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _add_step(total, held, x_row, step, zero, RUN: gl.constexpr, CODE: gl.constexpr, OFFSETS: gl.constexpr):
    """total: four float32, D of the module. held: see `_read_step`. x_row: addresses of a thread's activations of step 0.

    Returns the total with the step's products."""
    words, scale, offset = held
    SUMMED: gl.constexpr = OFFSETS or CODE == 0
    sums = (zero, zero, zero, zero, zero, zero, zero, zero)
    low_sum = (zero, zero, zero, zero)
    high_sum = (zero, zero, zero, zero)
    address = x_row + step.to(gl.int64) * (4 * RUN)
    for unit in gl.static_range(RUN // 64):
        low = four(READ, address + unit * 128, None) + four(READ, address + (unit * 128 + 16), None)
        high = four(READ, address + (2 * RUN + unit * 128), None) + four(READ, address + (2 * RUN + unit * 128 + 16), None)
        for word in gl.static_range(4):
            g = words[unit * 8 + word]
            h = words[unit * 8 + 4 + word]
            sums = _multiplied(g, h, low[2 * word], low[2 * word + 1], high[2 * word], high[2 * word + 1], sums, CODE)
            if SUMMED:
                low_sum = _added(low[2 * word], low[2 * word + 1], low_sum)
                high_sum = _added(high[2 * word], high[2 * word + 1], high_sum)
    low_g, high_g = halves(scale[0])
    low_h, high_h = halves(scale[1])
    a = scaled(sums[0], sums[4], low_g, high_g, total[0])
    b = scaled(sums[1], sums[5], low_g, high_g, total[1])
    c = scaled(sums[2], sums[6], low_h, high_h, total[2])
    d = scaled(sums[3], sums[7], low_h, high_h, total[3])
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
        a = scaled(low_sum[0], high_sum[0], more_low_g, more_high_g, a)
        b = scaled(low_sum[1], high_sum[1], more_low_g, more_high_g, b)
        c = scaled(low_sum[0], high_sum[0], more_low_h, more_high_h, c)
        d = scaled(low_sum[1], high_sum[1], more_low_h, more_high_h, d)
    return a, b, c, d


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
    rows,  # at most 8
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
        total = (pair[0], zero, pair[1], zero)
    else:
        x_row = x.to(gl.int64) + (gl.minimum(lane // 4, rows - 1).to(gl.int64) * K + lane % 4 * 16) * 2
        total = (zero, zero, zero, zero)
        for turn in range(0, steps_each, STAGES):
            following = ()
            for stage in gl.static_range(STAGES):
                step = first + turn + stage
                total = _add_step(total, ring[stage], x_row, gl.minimum(step, steps - 1), zero, RUN, CODE, offsets is not None)
                following += (read_step(codes, scales, offsets, row, apart, step + STAGES, last, N, RUN),)
            ring = following
    if PDL and not EARLY:
        gl.inline_asm_elementwise(LET_NEXT, "=r", [], gl.int32, is_pure=False, pack=1)
    factor_g = gl.load(channel + row)
    factor_h = gl.load(channel + row + apart)
    a = _summed(total[0], WARPS, PARTS, L) * factor_g
    b = _summed(total[1], WARPS, PARTS, L) * factor_g
    c = _summed(total[2], WARPS, PARTS, L) * factor_h
    d = _summed(total[3], WARPS, PARTS, L) * factor_h
    split = gl.program_id(1)
    if bias is not None:
        bias_g = gl.where(split == 0, gl.load(bias + row).to(gl.float32), 0.0)
        bias_h = gl.where(split == 0, gl.load(bias + row + apart).to(gl.float32), 0.0)
        a += bias_g
        b += bias_g
        c += bias_h
        d += bias_h
    inside = (column < width) & (warp % PARTS == 0)
    if ROWS > 0:
        token = lane % 4
        if GATED:
            _store(a / (1.0 + gl.exp(-a)) * c, out, split, token, column, rows, width, inside)
        else:
            _store(a, out, split, token, column, rows, width, inside)
            _store(c, out, split, token, column + 8, rows, width, inside)
    else:
        token = lane % 4 * 2
        if GATED:
            _store(a / (1.0 + gl.exp(-a)) * c, out, split, token, column, rows, width, inside)
            _store(b / (1.0 + gl.exp(-b)) * d, out, split, token + 1, column, rows, width, inside)
        else:
            _store(a, out, split, token, column, rows, width, inside)
            _store(b, out, split, token + 1, column, rows, width, inside)
            _store(c, out, split, token, column + 8, rows, width, inside)
            _store(d, out, split, token + 1, column + 8, rows, width, inside)
