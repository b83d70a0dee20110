"""What a draft model might have drawn: of a whole step at once, what it is sample by sample, to the bit."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from common.engine.plan import RowSamples, StepPlan, StepResult, StepRow
from common.ops.sampling.gumbel import gumbel_noise, gumbel_noise_of_each
from common.protocol.messages import SamplingParams, TokenLogprobs
from services.draft import choices
from services.draft.choices import MIN_CHANCE, Choice, Drawn, choices_of, drawn_in, likeliest

SAMPLING = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, seed=3),
    SamplingParams(temperature=1.0, seed=(1 << 64) - 5, top_p=0.9),
    SamplingParams(temperature=1.3, seed=-7, top_k=3, min_p=0.05),
]


def logprobs(draw: random.Random, *, count: int = 8) -> tuple[int, TokenLogprobs]:
    tokens = draw.sample(range(49_000), count)
    values = sorted((math.log(draw.uniform(1e-6, 1 / count)) for _ in tokens), reverse=True)
    token = draw.choice([*tokens[:3], 48_999])
    said = values[tokens.index(token)] if token in tokens else values[-1] - 1
    return token, TokenLogprobs(logprob=said, top_tokens=tuple(tokens), top_logprobs=tuple(values))


def drawn(count: int) -> list[Drawn]:
    draw = random.Random(5)
    return [Drawn(*logprobs(draw), draw.choice(SAMPLING), draw.randrange(1 << 20)) for _ in range(count)]


def test_noise_of_each_is_the_noise_of_one() -> None:
    draw = np.random.default_rng(4)
    seeds = draw.integers(0, 1 << 64, 200, np.uint64, endpoint=False)
    positions, tokens = draw.integers(0, 1 << 32, 200), draw.integers(0, 1 << 34, 200)
    each = gumbel_noise_of_each(seeds, positions, tokens)
    single = [gumbel_noise(int(s), int(p), t[None])[0] for s, p, t in zip(seeds, positions, tokens, strict=True)]
    assert each.dtype == np.float32
    assert np.array_equal(each.view(np.uint32), np.array(single, np.float32).view(np.uint32))


@pytest.mark.parametrize("position", [-1, 1 << 32])
def test_a_position_out_of_range_is_refused(position: int) -> None:
    with pytest.raises(ValueError, match="position"):
        gumbel_noise_of_each(np.zeros(2, np.uint64), np.array([0, position]), np.zeros(2, np.int64))


def test_choices_of_many_samples_are_those_of_each_to_the_bit() -> None:
    every = drawn(120)
    together = choices_of(every)
    assert together == [choices_of([one])[0] for one in every]
    assert choices_of([]) == []


def test_the_noise_is_that_of_the_targets_sampler() -> None:
    """The chances follow from scores with `gumbel_noise` of seed, position and token."""
    params = SamplingParams(temperature=0.7, seed=11)
    said = TokenLogprobs(logprob=-0.5, top_tokens=(7, 9, 20_001), top_logprobs=(-0.5, -1.5, -2.5))
    scores = np.array(said.top_logprobs) / 0.7 + gumbel_noise(11, 40, np.array(said.top_tokens)).astype(np.float64)
    weights = np.exp(scores - scores.max())
    (choice,) = choices_of([Drawn(7, said, params, 40)])
    chances = dict(choice.alternatives) | {7: choice.chance}
    assert [chances[token] for token in said.top_tokens] == pytest.approx(list(weights / weights.sum()), rel=1e-12)


def test_a_row_without_a_token_or_without_likeliest_tokens_has_no_choice() -> None:
    token, said = logprobs(random.Random(1))
    row = StepRow(tokens=[1, 2], start=5, blocks=[0], num_samples=1, prompt_tokens=1, sampling=SAMPLING[1])
    prompt = StepRow(tokens=[1, 2], start=0, blocks=[0], num_samples=0, prompt_tokens=1, sampling=SAMPLING[1])
    results = [
        RowSamples(tokens=[token], logprobs=[said]),
        RowSamples(tokens=[]),
        RowSamples(tokens=[token]),
        RowSamples(tokens=[-1], logprobs=[said]),
    ]
    found = drawn_in(StepPlan(step=1, rows=[row, prompt, row, row]), StepResult(rows=results), 49_152)
    (expected,) = choices_of([Drawn(token, said, SAMPLING[1], 7)])
    assert isinstance(expected, Choice)
    assert found == [expected, None, None, None]


def test_a_token_without_likely_alternatives_gets_no_branch_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def sure(chance: float) -> Drawn:
        rest = [math.log(part * (1 - chance)) for part in (0.6, 0.3, 0.1)]
        return Drawn(7, TokenLogprobs(math.log(chance), (7, 8, 9, 10), (math.log(chance), *rest)), SAMPLING[0], 3)

    every = [sure(0.995), sure(0.9), sure(0.9999), sure(0.5), *drawn(40)]
    with monkeypatch.context() as context:
        context.setattr(choices, "SURE", 1.0)
        whole = choices_of(every)
    shorter = choices_of(every)
    assert [one.alternatives for one in shorter[:3]] == [(), whole[1].alternatives, ()]
    for count in (1, 3, 8):
        expected = likeliest(0, whole, 0.7, count, MIN_CHANCE)
        found = likeliest(0, shorter, 0.7, count, MIN_CHANCE)
        assert [one[1:] for one in found] == [one[1:] for one in expected]
        assert [one[0] for one in found] == pytest.approx([one[0] for one in expected], rel=0.02)
