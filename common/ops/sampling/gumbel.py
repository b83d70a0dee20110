"""Noise for the Gumbel-max trick: a pure function of (seed, position, token).

argmax(logits / T + noise) is a draw from softmax(logits / T). Because the noise of a token at a position is fixed by the
seed, the draw does not depend on the batch, the worker or on guesses made about it (arXiv 2408.07978).

Philox4x32-10 with key = seed, counter = (token / 4, position, 0, 0) and lane = token mod 4: one call serves four tokens, and
Triton has the same generator (`tl.philox`). The 32-bit word w becomes u = (w + 1/2) / 2^32, exact in float64, and
-log(-log(u)), computed in float64 and rounded to float32, so that libraries whose logarithms differ in the last bit agree.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from common.ops.sampling.philox import MASK32, MULTIPLIERS, ROUNDS, WEYL

GUMBEL_MAX = -math.log(-math.log1p(-(2.0**-33)))
"""No noise is larger (about 22.9)."""
GREEDY_BELOW = 1e-5
"""Temperatures below are greedy, as in vLLM: there is no noise."""

_LOW = np.uint64(MASK32)
_SHIFT = np.uint64(32)
_WEYL = tuple(np.uint64(word) for word in WEYL)
_FACTORS = tuple(np.uint64(factor) for factor in MULTIPLIERS)


def gumbel_noise(seed: int, position: int, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    """tokens: int64 [n], each in [0, 2^34). seed: its low 64 bits count; position: in [0, 2^32). Returns float32 [n].

    :raises ValueError: for a position out of range.
    """
    return _noise_of(noise_words(seed, position, tokens >> 2), tokens)


def gumbel_noise_of_each(
    seeds: NDArray[np.uint64], positions: NDArray[np.int64], tokens: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Return what `gumbel_noise` says of tokens that have a seed and a position each, bit for bit. All [n], as there.

    :raises ValueError: for a position out of range.
    """
    if positions.size and not 0 <= int(positions.min()) <= int(positions.max()) <= MASK32:
        raise ValueError("a position is not in [0, 2^32)")
    words = _words((tokens >> 2).astype(np.uint64), positions.astype(np.uint64), seeds & _LOW, seeds >> _SHIFT)
    return _noise_of(words, tokens)


def _noise_of(lanes: tuple[NDArray[np.uint64], ...], tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    uniform = np.choose(tokens & 3, lanes).astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-32
    np.log(uniform, out=uniform)
    np.negative(uniform, out=uniform)
    np.log(uniform, out=uniform)
    np.negative(uniform, out=uniform)
    return uniform.astype(np.float32)


def noise_words(seed: int, position: int, quads: NDArray[np.int64]) -> tuple[NDArray[np.uint64], ...]:
    """quads: int64 [n], token ids divided by four. Returns the 32-bit words of the four tokens of each quad, [n] each.

    :raises ValueError: for a position out of range.
    """
    if not 0 <= position <= MASK32:
        raise ValueError(f"position {position} is not in [0, 2^32)")
    c0 = quads.astype(np.uint64)
    return _words(c0, np.full_like(c0, position), np.uint64(seed & MASK32), np.uint64(seed >> 32 & MASK32))


def _words(
    c0: NDArray[np.uint64], c1: NDArray[np.uint64], k0: NDArray[np.uint64] | np.uint64, k1: NDArray[np.uint64] | np.uint64
) -> tuple[NDArray[np.uint64], ...]:
    """Counters c0 and c1 [n], which are overwritten; the key's halves, of all or of each."""
    c2, c3, high = np.zeros_like(c0), np.zeros_like(c0), np.empty_like(c0)
    for _ in range(ROUNDS):
        c0 *= _FACTORS[0]
        c2 *= _FACTORS[1]
        np.right_shift(c2, _SHIFT, out=high)
        c1 ^= high
        c1 ^= k0
        np.right_shift(c0, _SHIFT, out=high)
        c3 ^= high
        c3 ^= k1
        c0 &= _LOW
        c2 &= _LOW
        c0, c1, c2, c3 = c1, c2, c3, c0
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3
