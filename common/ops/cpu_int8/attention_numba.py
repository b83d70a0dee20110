"""Attention of the 8-bit engine on a CPU: QK norm, rotation and the write into the pool; then softmax over paged KV.

KV is bfloat16, which halves what a step reads; everything else is float32. A query is computed by itself, over its keys from
position 0 on: its bits don't depend on the batch, on chunks or on whether it was guessed before. Kernels are parts of
`forward_numba`.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false
from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.ops.cpu_int8.address_numba import address, prefetch
from common.ops.cpu_int8.compiled_numba import REASSOCIATING, compiled
from common.ops.cpu_int8.powers_numba import power_of_two
from common.ops.cpu_int8.vectors_numba import add_weighted, dot_products


class Step(NamedTuple):
    """Where a step's tokens are. positions, rows: int64 [tokens], of each token; blocks: int64, those of row r from
    block_starts[r] on. pool: bfloat16 as int16 [num_blocks, layers, 2, block_tokens, kv_heads, size]. rope: float32
    [positions, size], cosines, then sines. rotated: [layers], whether Q and K are turned by their positions; those of other
    layers are turned by the last row of `rope`, an angle of 0."""

    positions: NDArray[np.int64]
    rows: NDArray[np.int64]
    blocks: NDArray[np.int64]
    block_starts: NDArray[np.int64]
    pool: NDArray[np.int16]
    rope: NDArray[np.float32]
    rotated: NDArray[np.bool_]


@compiled(fastmath=REASSOCIATING)
def _rotate(head, norm, eps, angles):
    """head: float32 [size], changed in place: normalised by `norm` [size or 0], then rotated, half against half. angles:
    [size], cosines and sines."""
    size = len(head)
    half = size // 2
    if len(norm):
        total = np.float32(0)
        for i in range(size):
            total += head[i] * head[i]
        factor = np.float32(1) / np.float32(math.sqrt(total / np.float32(size) + np.float32(eps)))
        for i in range(size):
            head[i] = head[i] * factor * norm[i]
    for i in range(half):
        first, second = head[i], head[half + i]
        head[i] = first * angles[i] - second * angles[half + i]
        head[half + i] = second * angles[i] + first * angles[half + i]


@compiled(fastmath=REASSOCIATING)
def softmax(scores, bits, weights):
    """scores: float32 [keys], in base 2. weights: 2^(score - highest). Returns their sum."""
    highest = scores[0]
    for i in range(len(scores)):
        highest = max(highest, scores[i])
    for i in range(len(scores)):
        power = max(scores[i] - highest, np.float32(-126))
        whole = np.rint(power)
        weights[i] = power_of_two(power - whole)
        bits[i] = (np.int32(whole) + np.int32(127)) << np.int32(23)
    powers = bits.view(np.float32)
    total = np.float32(0)
    for i in range(len(scores)):
        weights[i] *= powers[i]
        total += weights[i]
    return total


@compiled()
def _narrow(bits, out):
    """bits: float32 as int32 [size]. out: int16, the nearest bfloat16, ties to even."""
    for i in range(len(bits)):
        out[i] = np.int16((bits[i] + np.int32(0x7FFF) + ((bits[i] >> np.int32(16)) & np.int32(1))) >> np.int32(16))


_REGISTERS = 20
"""Vectors of 16 numbers that queries, or sums, of heads computed together may take, of AVX-512's 32."""


@compiled()
def place_kv(token, step, heads, q_norm, k_norm, layer, eps, angles, qkv):
    """Rotates Q and K of `token` in place by `angles` [size], and writes its K and V into the pool. step: a `Step`.

    qkv: float32 [tokens, (heads + 2 · kv_heads) · size or more]. q_norm, k_norm: [size], or [0]."""
    pool, position = step.pool, step.positions[token]
    _, _, _, block_tokens, kv_heads, size = pool.shape
    mine = qkv[token, : (heads + 2 * kv_heads) * size].reshape(-1, size)
    for head in range(heads + kv_heads):
        _rotate(mine[head], q_norm if head < heads else k_norm, eps, angles)
    place = pool[step.blocks[step.block_starts[step.rows[token]] + position // block_tokens], layer]
    bits = mine.view(np.int32)
    for head in range(kv_heads):
        _narrow(bits[heads + head], place[0, position % block_tokens, head])
        _narrow(bits[heads + kv_heads + head], place[1, position % block_tokens, head])


@compiled()
def write_kv(token, step, heads, q_norms, k_norms, layer, eps, qkv):
    """`place_kv` by the rotation of the token's position. q_norms, k_norms: [layers, size], or [layers, 0]."""
    at = step.positions[token] if step.rotated[layer] else len(step.rope) - 1
    place_kv(token, step, heads, q_norms[layer], k_norms[layer], layer, eps, step.rope[at], qkv)


@compiled()
def _enter(pool, starts, at, keys, whole):
    """(First key, number of keys) of a sequence's block `at`. whole: every head of it is read here, so the cache is asked for
    the block behind it, too: blocks lie anywhere, and a CPU sees no pattern."""
    _, _, _, block_tokens, kv_heads, size = pool.shape
    begin = at * block_tokens
    left = keys - begin - block_tokens
    if whole and left > 0:
        for offset in range(0, min(block_tokens, left) * kv_heads * size, 32):
            prefetch(address(pool, starts[at + 1] + offset))
    return begin, min(block_tokens, keys - begin)


@cache
def attention(size: int, group: int) -> Any:
    """The kernel for heads of `size`, `group` of which share a KV head; both are compiled in."""
    vectors = -(-size // 16)
    together = max(
        heads for heads in range(1, group + 1) if group % heads == 0 and (heads == 1 or heads * vectors <= _REGISTERS)
    )

    @compiled()
    def attend(part, splits, step, wanted, layer, scale, qkv, out):
        """part: splits · an index into `wanted` (int64, indices of tokens) + one of `splits` equal shares of its KV heads.
        out: float32 [≥ wanted, ≥ heads · size], a row for each. qkv: see `write_kv`; every key that a token sees is in the
        pool."""
        pool = step.pool
        _, layers, _, block_tokens, kv_heads, _ = pool.shape
        entry = kv_heads * size
        index, share = divmod(part, splits)
        first_head, heads = share * kv_heads // splits, group * kv_heads // splits
        token = wanted[index]
        keys = step.positions[token] + 1
        num_blocks = -(-keys // block_tokens)
        table = step.block_starts[step.rows[token]]
        starts = np.empty(num_blocks, np.int64)
        for at in range(num_blocks):
            starts[at] = (step.blocks[table + at] * layers + layer) * 2 * block_tokens * entry
        scores, weights = np.empty((heads, keys), np.float32), np.empty((heads, keys), np.float32)
        bits, totals = np.empty(keys, np.int32), np.empty(heads, np.float32)
        factor = np.float32(scale * 1.4426950408889634)
        query = token * qkv.shape[1] + first_head * group * size
        for at in range(num_blocks):
            begin, count = _enter(pool, starts, at, keys, splits == 1)
            for head in range(0, heads, together):
                vectors = address(pool, starts[at] + (first_head + head // group) * size)
                products = address(scores, head * keys + begin)
                dot_products(size, together, address(qkv, query + head * size), vectors, entry, factor, products, keys, count)
        for head in range(heads):
            totals[head] = softmax(scores[head], bits, weights[head])
        sums = out[index, first_head * group * size :]
        sums[: heads * size] = 0
        starts += block_tokens * entry  # V's are behind K's
        for at in range(num_blocks):
            begin, count = _enter(pool, starts, at, keys, splits == 1)
            for head in range(0, heads, together):
                vectors = address(pool, starts[at] + (first_head + head // group) * size)
                shares = address(weights, head * keys + begin)
                add_weighted(size, together, address(sums, head * size), vectors, entry, shares, keys, count)
        for head in range(heads):
            for i in range(head * size, (head + 1) * size):
                sums[i] /= totals[head]

    return attend
