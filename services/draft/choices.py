"""What a draft model might have drawn instead of the token that it drew, and where that is likely to matter. Pure.

A token is the argmax of filtered, tempered logits and Gumbel noise of seed, position and token id. The target has the same
noise and other logits, so what it draws where it disagrees is most often the runner-up under that noise, not the second
likeliest token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from common.engine.plan import StepPlan, StepResult
from common.ops.sampling.gumbel import GREEDY_BELOW, gumbel_noise_of_each
from common.protocol.messages import SamplingParams, TokenLogprobs

MASK64 = (1 << 64) - 1
MIN_CHANCE = 0.01
"""Of what may come instead, below which it gets no branch."""
SURE = math.log1p(-MIN_CHANCE)
TOP_TOKENS = 8
"""The likeliest tokens of a position, among which alternatives are found."""
GREEDY_TOP_TOKENS = 4
"""The same where nothing but the model decides: the runner-up is the second."""


class Choice(NamedTuple):
    """chance: of the token that was drawn to be the target's, too, as far as the margin of its score tells. alternatives:
    (token, chance), the likeliest first."""

    chance: float
    alternatives: Sequence[tuple[int, float]]


class Drawn(NamedTuple):
    """`token` was drawn at index `position` of a text. said: with the likeliest tokens there, before temperature and
    filters."""

    token: int
    said: TokenLogprobs
    params: SamplingParams
    position: int


def drawn_in(plan: StepPlan, result: StepResult, vocab_size: int) -> list[Choice | None]:
    """Return the choice of each row of a step, None where no token was drawn or its likeliest tokens were not asked for."""
    found: dict[int, Drawn] = {}
    for index, (row, samples) in enumerate(zip(plan.rows, result.rows, strict=True)):
        if row.num_samples and samples.logprobs and 0 <= samples.tokens[0] < vocab_size:
            position = row.start + len(row.tokens)
            found[index] = Drawn(samples.tokens[0], samples.logprobs[0], row.sampling, position)
    choices = dict(zip(found, choices_of(list(found.values())), strict=True))
    return [choices.get(index) for index in range(len(plan.rows))]


def choices_of(drawn: Sequence[Drawn]) -> list[Choice]:
    """Return what could have been drawn instead, for each of `drawn`. The noise of all is computed together."""
    scores = [{} if _is_sure(one) else _scores(one) for one in drawn]
    noisy = [index for index, one in enumerate(drawn) if one.params.temperature >= GREEDY_BELOW]
    if noisy:
        counts = [len(scores[index]) for index in noisy]
        seeds = np.array([drawn[index].params.seed & MASK64 for index in noisy], np.uint64)
        positions = np.array([drawn[index].position for index in noisy], np.int64)
        tokens = np.array([token for index in noisy for token in scores[index]], np.int64)
        noise = gumbel_noise_of_each(np.repeat(seeds, counts), np.repeat(positions, counts), tokens).tolist()
        extras = iter(noise)
        for index in noisy:
            scores[index] = {token: score + next(extras) for token, score in scores[index].items()}
    return [
        _choice(one.token, own) if own else Choice(math.exp(one.said.logprob), ())
        for one, own in zip(drawn, scores, strict=True)
    ]


def _is_sure(one: Drawn) -> bool:
    """Whether nothing else is likely enough to matter: as with most tokens of most texts, at no noise."""
    return one.params.temperature < GREEDY_BELOW and one.said.logprob > SURE


def _scores(one: Drawn) -> dict[int, float]:
    """Return the scores without noise of what may have been drawn."""
    tops = list(zip(one.said.top_tokens, one.said.top_logprobs, strict=True))
    temperature = one.params.temperature
    if temperature < GREEDY_BELOW:
        return {one.token: one.said.logprob, **dict(tops)}
    kept = dict(_kept([(token, logprob / temperature) for token, logprob in tops], one.params))
    return {one.token: one.said.logprob / temperature, **kept}


def _choice(token: int, scores: dict[int, float]) -> Choice:
    best = max(scores.values())
    weights = [(one, math.exp(score - best)) for one, score in scores.items()]
    total = sum([weight for _, weight in weights])
    own = math.exp(scores[token] - best) / total
    ordered = sorted([(one, weight / total) for one, weight in weights if one != token], key=itemgetter(1), reverse=True)
    return Choice(own, ordered)


def likeliest(
    start: int, choices: Sequence[Choice], acceptance: float, count: int, least: float = 0.0
) -> list[tuple[float, int, int]]:
    """Return the `count` likeliest first rejections of a draft: (chance, position, the token that comes instead), those with a
    chance of at least `least`.

    choices: of the drafted tokens from index `start` on. acceptance: how often drafted tokens were confirmed so far. Position i
    is reached if all tokens before it hold, so alternatives get fewer by the same factor with each position, where the model
    is equally sure of all.
    """
    found: list[tuple[float, int, int]] = []
    reached = 1.0
    for position, choice in enumerate(choices, start):
        if reached < least:
            break
        for token, chance in choice.alternatives[:count]:
            if reached * chance < least:
                break
            found.append((reached * chance, position, token))
        reached *= (choice.chance + acceptance) / 2
    found.sort(key=itemgetter(0), reverse=True)
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
