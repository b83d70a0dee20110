"""Chooses the token that a head on a CPU proposes: the likeliest, or with temperature the one that the target's noise favours.

A proposal may be wrong, so with temperature only the `TOP_TOKENS` likeliest are considered, and results need not be exact to
the last bit. The reference is `choice_reference`. These kernels are called by `drafting_numba`.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.ops.cpu_int8.attention_numba import softmax
from common.ops.cpu_int8.compiled_numba import REASSOCIATING, compiled
from common.ops.cpu_int8.copy_numba import copy
from common.ops.sampling.host_loops_numba import words_of_tokens

TOP_TOKENS = 64
"""Number of likeliest tokens for which noise is drawn."""
NO_CHOICE = -1
"""Returned in place of a token id if a logit is not finite."""

_EXPONENT_MASK = np.int32(0x7F800000)
"""Exponent bits of a float32. All are set in infinities and NaN, and in no finite number."""
_LOG2E = np.float32(1.4426950408889634)
_MAX_HALVINGS = 40
"""Limit of the bisection for the score of the last token that is considered: beyond it float32 values no longer differ."""


class Draws(NamedTuple):
    """Sampling parameters of the rows that tokens are drafted for, each array [rows].

    temperatures: float32, 0 for greedy rows.
    top_k: int64, 1 to `TOP_TOKENS`.
    top_p, min_p: float64.
    keys: uint32 [rows, 2], the lower and the upper half of the seed.
    """

    temperatures: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    keys: NDArray[np.uint32]


class Scratch(NamedTuple):
    """Memory for intermediate results, each array [rows, draft vocabulary]."""

    scores: NDArray[np.float32]
    bits: NDArray[np.int32]
    weights: NDArray[np.float32]


@compiled()
def _are_finite(bits):
    """Return whether all numbers are finite. bits: float32, viewed as int32."""
    broken = np.int32(0)
    for i in range(len(bits)):
        broken |= np.int32((bits[i] & _EXPONENT_MASK) == _EXPONENT_MASK)
    return broken == 0


@compiled(fastmath=REASSOCIATING)
def _range(logits):
    """Return the lowest and the highest logit."""
    lowest, highest = logits[0], logits[0]
    for i in range(len(logits)):
        lowest, highest = min(lowest, logits[i]), max(highest, logits[i])
    return lowest, highest


@compiled()
def _reaching(logits, least):
    """Return how many logits are at least `least`."""
    count = np.int32(0)
    for i in range(len(logits)):
        count += np.int32(logits[i] >= least)
    return count


@compiled()
def _top(logits, lowest, highest, count, places):
    """Write the indices of the `count` highest logits into places, int64 [≥ count], in descending order of the logits. Among
    equal logits lower indices come first."""
    below, reached = highest, lowest  # at least `count` logits are >= reached; fewer are >= below, unless all logits are equal
    for _ in range(_MAX_HALVINGS):
        middle = np.float32(0.5) * (below + reached)
        found = _reaching(logits, middle)
        if found >= count:
            reached = middle
        else:
            below = middle
        if found == count:
            break
    taken = 0
    for i in range(len(logits)):
        if logits[i] < reached:
            continue
        at = min(taken, count - 1)
        if taken >= count and logits[i] <= logits[places[at]]:
            continue
        while at > 0 and logits[places[at - 1]] < logits[i]:
            places[at] = places[at - 1]
            at -= 1
        places[at] = i
        taken += 1


@compiled()
def _kept(scores, top_p, min_p):
    """Return how many of the scores, in descending order, pass top-p and min-p; at least one."""
    total = 0.0
    for i in range(len(scores)):
        total += math.exp(scores[i] - scores[0])
    seen, kept = 0.0, 0
    for i in range(len(scores)):
        share = math.exp(scores[i] - scores[0])
        if i > 0 and (share < min_p or seen >= top_p * total):
            break
        seen += share
        kept += 1
    return kept


@compiled()
def _drawn(logits, ids, lowest, highest, draws, which, position):
    """Return the index of the token that noise favours among the likeliest, and its probability, noise included."""
    count = min(draws.top_k[which], len(logits))
    places = np.empty(count, np.int64)
    _top(logits, lowest, highest, count, places)
    scores = np.empty(count, np.float32)
    for i in range(count):
        scores[i] = logits[places[i]] / draws.temperatures[which]
    top_p, min_p = draws.top_p[which], draws.min_p[which]
    if top_p < 1 or min_p > 0:
        count = _kept(scores, top_p, min_p)
    tokens, words = np.empty(count, np.int64), np.empty(count, np.uint32)
    for i in range(count):
        tokens[i] = ids[places[i]]
    words_of_tokens(draws.keys[which, 0], draws.keys[which, 1], np.uint32(position), tokens, words)
    best = 0
    for i in range(count):
        scores[i] += np.float32(-math.log(-math.log((np.float64(words[i]) + 0.5) * 2.0**-32)))
        if scores[i] > scores[best]:
            best = i
    total = 0.0
    for i in range(count):
        total += math.exp(scores[i] - scores[best])
    return places[best], 1.0 / total


@compiled()
def choose(first, rest, ids, draws, which, position, scores, bits, weights):
    """Return the target's id of the proposed token and its probability among the tokens that could be drawn; `NO_CHOICE` and 0
    if a logit is not finite.

    first, rest: float32, the logits of the first tokens of the draft vocabulary and of those behind them. rest may be empty.
    ids: int64 [draft vocabulary], the target's ids.
    which: the row of `draws`.
    position: of the token to draw.
    scores, bits, weights: a row of `Scratch` each.
    """
    size = len(first) + len(rest)
    logits = scores[:size]
    copy(first, logits)
    copy(rest, logits[len(first) :])
    if not _are_finite(logits.view(np.int32)):
        return NO_CHOICE, 0.0
    lowest, highest = _range(logits)
    if draws.temperatures[which] > 0:
        place, chance = _drawn(logits, ids, lowest, highest, draws, which, position)
        return ids[place], chance
    place = 0
    while logits[place] != highest:
        place += 1
    for i in range(size):
        logits[i] *= _LOG2E
    return ids[place], 1.0 / np.float64(softmax(logits, bits[:size], weights[:size]))
