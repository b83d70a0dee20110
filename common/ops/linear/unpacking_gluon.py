"""Products with 4-bit weights on Hopper, for many rows: some warps unpack while others multiply.

    unpackers   ask for activations of a step, by the bulk-copy engine;
                codes (copied ahead) → bf16 weights in registers → shared memory
    consumer 0  weight rows 0 to 63 of a tile times up to 256 activation rows
    consumer 1  weight rows 64 to 127

A step is 64 inputs. Both operands of its product lie in shared memory, in rings of several steps: consumers free a place when
their product is over, and unpackers fill it. Kernels that unpack into the registers they multiply from have to wait for each
product (`settled_triton.py`).

A program stays on its multiprocessor and goes through a list of tiles, so that the next tile's first steps are unpacked while
results of the one before are stored. Tiles are of one weight, or of the experts that pairs were sorted by
(`moe/sort_triton.py`); an expert's last tile is multiplied with no more columns than it needs.

Written in Gluon, which Triton's interpreter does not run: `unpacking.py` has the calls. Tests compile it and read its machine
code; those that compare its results are marked `gpu`.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from common.ops.hopper_gluon import AWAIT, LET_NEXT, load_box
from common.ops.linear.store_gluon import activated, store_results
from common.ops.linear.unpack_gluon import K, M, copy_chunk, side_by_side, weight_row, weights_of

thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
"""Triton 3.7 has it under another name."""
PAIRS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))
"""Where pairs of bf16 weights lie: 32 of them are a row of 128 bytes, as 64 bf16 are."""
GROUP_TILES = gl.constexpr(8)
"""Tiles of activations whose programs run side by side on the same weights."""


@gluon.jit
def _item(tiles, index, rows, n_tiles, splits, T: gl.constexpr):
    """Tile `index` of all: the expert, its first activation row and how many, the tile of weight rows, and the split."""
    if tiles is None:
        expert = 0
        split = index % splits
        index = index // splits
        group = index // (GROUP_TILES * n_tiles)
        within = index % (GROUP_TILES * n_tiles)
        beside = gl.minimum(GROUP_TILES, gl.cdiv(rows, T) - group * GROUP_TILES)
        first = (group * GROUP_TILES + within % beside) * T
        count = gl.minimum(T, rows - first)
        tile = within // beside
    else:
        entry = tiles + index // n_tiles * 4
        expert = gl.load(entry)
        first = gl.load(entry + 1)
        count = gl.load(entry + 2)
        tile = index % n_tiles
        split = 0
    return expert, first, count, tile, split


@gluon.jit
def _load(x, first, step, at, rings, RUN: gl.constexpr, T: gl.constexpr, X_STAGES: gl.constexpr):
    """Ask for the activations of a step of a tile, number `at` of all."""
    x_ring, x_full = rings[0], rings[2]
    if RUN == 32:
        column = step * K
    else:
        PARTS: gl.constexpr = RUN // 64
        chunk = step // 2
        column = chunk // PARTS * (2 * RUN) + chunk % PARTS * K + step % 2 * RUN
    full = x_full.index(at % X_STAGES)
    mbarrier.expect(full, T * K * 2)
    load_box(x, [first, column], full, x_ring.index(at % X_STAGES))


@gluon.jit
def _hand_over(
    weights, x, first, step, last, at, rings,
    RUN: gl.constexpr, T: gl.constexpr, W_STAGES: gl.constexpr, X_STAGES: gl.constexpr,
):  # fmt: skip
    """Store the weights of step `at`, pairs [M, K / 2], where those of W_STAGES steps before are over, and ask for
    activations of LEAD steps later, which come where those of that earlier step were. The tile ends before step `last`."""
    _x_ring, w_ring, _x_full, w_full, empty, _tile_over = rings
    LEAD: gl.constexpr = X_STAGES - W_STAGES
    slot = at % W_STAGES
    mbarrier.wait(empty.index(slot), at // W_STAGES & 1 ^ 1)
    if step + LEAD < last:
        _load(x, first, step + LEAD, at + LEAD, rings, RUN, T, X_STAGES)
    w_ring.index(slot)._reinterpret(gl.int32, [M, K // 2], PAIRS).store(weights)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(w_full.index(slot), count=1)


@gluon.jit
def _unpack(
    x, weight, tiles, sizes, code_steps, words, code_rings, rings,
    RUN: gl.constexpr, CODE: gl.constexpr, EXPONENTS: gl.constexpr, GATED: gl.constexpr, T: gl.constexpr,
    W_STAGES: gl.constexpr, X_STAGES: gl.constexpr, AHEAD: gl.constexpr, OWN: gl.constexpr, UNPACKERS: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Unpack every UNPACKERS-th chunk, from chunk OWN on. Chunks are counted across tiles, so that two groups take turns.

    If each tile's first chunk were group 0's, group 1 would fill two chunks less after a tile with an odd number of them, and
    could be two turns of the ring ahead of the consumers. A barrier has one bit for its turn and would let it write there."""
    codes, scales, offsets = weight
    num_items, rows, N, n_tiles, splits, steps, chunks_per_split = sizes
    code_ring, scale_ring, offset_ring = code_rings
    tile_over = rings[5]
    WORDS: gl.constexpr = 2 if RUN == 32 and not EXPONENTS else 1
    OFFSETS: gl.constexpr = offsets is not None
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [4, 1], [1, 0])  # a thread has a weight row
    COPIED: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    lane = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, COPIED)), 0)
    is_right = lane >= 8
    copied_row = gl.arange(0, M, gl.SliceLayout(1, COPIED))
    flat_row = gl.arange(0, M, FLAT)
    chunks = gl.cdiv(steps, 2)
    if PDL and tiles is not None:
        gl.inline_asm_elementwise(AWAIT, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    done = 0  # steps of all tiles before
    chunks_done = 0
    turn_of_tile = 0
    for index in range(gl.program_id(0), num_items, gl.num_programs(0)):
        expert, first, count, tile, split = _item(tiles, index, rows, n_tiles, splits, T)
        if count > 0:
            begin = split * chunks_per_split
            end = gl.minimum(begin + chunks_per_split, chunks)
            last = gl.minimum(2 * end, steps)
            own = (OWN + chunks_done) % UNPACKERS
            row = gl.expand_dims(weight_row(copied_row, tile, N, GATED), 1).to(gl.int64)
            code_rows = codes + row * (RUN // 4) + (lane % 8 if RUN == 32 else lane)
            own_row = weight_row(flat_row, tile, N, GATED).to(gl.int64)
            scale_rows = scales + own_row
            offset_rows = None
            if OFFSETS:
                offset_rows = offsets + own_row
            if tiles is not None:
                code_rows += expert.to(gl.int64) * code_steps * N * (RUN // 4)
                scale_rows += expert.to(gl.int64) * words * N
                if OFFSETS:
                    offset_rows += expert.to(gl.int64) * words * N
            thread_barrier()  # codes of the tile before may still be read
            for ahead in gl.static_range(AHEAD - 1):
                early = begin + own + ahead * UNPACKERS
                if early < end:
                    copy_chunk(
                        code_rows, scale_rows, offset_rows, is_right, early, code_steps, N, code_rings, OWN * AHEAD + ahead,
                        RUN, EXPONENTS, WORDS,
                    )  # fmt: skip
                async_copy.commit_group()
            if PDL and tiles is None:  # nothing before this kernel writes weights
                gl.inline_asm_elementwise(AWAIT, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
            if OWN == 0 and X_STAGES > W_STAGES:
                mbarrier.wait(tile_over, turn_of_tile ^ 1)  # the tile before is over: all places are free
                for step in gl.static_range(X_STAGES - W_STAGES):
                    if 2 * begin + step < last:
                        _load(x, first, 2 * begin + step, done + step, rings, RUN, T, X_STAGES)
            for chunk in range(begin + own, end, UNPACKERS):
                async_copy.wait_group(AHEAD - 2)
                thread_barrier()
                turn = (chunk - begin) // UNPACKERS
                slot = OWN * AHEAD + turn % AHEAD
                following = chunk + (AHEAD - 1) * UNPACKERS
                if following < end:
                    copy_chunk(
                        code_rows, scale_rows, offset_rows, is_right, following, code_steps, N, code_rings,
                        OWN * AHEAD + (turn + AHEAD - 1) % AHEAD, RUN, EXPONENTS, WORDS,
                    )  # fmt: skip
                async_copy.commit_group()
                left = code_ring.index(slot).slice(0, 8, 1).load(ROWS)
                right = code_ring.index(slot).slice(8, 8, 1).load(ROWS)
                word = scale_ring.index(slot * WORDS).load(gl.SliceLayout(1, ROWS))
                if EXPONENTS:
                    right_word = word >> 16
                else:
                    right_word = scale_ring.index(slot * WORDS + WORDS - 1).load(gl.SliceLayout(1, ROWS))
                offset = word
                right_offset = word
                if OFFSETS:
                    offset = offset_ring.index(slot * WORDS).load(gl.SliceLayout(1, ROWS))
                    right_offset = offset_ring.index(slot * WORDS + WORDS - 1).load(gl.SliceLayout(1, ROWS))
                left_low, left_high = weights_of(left, word, offset, CODE, EXPONENTS, OFFSETS)
                right_low, right_high = weights_of(right, right_word, right_offset, CODE, EXPONENTS, OFFSETS)
                if RUN == 32:
                    one = side_by_side(left_low, left_high)
                    other = side_by_side(right_low, right_high)
                else:
                    one = side_by_side(left_low, right_low)
                    other = side_by_side(left_high, right_high)
                at = done + 2 * (chunk - begin)
                _hand_over(one, x, first, 2 * chunk, last, at, rings, RUN, T, W_STAGES, X_STAGES)
                if 2 * chunk + 1 < last:
                    _hand_over(other, x, first, 2 * chunk + 1, last, at + 1, rings, RUN, T, W_STAGES, X_STAGES)
            async_copy.wait_group(0)
            done += last - 2 * begin
            chunks_done += end - begin
            turn_of_tile ^= 1


@gluon.jit
def _product(
    epilogue, out, item, steps_done, steps, sizes, rings,
    HALF: gl.constexpr, GATED: gl.constexpr, ACTIVATION: gl.constexpr, WIDTH: gl.constexpr,
    W_STAGES: gl.constexpr, X_STAGES: gl.constexpr,
):  # fmt: skip
    """Multiply a tile by WIDTH activation rows, and store what comes out."""
    channel, bias, order, factors, alpha, limit = epilogue
    expert, first, count, tile, split = item
    _num_items, rows, N, _n_tiles, _splits, _steps, _chunks_per_split = sizes
    x_ring, w_ring, x_full, w_full, empty, tile_over = rings
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    acc = gl.zeros([M // 2, WIDTH], gl.float32, SUMS)
    for step in range(steps):
        at = steps_done + step
        mbarrier.wait(x_full.index(at % X_STAGES), at // X_STAGES & 1)
        mbarrier.wait(w_full.index(at % W_STAGES), at // W_STAGES & 1)
        weights = w_ring.index(at % W_STAGES).slice(HALF * (M // 2), M // 2)
        columns = x_ring.index(at % X_STAGES).slice(0, WIDTH)
        acc = warpgroup_mma(weights, columns.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index((at + W_STAGES - 1) % W_STAGES), count=1, pred=step > 0)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((steps_done + steps - 1) % W_STAGES), count=1)
    mbarrier.arrive(tile_over, count=1)
    lane = HALF * (M // 2) + gl.arange(0, M // 2, gl.SliceLayout(1, SUMS))
    n = weight_row(lane, tile, N, GATED)
    if channel is not None:
        acc = acc * gl.expand_dims(gl.load(channel + expert * N + n), 1)
    if factors is not None:
        token = gl.arange(0, WIDTH, gl.SliceLayout(0, SUMS))
        pair = gl.load(order + first + token, mask=token < count, other=0)
        acc = acc * gl.expand_dims(gl.load(factors + pair), 0)
    if bias is not None:
        added = gl.load(bias + expert * N + n).to(gl.float32)
        acc = acc + gl.expand_dims(gl.where(split == 0, added, 0.0), 1)
    if GATED:
        gate, up = gl.split(acc.reshape([4, 2, 8, WIDTH]).permute((0, 2, 3, 1)))
        value = activated(gate, up, alpha, limit, ACTIVATION).reshape([32, WIDTH])
        store_results(value, out, tile * (M // 2) + HALF * 32, N // 2, first, count, 32, WIDTH)
    else:
        part = out + split.to(gl.int64) * rows * N
        store_results(acc, part, tile * M + HALF * 64, N, first, count, 64, WIDTH)


@gluon.jit
def _multiply(
    epilogue, out, tiles, sizes, rings,
    HALF: gl.constexpr, GATED: gl.constexpr, ACTIVATION: gl.constexpr, T: gl.constexpr,
    W_STAGES: gl.constexpr, X_STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    num_items, rows, _n, n_tiles, splits, all_steps, chunks_per_split = sizes
    if PDL:
        gl.inline_asm_elementwise(AWAIT, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    done = 0
    for index in range(gl.program_id(0), num_items, gl.num_programs(0)):
        item = _item(tiles, index, rows, n_tiles, splits, T)
        count = item[2]
        if count > 0:
            begin = 2 * item[4] * chunks_per_split
            steps = gl.minimum(begin + 2 * chunks_per_split, all_steps) - begin
            if T == 256 and count > 128:
                _product(
                    epilogue, out, item, done, steps, sizes, rings, HALF, GATED, ACTIVATION, 256, W_STAGES, X_STAGES
                )  # fmt: skip
            elif T >= 128 and count > 64:
                _product(
                    epilogue, out, item, done, steps, sizes, rings, HALF, GATED, ACTIVATION, 128, W_STAGES, X_STAGES
                )  # fmt: skip
            else:
                _product(
                    epilogue, out, item, done, steps, sizes, rings, HALF, GATED, ACTIVATION, 64, W_STAGES, X_STAGES
                )  # fmt: skip
            done += steps


@gluon.jit(do_not_specialize=["rows", "num_items", "splits", "chunks_per_split"])
def unpacking_kernel(
    x,  # a descriptor of [rows, inputs] bf16, in boxes of [T, K]
    codes,  # int32 [experts, code_steps, N, RUN / 4]; see `GroupedWeight` and `PackedWeight`
    scales,  # int32 [experts, words, N]
    offsets,  # int32 [experts, words, N] or None
    channel,  # float32 [experts, N] or None
    bias,  # [experts, N] or None
    tiles,  # of experts: int32 [slots, 4], see `SortedPairs`; None: one weight
    order,  # int32 [rows], read with factors
    factors,  # float32, of pair order[row], or None
    out,  # [rows, N], [rows, N / 2] if GATED, or float32 [splits, rows, N]
    rows,
    num_items,
    N,
    code_steps,
    words,
    splits,
    steps,  # of 64 inputs
    chunks_per_split,  # of two steps
    alpha,
    limit,
    RUN: gl.constexpr,
    CODE: gl.constexpr,
    EXPONENTS: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    T: gl.constexpr,  # activation rows of a tile: 64, 128 or 256
    W_STAGES: gl.constexpr,  # steps whose weights are in shared memory
    X_STAGES: gl.constexpr,  # and whose activations are there or on their way: no fewer
    AHEAD: gl.constexpr,  # chunks of codes of a group of unpackers that are on their way or unpacked
    UNPACKERS: gl.constexpr,  # groups: 1 or 2
    PDL: gl.constexpr,
):
    n_tiles = gl.cdiv(N, M)
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [X_STAGES, T, K], x.layout)
    w_ring = gl.allocate_shared_memory(gl.bfloat16, [W_STAGES, M, K], x.layout)
    WORDS: gl.constexpr = 2 if RUN == 32 and not EXPONENTS else 1
    code_ring = gl.allocate_shared_memory(gl.int32, [UNPACKERS * AHEAD, M, 16], gl.SwizzledSharedLayout(4, 2, 4, [1, 0]))
    scale_ring = gl.allocate_shared_memory(gl.int32, [UNPACKERS * AHEAD * WORDS, M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    HAS_OFFSETS: gl.constexpr = 0 if offsets is None else 1
    offset_words: gl.constexpr = UNPACKERS * AHEAD * WORDS * HAS_OFFSETS + 1 - HAS_OFFSETS
    offset_ring = gl.allocate_shared_memory(gl.int32, [offset_words, M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    x_full = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], bars)
    w_full = gl.allocate_shared_memory(gl.int64, [W_STAGES, 1], bars)
    empty = gl.allocate_shared_memory(gl.int64, [W_STAGES, 1], bars)
    tile_over = gl.allocate_shared_memory(gl.int64, [1], bars)
    mbarrier.init(tile_over, count=2)
    for i in gl.static_range(X_STAGES):
        mbarrier.init(x_full.index(i), count=1)
    for i in gl.static_range(W_STAGES):
        mbarrier.init(w_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    if PDL:
        gl.inline_asm_elementwise(LET_NEXT, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    sizes = (num_items, rows, N, n_tiles, splits, steps, chunks_per_split)
    rings = (x_ring, w_ring, x_full, w_full, empty, tile_over)
    weight = (codes, scales, offsets)
    code_rings = (code_ring, scale_ring, offset_ring)
    epilogue = (channel, bias, order, factors, alpha, limit)
    if UNPACKERS == 1:
        gl.warp_specialize(
            [
                (_multiply, (epilogue, out, tiles, sizes, rings, 0, GATED, ACTIVATION, T, W_STAGES, X_STAGES, PDL)),
                (_multiply, (epilogue, out, tiles, sizes, rings, 1, GATED, ACTIVATION, T, W_STAGES, X_STAGES, PDL)),
                (_unpack, (x, weight, tiles, sizes, code_steps, words, code_rings, rings,
                           RUN, CODE, EXPONENTS, GATED, T, W_STAGES, X_STAGES, AHEAD, 0, 1, PDL)),
            ],
            [4, 4],
            [184, 136],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (epilogue, out, tiles, sizes, rings, 0, GATED, ACTIVATION, T, W_STAGES, X_STAGES, PDL)),
                (_multiply, (epilogue, out, tiles, sizes, rings, 1, GATED, ACTIVATION, T, W_STAGES, X_STAGES, PDL)),
                (_unpack, (x, weight, tiles, sizes, code_steps, words, code_rings, rings,
                           RUN, CODE, EXPONENTS, GATED, T, W_STAGES, X_STAGES, AHEAD, 0, 2, PDL)),
                (_unpack, (x, weight, tiles, sizes, code_steps, words, code_rings, rings,
                           RUN, CODE, EXPONENTS, GATED, T, W_STAGES, X_STAGES, AHEAD, 1, 2, PDL)),
            ],
            [4, 4, 4],
            [128, 128, 128],
        )  # fmt: skip
