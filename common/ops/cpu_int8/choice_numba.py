"""The token that a head on a CPU proposes: the likeliest, or with temperature the one that the target's own noise favours.

A proposal may be wrong, so this looks at the likeliest tokens alone, and does not ask for the last bit; `choice_reference` says
the same in NumPy. Kernels are parts of `drafting_numba`.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.ops.cpu_int8.attention_numba import softmax
from common.ops.cpu_int8.choice_reference import NO_CHOICE
from common.ops.cpu_int8.compiled_numba import REASSOCIATING, compiled
from common.ops.cpu_int8.copy_numba import copy
from common.ops.sampling.host_loops_numba import words_of_tokens

_INFINITE = np.int32(0x7F800000)
_LOG2E = np.float32(1.4426950408889634)
_HALVINGS = 40
"""Of the range in which a score is looked for that so many tokens reach: float32 has no more to halve."""


class Draws(NamedTuple):
    """How tokens are drawn, for each row that wants some. temperatures: float32, 0 for greedy ones. top_k: int64, at most
    `TOP_TOKENS`. top_p, min_p: float64. keys: uint32 [rows, 2], the halves of a seed, the lower one first."""

    temperatures: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    keys: NDArray[np.uint32]


class Scratch(NamedTuple):
    """[rows, draft vocabulary]: float32 scores, int32 bits and float32 weights."""

    scores: NDArray[np.float32]
    bits: NDArray[np.int32]
    weights: NDArray[np.float32]


@compiled()
def _are_finite(bits):
    """bits: float32 as int32."""
    broken = np.int32(0)
    for i in range(len(bits)):
        broken |= np.int32((bits[i] & _INFINITE) == _INFINITE)
    return broken == 0


@compiled(fastmath=REASSOCIATING)
def _range(logits):
    lowest, highest = logits[0], logits[0]
    for i in range(len(logits)):
        lowest, highest = min(lowest, logits[i]), max(highest, logits[i])
    return lowest, highest


@compiled()
def _reaching(logits, least):
    """How many are not below `least`."""
    count = np.int32(0)
    for i in range(len(logits)):
        count += np.int32(logits[i] >= least)
    return count


@compiled()
def _top(logits, lowest, highest, count, places):
    """Put the indices of the `count` highest logits, the highest first, into places: int64 [≥ count]. Of equal ones that do not
    all fit, the first."""
    below, reached = highest, lowest  # more than `count` reach the second, or exactly so many
    for _ in range(_HALVINGS):
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
    """How many of `scores`, the highest first, are in the nucleus and not too unlikely. At least one."""
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
    """The index of the token that noise favours among the likeliest, and its chance."""
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
    """first, rest: float32, the logits of the first tokens of the draft vocabulary, and of those behind them, which may be left
    out. ids: int64, the target's. which: of `draws`. position: of the token to draw. scores and so on: of `Scratch`.

    Returns the target's id, and how likely it is among what could be drawn; `NO_CHOICE` where a logit is not finite.
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
