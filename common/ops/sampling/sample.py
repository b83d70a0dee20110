"""Choosing tokens from logits: temperature, then min-p, top-k and top-p, then argmax of what is left plus Gumbel noise.

Ties go to the lowest token id, in filters too: top-k keeps exactly k tokens. Filters see the tempered logits; top-p takes
probabilities over what min-p and top-k left, and keeps tokens until their sum reaches p.

On a CPU most of the work is avoided, exactly: noise is bounded, so few tokens can win beside one whose score has been seen
(`host_loops.contenders`). Top-k looks near the highest score first, and top-p puts those tokens in order among which it ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from common.ops.sampling.gumbel import GREEDY_BELOW, gumbel_noise
from common.ops.sampling.host_loops import Floats, Ids, contenders, masses_in_bands, masses_of
from common.ops.sampling.nucleus import ALL_BANDS, BANDS_PER_UNIT, bands_of, wanted_mass

_FIRST_TRIES = 64
_DISTANCES = (3.0, 6.0, 10.0)
"""How far below the highest score top-k looks for its tokens: each in turn, and then the whole vocabulary."""
_BANDS = (32, ALL_BANDS)
"""Numbers of bands among which top-p looks for the one where its nucleus ends, in turn. Few tokens are in the first 32."""


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
    return [sample_token(row, draw) for row, draw in zip(rows, draws, strict=True)]


def sample_token(logits: Floats, draw: Draw) -> int:
    """Return the token that a draw gives. logits: float32 [vocab], without NaN."""
    if draw.temperature < GREEDY_BELOW:
        return int(logits.argmax())
    scaled = logits / np.float32(draw.temperature)
    best = int(scaled.argmax())
    top = scaled[best]
    if not np.isfinite(top):
        return best
    lowest = np.float32(top + np.float32(math.log(draw.min_p))) if draw.min_p > 0 else np.float32(-np.inf)
    has_top_k = 0 < draw.top_k < len(scaled)
    if has_top_k:
        kept = _highest(scaled, lowest, top, draw.top_k)
        kept = np.sort(_nucleus(scaled, kept, top, draw.top_p) if draw.top_p < 1 else kept)
    elif draw.top_p < 1:
        kept = _whole_nucleus(scaled, lowest, top, draw.top_p)
    else:
        kept = _contenders(scaled, lowest, top, draw)
    return _winner(scaled, kept, draw)[0]


def _winner(scaled: Floats, tokens: Ids, draw: Draw) -> tuple[int, float]:
    """Return the token with the highest score plus noise, and that sum. tokens: in ascending order."""
    scores = scaled[tokens] + gumbel_noise(draw.seed, draw.position, tokens)
    winner = int(scores.argmax())
    return int(tokens[winner]), float(scores[winner])


def _contenders(scaled: Floats, lowest: np.float32, top: np.float32, draw: Draw) -> Ids:
    """Return the few tokens, of at least `lowest`, that could win, in ascending order. The winner of the likeliest is drawn
    first, and a token that cannot beat it is left out."""
    likely = np.flatnonzero(scaled >= max(lowest, np.float32(top - np.float32(2.0))))[:_FIRST_TRIES]
    seen = _winner(scaled, likely, draw)[1]
    seen -= 1e-3 + abs(seen) * 2.0**-20  # scores, and sums with bounds, are rounded to float32
    return contenders(scaled, lowest, seen, draw.seed, draw.position)


def _near(scaled: Floats, lowest: np.float32, top: np.float32) -> Iterator[Ids]:
    """Yield the tokens within each of `_DISTANCES` of the highest score, then all; none below `lowest`, in ascending order."""
    for distance in _DISTANCES:
        if top - distance > lowest:
            yield np.flatnonzero(scaled >= np.float32(top - np.float32(distance)))
    yield np.flatnonzero((scaled >= lowest) & (scaled > -np.inf))


def _highest(scaled: Floats, lowest: np.float32, top: np.float32, count: int) -> Ids:
    """Return the `count` highest tokens of at least `lowest`, or as many as there are, highest first."""
    near = np.empty(0, np.int64)
    for near in _near(scaled, lowest, top):
        if len(near) >= count:
            break
    values = scaled[near]
    if count < len(near):
        near = near[values >= np.partition(values, -count)[-count]]
    return near[_order(scaled[near])][:count]


def _whole_nucleus(scaled: Floats, lowest: np.float32, top: np.float32, top_p: float) -> Ids:
    """Return the likeliest tokens of at least `lowest` whose probabilities sum to `top_p`, in ascending order; at least one."""
    for num_bands in _BANDS:
        total, sums = masses_in_bands(scaled, lowest, top, num_bands)
        wanted, sums = wanted_mass(total, top_p), sums.cumsum()
        band = int(np.searchsorted(sums, wanted))
        if band < num_bands:
            break
    else:
        return np.flatnonzero((scaled >= lowest) & (scaled > -np.inf))
    near = np.flatnonzero(scaled >= max(lowest, np.float32(top - np.float32((band + 1) / BANDS_PER_UNIT))))
    bands = bands_of(scaled[near], top, num_bands)
    last = np.flatnonzero(bands == band)
    values = scaled[near[last]]
    order = _order(values)
    before = int(sums[band - 1]) if band else 0
    kept = bands < band
    kept[last[order[: _length(masses_of(values, top)[order], wanted - before)]]] = True
    return near[kept]


def _nucleus(scaled: Floats, ordered: Ids, top: np.float32, top_p: float) -> Ids:
    """Return the first of a few tokens, highest first, whose probabilities among these sum to `top_p`; at least one."""
    found = masses_of(scaled[ordered], top)
    return ordered[: _length(found, wanted_mass(int(found.sum()), top_p))]


def _length(ordered: NDArray[np.int64], wanted: int) -> int:
    """Return how many of the masses, from the first on, sum to `wanted`."""
    return int(np.searchsorted(ordered.cumsum(), wanted)) + 1


def _order(values: Floats) -> Ids:
    """Return the indices that sort values in descending order; equal values keep their order."""
    return np.argsort(-values, kind="stable")
