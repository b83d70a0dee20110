"""The compiled loops of `host_loops`, which documents their results. They have no library calls and no branches, so LLVM
vectorises them."""

# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

import numpy as np

from common.ops.cpu_int8.compiled_numba import compiled
from common.ops.sampling.nucleus import COEFFICIENTS, LN2_HIGH, LN2_LOW, LOG2E, LOWEST, MASS_BITS
from common.ops.sampling.philox import MULTIPLIERS, ROUNDS, WEYL

_CHUNK = 1024
"""Tokens per pass: intermediate results stay in the first-level cache, and a sum of their masses is exact in a float64."""

_QUADS = _CHUNK // 4

_M0, _M1 = map(np.uint64, MULTIPLIERS)
_W0, _W1 = map(np.uint32, WEYL)
_HALF = np.uint64(32)
_C0, _C1, _C2, _C3, _C4, _C5 = map(np.float32, COEFFICIENTS)
_LOWEST, _LOG2E, _LN2_HIGH, _LN2_LOW = map(np.float32, (LOWEST, LOG2E, LN2_HIGH, LN2_LOW))
_ONE, _ROUNDING, _WHOLE = np.float32(1), np.float32(0.5), np.float32(2.0**MASS_BITS)
_LN2 = np.float32(0.6931471805599453)


@compiled()
def _round(a, b, c, d, low, high):
    """Return the counter behind one of Philox's rounds. All are 32 bits wide."""
    first, second = np.uint64(a) * _M0, np.uint64(c) * _M1
    return np.uint32(second >> _HALF) ^ b ^ low, np.uint32(second), np.uint32(first >> _HALF) ^ d ^ high, np.uint32(first)


@compiled()
def _philox(quads, count, position, low, high, words):
    """Write the words of the first `count` of `quads`, uint32, into words: uint32 [4, ≥ count]."""
    for i in range(count):
        a, b, c, d = quads[i], position, np.uint32(0), np.uint32(0)
        key_low, key_high = low, high
        for _ in range(ROUNDS):
            a, b, c, d = _round(a, b, c, d, key_low, key_high)
            key_low, key_high = np.uint32(key_low + _W0), np.uint32(key_high + _W1)
        words[0, i], words[1, i], words[2, i], words[3, i] = a, b, c, d


@compiled(kept=True)
def words_of_tokens(low, high, position, tokens, found):
    """found: uint32 [tokens]."""
    quads, words = np.empty(_QUADS, np.uint32), np.empty((4, _QUADS), np.uint32)
    for start in range(0, len(tokens), _QUADS):
        count = min(_QUADS, len(tokens) - start)
        for i in range(count):
            quads[i] = np.uint32(tokens[start + i] >> 2)
        _philox(quads, count, position, low, high, words)
        for i in range(count):
            found[start + i] = words[tokens[start + i] & 3, i]


@compiled()
def _half_complement(word):
    """Half of 2^32 - 1 - word, as a float32 whose exponent is that of the half's largest power of two, or one below for 0."""
    return np.float32(np.int32(np.uint32(~word) >> np.uint32(1))) + np.float32(0.25)


@compiled(kept=True)
def flag_contenders(low, high, position, scaled, least, lowest, flags):
    """flags: bool [tokens]. least: of a score plus -log(v), where v is (2^32 - 1/2 - word) / 2^32; lowest: of a score.

    -log(v) is rounded up to a multiple of log(2): the exponent of v is all that is looked at.
    """
    quads, words = np.empty(_QUADS, np.uint32), np.empty((4, _QUADS), np.uint32)
    halves = np.empty(_CHUNK, np.float32)
    bits = halves.view(np.int32)
    for start in range(0, len(scaled), _CHUNK):
        count = min(_CHUNK, len(scaled) - start)
        for quad in range(_QUADS):
            quads[quad] = np.uint32((start >> 2) + quad)
        _philox(quads, _QUADS, position, low, high, words)
        for quad in range(_QUADS):
            halves[4 * quad] = _half_complement(words[0, quad])
            halves[4 * quad + 1] = _half_complement(words[1, quad])
            halves[4 * quad + 2] = _half_complement(words[2, quad])
            halves[4 * quad + 3] = _half_complement(words[3, quad])
        for i in range(count):
            power = np.float32(np.int32(bits[i] >> np.int32(23))) - np.float32(126)  # of two, in 2^32 - 1 - word
            value, most = scaled[start + i], _LN2 * (np.float32(32) - power)
            flags[start + i] = (value + most >= least) & (value >= lowest)


@compiled(fastmath=frozenset({"reassoc"}))
def _sum(values, count):
    """Of whole numbers, exact in any order."""
    total = 0.0
    for i in range(count):
        total += values[i]
    return total


@compiled()
def _masses(values, start, count, top, powers, exponents, whole):
    """Write the masses (`nucleus.masses`) of `count` values from `start` on to `whole`, float64. powers, exponents: scratch."""
    bits = powers.view(np.int32)
    for i in range(count):
        distance = max(values[start + i] - top, _LOWEST)
        exponent = np.floor(distance * _LOG2E + _ROUNDING)
        distance -= exponent * _LN2_HIGH
        distance -= exponent * _LN2_LOW
        power = (distance * _C0 + _C1) * distance
        power = (power + _C2) * distance
        power = (power + _C3) * distance
        power = (power + _C4) * distance
        power = (power + _C5) * (distance * distance)
        powers[i] = power + distance + _ONE
        exponents[i] = np.int32(exponent)
    for i in range(count):
        bits[i] += exponents[i] << np.int32(23)
    for i in range(count):
        whole[i] = np.floor(np.float64(powers[i] * _WHOLE))


@compiled(kept=True)
def masses_of(values, top, found):
    """Write the mass of each value into `found`, int64 [tokens]."""
    powers, exponents, whole = np.empty(_CHUNK, np.float32), np.empty(_CHUNK, np.int32), np.empty(_CHUNK, np.float64)
    for start in range(0, len(values), _CHUNK):
        count = min(_CHUNK, len(values) - start)
        _masses(values, start, count, top, powers, exponents, whole)
        for i in range(count):
            found[start + i] = np.int64(whole[i])


@compiled(kept=True)
def sum_masses(values, lowest, top, per_unit, sums):
    """Return the sum of the masses of values that are not below `lowest`, and add each mass to its band in `sums`, int64
    [bands], zeroed. per_unit: bands in a unit of value."""
    powers, exponents, whole = np.empty(_CHUNK, np.float32), np.empty(_CHUNK, np.int32), np.empty(_CHUNK, np.float64)
    reach = np.float32(len(sums)) / per_unit
    total = np.int64(0)
    for start in range(0, len(values), _CHUNK):
        count = min(_CHUNK, len(values) - start)
        _masses(values, start, count, top, powers, exponents, whole)
        for i in range(count):
            whole[i] = whole[i] if values[start + i] >= lowest else 0.0
        for i in range(count):
            distance = top - values[start + i]
            if distance < reach:  # few are
                sums[np.int64(distance * per_unit)] += np.int64(whole[i])
        total += np.int64(_sum(whole, count))
    return total
