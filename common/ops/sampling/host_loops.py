"""The loops of sampling on a CPU that pass over a vocabulary, or hash tokens: compiled where Numba is installed, else NumPy.

Both give the same words and masses, bit for bit. They may find different numbers of contenders, but each finds all tokens that
could win, so the token that is drawn is the same.
"""

from __future__ import annotations

import math
from functools import cache
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from common.ops.sampling.nucleus import BANDS_PER_UNIT, bands_of, masses
from common.ops.sampling.philox import MASK32, MULTIPLIERS, ROUNDS, WEYL

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
Words = NDArray[np.uint64]

GUMBEL_MAX = -math.log(-math.log1p(-(2.0**-33)))
"""No noise is larger (about 22.9)."""

_FEW = 64
_LOW = np.uint64(MASK32)
_SHIFT = np.uint64(32)
_WEYL = tuple(np.uint64(word) for word in WEYL)
_FACTORS = tuple(np.uint64(factor) for factor in MULTIPLIERS)


@cache
def compiled_loops() -> ModuleType | None:
    """Return the module of compiled loops; None where there is no Numba."""
    try:
        from common.ops.sampling import host_loops_numba
    except ImportError:
        return None
    return host_loops_numba


def words_of(seed: int, position: int, tokens: Ids) -> NDArray[np.unsignedinteger]:
    """Return the Philox word of each of `tokens`, 32 bits, [tokens]; `gumbel` says which."""
    compiled = compiled_loops()
    if compiled is None:
        return np.choose(tokens & 3, _words_of_quads(seed, position, tokens >> 2))
    words = np.empty(len(tokens), np.uint32)
    compiled.words_of_tokens(*_key(seed), np.uint32(position), tokens, words)
    return words


def words_of_each(seeds: Words, positions: Ids, tokens: Ids) -> Words:
    """Return the Philox word of each of `tokens`, which have a seed and a position each. NumPy in any case: they are few."""
    lanes = _philox((tokens >> 2).astype(np.uint64), positions.astype(np.uint64), seeds & _LOW, seeds >> _SHIFT)
    return np.choose(tokens & 3, lanes)


def contenders(scaled: Floats, lowest: np.float32, seen: float, seed: int, position: int) -> Ids:
    """Return all tokens whose scores are at least `lowest` and reach `seen` with their noise, and a few that do not, in
    ascending order. Noise is bounded by `GUMBEL_MAX`, and by -log(-log(1 - v)) <= -log(v).
    """
    floor = max(lowest, np.float32(seen - GUMBEL_MAX))
    compiled = compiled_loops()
    if compiled is None:
        return _contenders(scaled, lowest, floor, seen, seed, position)
    flags, least = np.empty(len(scaled), np.bool_), np.float32(seen)
    compiled.flag_contenders(*_key(seed), np.uint32(position), scaled, least, floor, flags)
    return np.flatnonzero(flags)


def masses_of(values: Floats, top: np.float32) -> NDArray[np.int64]:
    """Return `nucleus.masses(values, top)`."""
    compiled = compiled_loops()
    if compiled is None:
        return masses(values, top)
    found = np.empty(len(values), np.int64)
    compiled.masses_of(values, top, found)
    return found


def masses_in_bands(scaled: Floats, lowest: np.float32, top: np.float32, num_bands: int) -> tuple[int, NDArray[np.int64]]:
    """Return the sum of `masses` over all scores that are at least `lowest`, and the sums over those in each of the first
    bands, [num_bands]. top: the highest score."""
    sums, compiled = np.zeros(num_bands, np.int64), compiled_loops()
    if compiled is not None:
        return int(compiled.sum_masses(scaled, lowest, top, np.float32(BANDS_PER_UNIT), sums)), sums
    values = scaled[scaled >= lowest]
    found, bands = masses(values, top), bands_of(values, top, num_bands)
    inside = bands < num_bands
    np.add.at(sums, bands[inside], found[inside])
    return int(found.sum()), sums


def _key(seed: int) -> tuple[np.uint32, np.uint32]:
    return np.uint32(seed & MASK32), np.uint32(seed >> 32 & MASK32)


def _contenders(scaled: Floats, lowest: np.float32, floor: np.float32, seen: float, seed: int, position: int) -> Ids:
    padded = scaled if len(scaled) % 4 == 0 else np.pad(scaled, (0, -len(scaled) % 4), constant_values=-np.inf)
    within_reach = padded >= floor
    quads = np.flatnonzero(within_reach.view(np.uint32))  # four booleans at once
    if len(quads) <= _FEW:
        return np.flatnonzero(within_reach)
    values = padded.reshape(-1, 4)
    if len(quads) < len(values) // 2:
        values = values[quads]
    else:
        quads = np.arange(len(values))  # hashing them all is cheaper than picking most
    bounds = np.empty((len(quads), 4), np.float32)
    for lane, words in enumerate(_words_of_quads(seed, position, quads)):
        bounds[:, lane] = MASK32 - words  # v = (this + 1/2) / 2^32
    bounds += np.float32(0.5)
    np.log(bounds, out=bounds)
    found = np.flatnonzero((values - bounds >= np.float32(seen - 32 * math.log(2))) & (values >= lowest))
    return quads[found >> 2] * 4 + (found & 3)


def _words_of_quads(seed: int, position: int, quads: Ids) -> tuple[Words, ...]:
    """quads: token ids divided by four. Returns the words of the four tokens of each, [quads] each."""
    c0 = quads.astype(np.uint64)
    return _philox(c0, np.full_like(c0, position), np.uint64(seed & MASK32), np.uint64(seed >> 32 & MASK32))


def _philox(c0: Words, c1: Words, k0: Words | np.uint64, k1: Words | np.uint64) -> tuple[Words, ...]:
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
