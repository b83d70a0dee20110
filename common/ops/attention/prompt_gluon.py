"""Causal attention of prompts on Hopper: one warp group loads, two multiply, and a softmax runs beside products.

    loads       K₀ Q │ K₁ V₀ │ K₂ V₁ │ … │ Vₙ          by the bulk-copy engine, into rings of shared memory
    consumer 0  Q·K₀  softmax  Q·K₁ P·V₀ softmax  …     queries 0 to 63 of a tile
    consumer 1     Q·K₀  softmax  Q·K₁ P·V₀ softmax     queries 64 to 127: multiplies while the other takes its softmax

The order of work within and between warp groups is FlashAttention-3's (arXiv 2407.08608). Key tiles go from the last to the
first, so that masked ones are at the ends of the loop. A program stays on its multiprocessor and goes through a list of tiles,
the longest first, so that the loads of a tile begin while the one before ends.

Written in Gluon, which Triton's interpreter does not run: `prompt.py` has the call and its reference. Tests compile it and read
its machine code; those that compare its results are marked `gpu`.
"""

# pyright: basic, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from common.ops.hopper_gluon import load_box

WORDS = gl.constexpr(4)
"""Of a tile in the list."""


@gluon.jit
def _item(tiles, turn, num_items, window, HEADS: gl.constexpr, N: gl.constexpr):
    """The program's tile in a turn, and its first and last key tile. Every other turn runs backwards, so that the longest tile
    of one is followed by the shortest of the next."""
    programs = gl.num_programs(0)
    place = gl.program_id(0)
    index = turn * programs + gl.where(turn % 2 == 0, place, programs - 1 - place)
    here = index < num_items
    tile = tiles + (index // HEADS) * WORDS
    first = gl.load(tile, mask=here, other=0)
    queries = gl.load(tile + 1, mask=here, other=0)
    first_key = gl.load(tile + 2, mask=here, other=0)
    position = gl.load(tile + 3, mask=here, other=0)
    lowest = gl.where(window > 0, gl.maximum(position - window + 1, 0) // N, 0)
    return here, first, queries, first_key, position, index % HEADS, lowest, (position + queries - 1) // N


@gluon.jit
def _load(
    query,
    key,
    value,
    tiles,
    num_items,
    window,
    q,
    k,
    v,
    q_full,
    q_empty,
    k_full,
    k_empty,
    v_full,
    v_empty,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    M: gl.constexpr,
    N: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
):
    done = 0  # key tiles of all turns before
    for turn in range(gl.cdiv(num_items, gl.num_programs(0))):
        here, first, _queries, first_key, _position, head, lowest, last = _item(tiles, turn, num_items, window, HEADS, N)
        if here:
            count = last - lowest + 1
            column = head // GROUP * D
            for i in range(count + 1):
                if i < count:
                    slot = (done + i) % STAGES
                    mbarrier.wait(k_empty.index(slot), (done + i) // STAGES & 1 ^ 1)
                    mbarrier.expect(k_full.index(slot), N * D * 2)
                    row = first_key + (last - i) * N
                    load_box(key, [row, column], k_full.index(slot), k.index(slot))
                if i == 0:
                    for half in gl.static_range(2):
                        mbarrier.wait(q_empty.index(half), (turn & 1) ^ 1)
                        mbarrier.expect(q_full.index(half), M * D * 2)
                        row = first + half * M
                        load_box(query, [row, head * D], q_full.index(half), q.index(half))
                else:
                    slot = (done + i - 1) % STAGES
                    mbarrier.wait(v_empty.index(slot), (done + i - 1) // STAGES & 1 ^ 1)
                    mbarrier.expect(v_full.index(slot), N * D * 2)
                    row = first_key + (last - i + 1) * N
                    load_box(value, [row, column], v_full.index(slot), v.index(slot))
            done += count


@gluon.jit
def _visible(tile, position, window, M: gl.constexpr, N: gl.constexpr, WINDOWED: gl.constexpr, SCORES: gl.constexpr):
    """Which scores of a key tile count, for queries from `position` on: [M, N]."""
    keys = gl.expand_dims(tile * N + gl.arange(0, N, gl.SliceLayout(0, SCORES)), 0)
    queries = gl.expand_dims(position + gl.arange(0, M, gl.SliceLayout(1, SCORES)), 1)
    seen = keys <= queries
    if WINDOWED:
        seen = seen & (keys > queries - window)
    return seen


@gluon.jit
def _softmax(scores, top, scale, IS_MASKED: gl.constexpr, visible):
    """Weights of `scores`, their row sums, the new maximum, and the factor of what was weighted before it."""
    if IS_MASKED:
        scores = gl.where(visible, scores, float("-inf"))
    highest = gl.maximum(top, gl.max(scores, 1) * scale)
    base = highest
    if IS_MASKED:
        base = gl.where(highest == float("-inf"), 0.0, highest)  # a query that sees no key of these tiles
    weights = gl.exp2(scores * scale - gl.expand_dims(base, 1))
    return weights, gl.sum(weights, 1), highest, gl.exp2(top - base)


@gluon.jit
def _step(
    own_q,
    k,
    v,
    k_full,
    k_empty,
    v_full,
    v_empty,
    passed,
    passed_phase,
    turns,
    acc,
    weights,
    top,
    total,
    scale,
    at,
    tile,
    position,
    window,
    HALF: gl.constexpr,
    IS_MASKED: gl.constexpr,
    WINDOWED: gl.constexpr,
    M: gl.constexpr,
    N: gl.constexpr,
    STAGES: gl.constexpr,
    SCORES: gl.constexpr,
    SUMS: gl.constexpr,
):
    """Scores of key tile `tile`, number `at` of all loaded, while the weights of the one before are multiplied.

    passed, passed_phase: a barrier that is over for as long as the loop runs.
    """
    slot = at % STAGES
    before = (at - 1) % STAGES
    # Not at the end of the step before: 16-bit numbers that a loop carries take a register each, and are packed anew.
    operand = gl.convert_layout(weights.to(own_q.dtype), gl.DotOperandLayout(0, SUMS, 2))
    mbarrier.wait(k_full.index(slot), at // STAGES & 1)
    mbarrier.wait(turns.index(HALF), (at & 1) ^ (1 - HALF))
    nothing = gl.zeros([M, N], gl.float32, SCORES)
    scores = warpgroup_mma(own_q, k.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), (at - 1) // STAGES & 1)
    acc = warpgroup_mma(operand, v.index(before), acc, is_async=True)
    mbarrier.arrive(turns.index(1 - HALF), count=1)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(k_empty.index(slot), count=1)
    visible = True
    if IS_MASKED:
        visible = _visible(tile, position, window, M, N, WINDOWED, SCORES)
    weights, sums, top, factor = _softmax(scores, top, scale, IS_MASKED, visible)
    total = total * factor + sums
    # Ends a block of instructions: the assembler moves the softmax behind the next wait otherwise, and nothing overlaps.
    mbarrier.wait(passed, passed_phase)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_empty.index(before), count=1)
    acc = acc * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, SUMS)), 1)
    return acc, weights, top, total


@gluon.jit
def _multiply(
    output,
    tiles,
    sinks,
    num_items,
    window,
    scale,
    stride,
    q,
    k,
    v,
    q_full,
    q_empty,
    k_full,
    k_empty,
    v_full,
    v_empty,
    turns,
    HALF: gl.constexpr,
    HEADS: gl.constexpr,
    WINDOWED: gl.constexpr,
    SINKS: gl.constexpr,
    M: gl.constexpr,
    N: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
):
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    own_q = q.index(HALF)
    dtype: gl.constexpr = q.dtype
    done = 0
    for turn in range(gl.cdiv(num_items, gl.num_programs(0))):
        here, first, queries, _first_key, position, head, lowest, last = _item(tiles, turn, num_items, window, HEADS, N)
        if here:
            own = position + HALF * M
            slot = done % STAGES
            passed = q_full.index(HALF)
            mbarrier.wait(k_full.index(slot), done // STAGES & 1)
            mbarrier.wait(passed, turn & 1)
            mbarrier.wait(turns.index(HALF), (done & 1) ^ (1 - HALF))
            nothing = gl.zeros([M, N], gl.float32, SCORES)
            scores = warpgroup_mma(own_q, k.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
            mbarrier.arrive(turns.index(1 - HALF), count=1)
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(k_empty.index(slot), count=1)
            visible = _visible(last, own, window, M, N, WINDOWED, SCORES)
            lowest_top = gl.full([M], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
            weights, total, top, _factor = _softmax(scores, lowest_top, scale, True, visible)
            acc = gl.zeros([M, D], gl.float32, SUMS)
            # key tiles [whole, masked) are seen whole by all queries of this half
            masked = gl.maximum((own + 1) // N, lowest)
            whole = lowest
            if WINDOWED:
                whole = gl.maximum(gl.cdiv(gl.maximum(own + M - window, 0), N), lowest)
            begin_whole = gl.maximum(1, last - masked + 1)
            end_whole = gl.maximum(begin_whole, last - whole + 1)
            for i in range(1, begin_whole):
                acc, weights, top, total = _step(
                    own_q, k, v, k_full, k_empty, v_full, v_empty, passed, turn & 1, turns, acc, weights, top, total, scale,
                    done + i, last - i, own, window, HALF, True, WINDOWED, M, N, STAGES, SCORES, SUMS,
                )  # fmt: skip
            for i in range(begin_whole, end_whole):
                acc, weights, top, total = _step(
                    own_q, k, v, k_full, k_empty, v_full, v_empty, passed, turn & 1, turns, acc, weights, top, total, scale,
                    done + i, last - i, own, window, HALF, False, WINDOWED, M, N, STAGES, SCORES, SUMS,
                )  # fmt: skip
            if WINDOWED:
                for i in range(end_whole, last - lowest + 1):
                    acc, weights, top, total = _step(
                        own_q, k, v, k_full, k_empty, v_full, v_empty, passed, turn & 1, turns, acc, weights, top, total, scale,
                        done + i, last - i, own, window, HALF, True, WINDOWED, M, N, STAGES, SCORES, SUMS,
                    )  # fmt: skip
            done += last - lowest + 1
            mbarrier.arrive(q_empty.index(HALF), count=1)
            slot = (done - 1) % STAGES
            mbarrier.wait(v_full.index(slot), (done - 1) // STAGES & 1)
            operand = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, SUMS, 2))
            acc = warpgroup_mma(operand, v.index(slot), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(v_empty.index(slot), count=1)
            if SINKS:
                total += gl.exp2(gl.load(sinks + head) * 1.4426950408889634 - top)
            acc = acc / gl.expand_dims(gl.convert_layout(total, gl.SliceLayout(1, SUMS)), 1)
            rows = gl.arange(0, M, gl.SliceLayout(1, SUMS)) + HALF * M
            columns = gl.arange(0, D, gl.SliceLayout(0, SUMS)) + head * D
            places = gl.expand_dims((first + rows).to(gl.int64) * stride, 1) + gl.expand_dims(columns, 0)
            gl.store(output + places, acc.to(dtype), mask=gl.expand_dims(rows < queries, 1))


@gluon.jit(do_not_specialize=["num_items", "window"])
def prompt_kernel(
    query,
    key,
    value,
    output,
    tiles,
    sinks,
    num_items,
    window,
    scale,
    stride,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    WINDOWED: gl.constexpr,
    SINKS: gl.constexpr,
    N: gl.constexpr,
    D: gl.constexpr,
    STAGES: gl.constexpr,
):
    """query: a descriptor of [tokens, heads · D] in blocks of 64 rows; key, value: of [keys, kv_heads · D] in blocks of N.

    output: [tokens, heads · D], rows `stride` apart. tiles: int32 [tiles, WORDS]: first token, queries (1 to 128), row of the
    first key, position of the first token among the keys. sinks: see `AttentionForm`. num_items: tiles · heads. window: see
    `AttentionForm`. scale: of scores, times log₂e.
    """
    M: gl.constexpr = 64
    q = gl.allocate_shared_memory(query.dtype, [2, M, D], query.layout)
    k = gl.allocate_shared_memory(key.dtype, [STAGES, N, D], key.layout)
    v = gl.allocate_shared_memory(value.dtype, [STAGES, N, D], value.layout)
    bars: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], bars)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], bars)  # whose products come next
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], bars)
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
        mbarrier.init(turns.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    gl.warp_specialize(
        [
            (_multiply, (output, tiles, sinks, num_items, window, scale, stride, q, k, v, q_full, q_empty, k_full, k_empty,
                         v_full, v_empty, turns, 0, HEADS, WINDOWED, SINKS, M, N, D, STAGES)),
            (_multiply, (output, tiles, sinks, num_items, window, scale, stride, q, k, v, q_full, q_empty, k_full, k_empty,
                         v_full, v_empty, turns, 1, HEADS, WINDOWED, SINKS, M, N, D, STAGES)),
            (_load, (query, key, value, tiles, num_items, window, q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                     HEADS, GROUP, M, N, D, STAGES)),
        ],
        [4, 4],
        [240, 24],
    )  # fmt: skip
