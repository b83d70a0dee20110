"""The inner loop of paged attention: key tiles of one row, one KV head, online softmax.

KV of 8 bits is read as pairs of numbers in 16-bit words, which keeps transposed loads of V from shared memory possible; the
halves become two dots of half the width.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false, reportOperatorIssue=false
from __future__ import annotations

import triton
import triton.language as tl

_UNPACK = tl.constexpr(
    """{
    .reg .b32 apart;
    .reg .b16 even, odd;
    prmt.b32 apart, $2, 0, 0x3120;
    mov.b32 {even, odd}, apart;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
    }"""
)


@triton.jit
def _unpack(pairs, ASSEMBLY: tl.constexpr):
    """int16 of two float8_e4m3fn each → the lower and the upper ones as float16."""
    if ASSEMBLY:
        even, odd = tl.inline_asm_elementwise(_UNPACK, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)
    else:
        even = (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        odd = ((pairs >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return even, odd


@triton.jit
def seen_keys(tile, low, end, TILE: tl.constexpr, LIMITED: tl.constexpr):
    """The keys of a tile. Those past the end are read as the last key, which is finite, and those before `low` as that one;
    the scores hide them: no load of K or V needs a mask."""
    keys = tl.minimum(tile * TILE + tl.arange(0, TILE), end - 1)
    if LIMITED:
        keys = tl.maximum(keys, low)
    return keys


@triton.jit
def load_blocks(ids, tile, low, end, real, BLOCK_SHIFT: tl.constexpr, TILE: tl.constexpr, LIMITED: tl.constexpr):
    """Which block each key of a tile is in. Nothing is read if not `real`."""
    keys = seen_keys(tile, low, end, TILE, LIMITED)
    return tl.load(ids + (keys >> BLOCK_SHIFT), mask=tl.broadcast_to(real, TILE), other=0)


@triton.jit
def attend_tiles(
    q,
    q_odd,
    acc,
    acc_odd,
    top,
    total,
    bases,
    ids,
    block,
    first,
    last,
    low,
    end,
    position,
    first_key,
    factor,
    cap,
    TOKEN_STRIDE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_SHIFT: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KV8: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    SWAP: tl.constexpr,
    LAZY: tl.constexpr,
    MASKED: tl.constexpr,
    LIMITED: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Key tiles [first, last). q: [BLOCK_M, BLOCK_D]; acc alike, float32; top: [BLOCK_M]; total alike, or with LAZY one for
    each key of a tile, to be added up once at the end. SWAP: acc and a lazy total are transposed.
    block: `load_blocks` of the first tile; returned for the last. LIMITED: queries see no key before first_key: [BLOCK_M], and
    none is read before `low`. CAPPED: factor makes exponents of 2 for tanh, and capped scores are multiplied by `cap`."""
    tokens = tl.arange(0, TILE)
    d = tl.arange(0, BLOCK_D)
    for tile in range(first, last):
        keys = seen_keys(tile, low, end, TILE, LIMITED)
        places = bases + (block.to(tl.int64) * BLOCK_STRIDE + (keys & ((1 << BLOCK_SHIFT) - 1)) * TOKEN_STRIDE)[:, None]
        places += d[None, :]
        # those of the next tile: K and V are then one load deep, which the pipeliner needs to fetch them stages ahead
        keys = seen_keys(tile + 1, low, end, TILE, LIMITED)
        block = tl.load(ids + (keys >> BLOCK_SHIFT))
        if WIDTH < BLOCK_D:
            shown = tl.broadcast_to((d < WIDTH)[None, :], TILE, BLOCK_D)
            k = tl.load(places, mask=shown, other=0)
            v = tl.load(places + (TOKEN_STRIDE << BLOCK_SHIFT), mask=shown, other=0)
        else:
            k = tl.load(places)
            v = tl.load(places + (TOKEN_STRIDE << BLOCK_SHIFT))
        key = tile * TILE + tokens
        if SWAP:
            scores = tl.dot(k, tl.trans(q), input_precision="ieee")
            if CAPPED:
                scores = cap - 2 * cap / (tl.exp2(scores * factor) + 1)
            if MASKED:
                scores = tl.where(key[:, None] <= position[None, :], scores, float("-inf"))
            if LIMITED:
                scores = tl.where(key[:, None] >= first_key[None, :], scores, float("-inf"))
            slope = 1.0 if CAPPED else factor
            higher = tl.maximum(top, tl.max(scores, 0) * slope)
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(scores * slope - safe[None, :])
            fade = tl.exp2(top - safe)
            total = total * fade[None, :] + weights if LAZY else total * fade + tl.sum(weights, 0)
            acc = tl.dot(tl.trans(v), weights.to(v.dtype), acc * fade[None, :], input_precision="ieee")
        else:
            if KV8:
                k_even, k_odd = _unpack(tl.trans(k), ASSEMBLY)
                scores = tl.dot(q, k_even)
                scores = tl.dot(q_odd, k_odd, scores)
            else:
                scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            if CAPPED:
                scores = cap - 2 * cap / (tl.exp2(scores * factor) + 1)
            if MASKED:
                scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
            if LIMITED:
                scores = tl.where(key[None, :] >= first_key[:, None], scores, float("-inf"))
            slope = 1.0 if CAPPED else factor
            higher = tl.maximum(top, tl.max(scores, 1) * slope)
            safe = tl.where(higher == float("-inf"), 0.0, higher) if MASKED or LIMITED else higher
            weights = tl.exp2(scores * slope - safe[:, None])
            fade = tl.exp2(top - safe)
            total = total * fade[:, None] + weights if LAZY else total * fade + tl.sum(weights, 1)
            if KV8:
                v_even, v_odd = _unpack(v, ASSEMBLY)
                weights = weights.to(tl.float16)
                acc = tl.dot(weights, v_even, acc * fade[:, None])
                acc_odd = tl.dot(weights, v_odd, acc_odd * fade[:, None])
            else:
                acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        top = higher
    return acc, acc_odd, top, total, block


@triton.jit
def prefetch_tiles(
    pool,
    block_ids,
    item,
    head,
    layer,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SHIFT: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    low,
    LIMITED: tl.constexpr,
):
    """Ask the L2 cache for the first TILES tiles of an item. What was prefetched is coherent: no need to wait for writers."""
    LINE: tl.constexpr = 1024 // pool.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = triton.next_power_of_2(triton.cdiv(WIDTH, LINE))
    TOKEN_STRIDE: tl.constexpr = KV_HEADS * WIDTH
    bases = pool + (layer.to(tl.int64) * (TOKEN_STRIDE << (BLOCK_SHIFT + 1)) + head * WIDTH)
    elements = tl.minimum(tl.arange(0, LINES) * LINE, WIDTH - 1)
    end = item[2] + item[1]
    for tile in range(item[4], item[4] + tl.minimum(item[5], TILES)):
        keys = seen_keys(tile, low, end, TILE, LIMITED)
        block = tl.load(block_ids + item[3] + (keys >> BLOCK_SHIFT)).to(tl.int64)
        rows = bases + block * BLOCK_STRIDE + (keys & ((1 << BLOCK_SHIFT) - 1)) * TOKEN_STRIDE
        places = rows[:, None] + elements[None, :]
        _prefetch(places)
        _prefetch(places + (TOKEN_STRIDE << BLOCK_SHIFT))


@triton.jit
def _prefetch(places):
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1
    )
