"""Gate and up of many rows on Hopper, with their activation: warp-specialised, in Gluon.

    loader            boxes of activations and weights into a ring in shared memory, by the bulk-copy engine
    2 or 3 consumers  multiply 64 activation rows of a tile each, by the tile's weight rows of the gate and of the up

The activation is applied to sums in registers, so gate and up are neither written to memory nor read again. Tiles are as large
as registers allow, 192 activation rows with three consumers times 128 weight rows each of the gate and the up: the larger they
are, the less has to be copied to shared memory. Copies cost energy, and a card at its power limit runs at a lower clock for it.

A program stays on its multiprocessor and goes through a list of tiles; the loader fills the ring for the next one while
results of this one are stored. GROUP tiles of activations go through all weights before others do: L2 holds both.

Triton's interpreter does not run Gluon: `specialised.py` has the call. Tests compile it; those that compare its results are
marked `gpu`.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from common.ops.hopper_gluon import AWAIT, LET_NEXT, load_box
from common.ops.linear.store_gluon import activated

PART = gl.constexpr(64)
"""Activation rows of a consumer."""


@gluon.jit
def _place(index, sizes, GROUP: gl.constexpr):
    """The tile of activation rows, and that of weight rows, of tile `index` of all."""
    _num_items, row_tiles, n_tiles, _steps, _rows, _size = sizes
    group = index // (GROUP * n_tiles)
    within = index % (GROUP * n_tiles)
    beside = gl.minimum(GROUP, row_tiles - group * GROUP)
    return group * GROUP + within % beside, within // beside


@gluon.jit
def _load(
    x, weight, sizes, rings,
    CONSUMERS: gl.constexpr, WIDTH: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    num_items, _row_tiles, _n_tiles, steps, _rows, size = sizes
    x_ring, gate_ring, up_ring, full, empty = rings
    BYTES: gl.constexpr = (CONSUMERS * PART + 2 * WIDTH) * BK * 2
    if PDL:
        gl.inline_asm_elementwise(AWAIT, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    at = 0
    for index in range(gl.program_id(0), num_items, gl.num_programs(0)):
        row_tile, n_tile = _place(index, sizes, GROUP)
        for step in range(steps):
            slot = at % STAGES
            mbarrier.wait(empty.index(slot), at // STAGES & 1 ^ 1)
            arrival = full.index(slot)
            mbarrier.expect(arrival, BYTES)
            for part in gl.static_range(CONSUMERS):
                box = x_ring.index(slot * CONSUMERS + part)
                load_box(x, [(row_tile * CONSUMERS + part) * PART, step * BK], arrival, box)
            load_box(weight, [n_tile * WIDTH, step * BK], arrival, gate_ring.index(slot))
            load_box(weight, [size + n_tile * WIDTH, step * BK], arrival, up_ring.index(slot))
            at += 1


@gluon.jit
def _store(value, out, first, count, column, size, WIDTH: gl.constexpr):
    """value: [PART, WIDTH], outputs from `column` on of activation rows from `first` on, of which there are `count`."""
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    value = gl.convert_layout(value.to(out.dtype.element_ty), STORED)
    row = gl.expand_dims(gl.arange(0, PART, gl.SliceLayout(1, STORED)), 1)
    columns = gl.expand_dims(column + gl.arange(0, WIDTH, gl.SliceLayout(0, STORED)), 0)
    gl.store(out + (first + row).to(gl.int64) * size + columns, value, mask=(row < count) & (columns < size))


@gluon.jit
def _multiply(
    bias, out, sizes, rings,
    OWN: gl.constexpr, ACTIVATION: gl.constexpr, CONSUMERS: gl.constexpr, WIDTH: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    num_items, _row_tiles, _n_tiles, steps, rows, size = sizes
    x_ring, gate_ring, up_ring, full, empty = rings
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    lane = gl.arange(0, WIDTH, gl.SliceLayout(0, SUMS))
    if PDL:
        gl.inline_asm_elementwise(AWAIT, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    at = 0
    for index in range(gl.program_id(0), num_items, gl.num_programs(0)):
        row_tile, n_tile = _place(index, sizes, GROUP)
        gate = gl.zeros([PART, WIDTH], gl.float32, SUMS)
        up = gl.zeros([PART, WIDTH], gl.float32, SUMS)
        for step in range(steps):
            slot = at % STAGES
            mbarrier.wait(full.index(slot), at // STAGES & 1)
            activations = x_ring.index(slot * CONSUMERS + OWN)
            gate = warpgroup_mma(activations, gate_ring.index(slot).permute((1, 0)), gate, is_async=True)
            up = warpgroup_mma(activations, up_ring.index(slot).permute((1, 0)), up, is_async=True)
            gate, up = warpgroup_mma_wait(2, deps=[gate, up])
            mbarrier.arrive(empty.index((at + STAGES - 1) % STAGES), count=1, pred=step > 0)
            at += 1
        gate, up = warpgroup_mma_wait(0, deps=[gate, up])
        mbarrier.arrive(empty.index((at + STAGES - 1) % STAGES), count=1)
        first = (row_tile * CONSUMERS + OWN) * PART
        if bias is not None:
            n = gl.minimum(n_tile * WIDTH + lane, size - 1)
            gate = gate + gl.expand_dims(gl.load(bias + n).to(gl.float32), 0)
            up = up + gl.expand_dims(gl.load(bias + size + n).to(gl.float32), 0)
        value = activated(gate, up, 1.0, 0.0, ACTIVATION)
        _store(value, out, first, rows - first, n_tile * WIDTH, size, WIDTH)


@gluon.jit(do_not_specialize=["rows", "num_items", "row_tiles"])
def specialised_kernel(
    x,  # a descriptor of [rows, inputs] bf16, in boxes of [PART, BK]
    weight,  # a descriptor of [2 * size, inputs] bf16, the gate's rows first, in boxes of [WIDTH, BK]
    bias,  # [2 * size] or None
    out,  # [rows, size]
    rows,
    size,
    num_items,
    row_tiles,
    n_tiles,
    steps,
    CONSUMERS: gl.constexpr,  # 2 or 3
    WIDTH: gl.constexpr,  # outputs of a tile
    BK: gl.constexpr,  # inputs of a step
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,  # tiles of activations that go through all weights side by side
    ACTIVATION: gl.constexpr,  # silu or gelu_tanh
    PDL: gl.constexpr,
):
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES * CONSUMERS, PART, BK], x.layout)
    gate_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, WIDTH, BK], weight.layout)
    up_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, WIDTH, BK], weight.layout)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    if PDL:
        gl.inline_asm_elementwise(LET_NEXT, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    sizes = (num_items, row_tiles, n_tiles, steps, rows, size)
    rings = (x_ring, gate_ring, up_ring, full, empty)
    if CONSUMERS == 3:
        gl.warp_specialize(
            [
                (_multiply, (bias, out, sizes, rings, 0, ACTIVATION, CONSUMERS, WIDTH, STAGES, GROUP, PDL)),
                (_multiply, (bias, out, sizes, rings, 1, ACTIVATION, CONSUMERS, WIDTH, STAGES, GROUP, PDL)),
                (_multiply, (bias, out, sizes, rings, 2, ACTIVATION, CONSUMERS, WIDTH, STAGES, GROUP, PDL)),
                (_load, (x, weight, sizes, rings, CONSUMERS, WIDTH, BK, STAGES, GROUP, PDL)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (bias, out, sizes, rings, 0, ACTIVATION, CONSUMERS, WIDTH, STAGES, GROUP, PDL)),
                (_multiply, (bias, out, sizes, rings, 1, ACTIVATION, CONSUMERS, WIDTH, STAGES, GROUP, PDL)),
                (_load, (x, weight, sizes, rings, CONSUMERS, WIDTH, BK, STAGES, GROUP, PDL)),
            ],
            [4, 1],
            [232, 40],
        )
