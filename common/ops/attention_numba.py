"""Attention of a step on a CPU in one call a layer: QK norm, rotation, the write into the pool, and softmax over paged KV.

For the 8-bit engine, where every call of a library would cost as much as what it does. KV is bfloat16, which halves what a step
reads; everything else is float32. A query is computed by itself, over its keys from position 0 on: its bits don't depend on the
batch, on chunks or on whether it was guessed before.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportPrivateImportUsage=false
from __future__ import annotations

import math
from functools import cache
from typing import Any

import numba
import numpy as np

from common.ops.address_numba import address
from common.ops.compiled_numba import REASSOCIATING, compiled
from common.ops.vectors_numba import add_weighted, dot_products


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
def _softmax(scores, bits, weights):
    """scores: float32 [keys], in base 2. weights: 2^(score - highest). Returns their sum. 2^f by its Taylor series."""
    highest = scores[0]
    for i in range(len(scores)):
        highest = max(highest, scores[i])
    for i in range(len(scores)):
        power = max(scores[i] - highest, np.float32(-126))
        whole = np.rint(power)
        f = (power - whole) * np.float32(0.6931471805599453)
        series = np.float32(1 / 720) * f + np.float32(1 / 120)
        series = series * f + np.float32(1 / 24)
        series = series * f + np.float32(1 / 6)
        series = series * f + np.float32(0.5)
        series = series * f + np.float32(1)
        weights[i] = series * f + np.float32(1)
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


@cache
def attention(size: int, group: int) -> Any:
    """The kernel for heads of `size`, `group` of which share a KV head; both are compiled in."""
    vectors = -(-size // 16)
    together = max(
        heads for heads in range(1, group + 1) if group % heads == 0 and (heads == 1 or heads * vectors <= _REGISTERS)
    )

    @compiled()
    def attend(qkv, heads, q_norm, k_norm, eps, angles, pool, layer, positions, rows, blocks, block_starts, scale, out):
        """qkv: float32 [≥ tokens, heads + 2 · kv_heads, size], Q and K changed in place. angles: float32 [positions, size].
        pool: bfloat16 as int16 [num_blocks, layers, 2, block_tokens, kv_heads, size]. positions, rows: int64 [tokens], of each
        token; row r's blocks are blocks[block_starts[r]:], int64. out: float32 [≥ tokens, heads, size]; the rest stays."""
        layers, _, block_tokens, kv_heads, _ = pool.shape[1:]
        tokens, entry = len(positions), kv_heads * size
        bits_of = qkv.view(np.int32)
        longest = 0
        for token in range(tokens):
            position = positions[token]
            longest = max(longest, position + 1)
            for head in range(heads + kv_heads):
                _rotate(qkv[token, head], q_norm if head < heads else k_norm, eps, angles[position])
            place = pool[blocks[block_starts[rows[token]] + position // block_tokens], layer]
            for head in range(kv_heads):
                _narrow(bits_of[token, heads + head], place[0, position % block_tokens, head])
                _narrow(bits_of[token, heads + kv_heads + head], place[1, position % block_tokens, head])
        out[:tokens] = 0
        scores = np.empty((group, longest), np.float32)
        weights, bits = np.empty((group, longest), np.float32), np.empty(longest, np.int32)
        totals = np.empty(group, np.float32)
        factor = np.float32(scale * 1.4426950408889634)
        width = (heads + 2 * kv_heads) * size
        for token in range(tokens):
            keys = positions[token] + 1
            first = block_starts[rows[token]]
            for kv_head in range(kv_heads):
                query = token * width + kv_head * group * size
                for begin in range(0, keys, block_tokens):
                    block = blocks[first + begin // block_tokens]
                    held = address(pool, (block * layers + layer) * 2 * block_tokens * entry + kv_head * size)
                    count = min(block_tokens, keys - begin)
                    for member in range(0, group, together):
                        place = address(scores, member * longest + begin)
                        queries = address(qkv, query + member * size)
                        dot_products(size, together, queries, held, entry, factor, place, longest, count)
                place = (token * heads + kv_head * group) * size
                for member in range(group):
                    totals[member] = _softmax(scores[member, :keys], bits[:keys], weights[member, :keys])
                for begin in range(0, keys, block_tokens):
                    block = blocks[first + begin // block_tokens]
                    held = address(pool, ((block * layers + layer) * 2 + 1) * block_tokens * entry + kv_head * size)
                    count = min(block_tokens, keys - begin)
                    for member in range(0, group, together):
                        sums, shares = address(out, place + member * size), address(weights, member * longest + begin)
                        add_weighted(size, together, sums, held, entry, shares, longest, count)
                for member in range(group):
                    sums = numba.carray(address(out, place + member * size), (size,))
                    for i in range(size):
                        sums[i] /= totals[member]

    return attend
