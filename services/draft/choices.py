"""What a draft model might have drawn instead of the token that it drew, and where that is likely to matter. Pure.

A token is the argmax of filtered, tempered logits and Gumbel noise of seed, position and token id. The target has the same
noise and other logits, so what it draws where it disagrees is most often the runner-up under that noise, not the second
likeliest token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from common.ops.sampling.gumbel import GREEDY_BELOW, gumbel_noise
from common.protocol.messages import SamplingParams, TokenLogprobs

TOP_TOKENS = 8
"""The likeliest tokens of a position, among which alternatives are found."""


class Choice(NamedTuple):
    """chance: of the token that was drawn to be the target's, too, as far as the margin of its score tells. alternatives:
    (token, chance), the likeliest first."""

    chance: float
    alternatives: Sequence[tuple[int, float]]


def choice_of(token: int, said: TokenLogprobs, params: SamplingParams, position: int) -> Choice:
    """Return what could have been drawn at index `position` of a text instead of `token`.

    said: with the likeliest tokens of that position, before temperature and filters.
    """
    tops = list(zip(said.top_tokens, said.top_logprobs, strict=True))
    if params.temperature < GREEDY_BELOW:
        scores = {token: said.logprob, **dict(tops)}
    else:
        kept = dict(_kept([(one, logprob / params.temperature) for one, logprob in tops], params))
        scores = {token: said.logprob / params.temperature, **kept}
        noise = gumbel_noise(params.seed, position, np.array(list(scores), np.int64))
        scores = {one: score + float(extra) for (one, score), extra in zip(scores.items(), noise, strict=True)}
    best = max(scores.values())
    weights = {one: math.exp(score - best) for one, score in scores.items()}
    total = sum(weights.values())
    own = weights.pop(token) / total
    ordered = sorted(weights.items(), key=lambda item: -item[1])
    return Choice(own, [(one, weight / total) for one, weight in ordered])


def likeliest(start: int, choices: Sequence[Choice], acceptance: float, count: int) -> list[tuple[float, int, int]]:
    """Return the `count` likeliest first rejections of a draft: (chance, position, the token that comes instead).

    choices: of the drafted tokens from index `start` on. acceptance: how often drafted tokens were confirmed so far. Position i
    is reached if all tokens before it hold, so alternatives get fewer by the same factor with each position, where the model
    is equally sure of all.
    """
    found: list[tuple[float, int, int]] = []
    reached = 1.0
    for position, choice in enumerate(choices, start):
        found += [(reached * chance, position, token) for token, chance in choice.alternatives[:count]]
        reached *= (choice.chance + acceptance) / 2
    found.sort(key=lambda one: -one[0])
    return found[:count]


def _kept(tops: list[tuple[int, float]], params: SamplingParams) -> list[tuple[int, float]]:
    """What min-p, top-k and top-p leave of the likeliest tokens; the mass of those that are not known is taken as none."""
    if params.top_k > 0:
        tops = tops[: params.top_k]
    if params.min_p > 0 and tops:
        lowest = tops[0][1] + math.log(params.min_p)
        tops = [one for one in tops if one[1] >= lowest]
    if params.top_p < 1 and tops:
        weights = [math.exp(score - tops[0][1]) for _, score in tops]
        wanted, before, count = params.top_p * sum(weights), 0.0, 0
        for weight in weights:
            if before >= wanted:
                break
            before += weight
            count += 1
        tops = tops[: max(1, count)]
    return tops
