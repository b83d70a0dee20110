"""Choosing tokens from logits: temperature, then min-p, top-k and top-p, then argmax of what is left plus Gumbel noise.

Ties go to the lowest token id, in filters too: top-k keeps exactly k tokens. Filters see the tempered logits; top-p takes
probabilities over what min-p and top-k left, and keeps tokens until their sum reaches p.

On a CPU most of the work is avoided, exactly: noise is bounded, so only tokens within `GUMBEL_MAX` of a score already seen can
win; and -log(-log(1 - v)) <= -log(v), so that one float32 logarithm tells which of those still need the exact noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from common.ops.sampling.gumbel import GREEDY_BELOW, GUMBEL_MAX, gumbel_noise, noise_words
from common.ops.sampling.nucleus import masses, wanted_mass
from common.ops.sampling.philox import MASK32

_HEAD = 512
_FIRST_TRIES = 64
_FEW = 64

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


class Draw(NamedTuple):
    """How one row is drawn. Filters off: top_k=0, top_p=1, min_p=0. `position` is that of the token drawn."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    position: int


def sample_tokens(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """logits: float32 [rows, vocab], without NaN. Returns one token id per row, each depending on its row and draw alone.

    :raises ValueError: if shapes don't fit.
    """
    if logits.ndim != 2 or logits.shape[0] != len(draws) or logits.dtype != torch.float32:
        raise ValueError(
            f"{len(draws)} draws need float32 logits [{len(draws)}, vocab], not {logits.dtype} {list(logits.shape)}"
        )
    rows = logits.numpy()
    return [_sample(row, draw) for row, draw in zip(rows, draws, strict=True)]


def _sample(logits: Floats, draw: Draw) -> int:
    if draw.temperature < GREEDY_BELOW:
        return int(logits.argmax())
    scaled = logits / np.float32(draw.temperature)
    best = int(scaled.argmax())
    top = scaled[best]
    if not np.isfinite(top):
        return best
    lowest = np.float32(top + np.float32(math.log(draw.min_p))) if draw.min_p > 0 else np.float32(-np.inf)
    if 0 < draw.top_k < len(scaled) or draw.top_p < 1:
        kept = _filtered(scaled, lowest, draw)
    else:
        kept = _contenders(scaled, lowest, top, draw)
    return _winner(scaled, kept, draw)[0]


def _winner(scaled: Floats, tokens: Ids, draw: Draw) -> tuple[int, float]:
    """tokens: rising. The one with the highest noisy score, and that score."""
    scores = scaled[tokens] + gumbel_noise(draw.seed, draw.position, tokens)
    winner = int(scores.argmax())
    return int(tokens[winner]), float(scores[winner])


def _contenders(scaled: Floats, lowest: np.float32, top: np.float32, draw: Draw) -> Ids:
    """The few tokens of those above `lowest` that could win, rising: the likeliest score something, the others must beat it."""
    likely = np.flatnonzero(scaled >= max(lowest, np.float32(top - np.float32(2.0))))[:_FIRST_TRIES]
    seen = _winner(scaled, likely, draw)[1]
    seen -= 1e-3 + abs(seen) * 2.0**-20  # scores, and sums with bounds, are rounded to float32
    padded = scaled if len(scaled) % 4 == 0 else np.pad(scaled, (0, -len(scaled) % 4), constant_values=-np.inf)
    within_reach = padded >= max(lowest, np.float32(seen - GUMBEL_MAX))
    quads = np.flatnonzero(within_reach.view(np.uint32))  # four booleans at once
    if len(quads) <= _FEW:
        return np.flatnonzero(within_reach)
    values = padded.reshape(-1, 4)
    if len(quads) < len(values) // 2:
        values = values[quads]
    else:
        quads = np.arange(len(values))  # hashing them all is cheaper than picking most
    bounds = np.empty((len(quads), 4), np.float32)
    for lane, words in enumerate(noise_words(draw.seed, draw.position, quads)):
        bounds[:, lane] = MASK32 - words  # v = (this + 1/2) / 2^32
    bounds += np.float32(0.5)
    np.log(bounds, out=bounds)
    found = np.flatnonzero((values - bounds >= np.float32(seen - 32 * math.log(2))) & (values >= lowest))
    return quads[found >> 2] * 4 + (found & 3)


def _filtered(scaled: Floats, lowest: np.float32, draw: Draw) -> Ids:
    """What min-p, top-k and top-p leave, rising."""
    allowed = np.flatnonzero((scaled >= lowest) & (scaled > -np.inf))
    if 0 < draw.top_k < len(allowed):
        allowed = _highest(scaled, allowed, draw.top_k)[: draw.top_k]
    if draw.top_p < 1:
        allowed = _nucleus(scaled, allowed, draw.top_p)
    return np.sort(allowed)


def _nucleus(scaled: Floats, allowed: Ids, top_p: float) -> Ids:
    """The likeliest of `allowed` whose probabilities reach `top_p`; at least one."""
    values = scaled[allowed]
    top = values.max()
    wanted = wanted_mass(int(masses(values, top).sum()), top_p)
    for size in (_HEAD, len(allowed)):
        ordered = _highest(scaled, allowed, size)
        sums = masses(scaled[ordered], top).cumsum()
        if sums[-1] >= wanted or size >= len(allowed):
            break
    return ordered[: int(np.searchsorted(sums, wanted)) + 1]


def _highest(scaled: Floats, allowed: Ids, count: int) -> Ids:
    """At least the `count` highest of `allowed` (rising ids), highest first, equal ones by id."""
    values = scaled[allowed]
    if count < len(allowed):
        allowed = allowed[values >= np.partition(values, -count)[-count]]
        values = scaled[allowed]
    return allowed[np.argsort(-values, kind="stable")]
