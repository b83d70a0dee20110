"""The token that a head on a CPU proposes: what its reference says, and what its target would draw from the same logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from common.engine.cpu.head_arrays import draws_of
from common.ops.cpu_int8.choice_numba import choose
from common.ops.cpu_int8.choice_reference import NO_CHOICE, choice_reference
from common.ops.cpu_int8.compiled_numba import compiled
from common.ops.sampling.sample import Draw, sample_tokens
from common.protocol.messages import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
WISHES = [
    GREEDY,
    SamplingParams(temperature=1e-6),
    SamplingParams(temperature=0.7, seed=1),
    SamplingParams(temperature=0.7, seed=2, top_p=0.9),
    SamplingParams(temperature=1.0, seed=3, top_k=20),
    SamplingParams(temperature=1.0, seed=4, min_p=0.05),
    SamplingParams(temperature=1.5, seed=2**63 + 5, top_k=500, top_p=0.5, min_p=0.01),
    SamplingParams(temperature=1.0, seed=6, top_k=1),
]


@compiled(kept=True)
def _choose(first, rest, ids, draws, position, scores, bits, weights):
    return choose(first, rest, ids, draws, 0, position, scores, bits, weights)


def chosen(
    logits: NDArray[np.float32], ids: NDArray[np.int64], wish: SamplingParams, position: int, num_first: int
) -> tuple[int, float]:
    scratch = np.empty_like(logits), np.empty(len(logits), np.int32), np.empty_like(logits)
    return _choose(logits[:num_first], logits[num_first:], ids, draws_of([wish]), position, *scratch)


def draw_of(wish: SamplingParams, position: int) -> Draw:
    return Draw(wish.temperature, wish.top_k, wish.top_p, wish.min_p, wish.seed, position)


def drawn_logits(size: int, seed: int, spread: float) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, spread, size).astype(np.float32)


@pytest.mark.parametrize("wish", WISHES, ids=str)
@pytest.mark.parametrize(("size", "num_first"), [(1, 1), (17, 16), (256, 256), (5000, 4096), (5000, 5000)])
def test_choices_are_those_of_the_reference(size: int, num_first: int, wish: SamplingParams) -> None:
    ids = np.random.default_rng(0).permutation(2 * size)[:size]
    for seed in range(20):
        logits = drawn_logits(size, seed, 3.0 if seed % 2 else 0.3)
        token, chance = chosen(logits, ids, wish, 100 + seed, num_first)
        expected, its_chance = choice_reference(logits, ids, draw_of(wish, 100 + seed))
        assert token == expected
        assert chance == pytest.approx(its_chance, rel=1e-4)


def test_noise_is_the_targets() -> None:
    """A head that is as good as its target draws what its target draws, where that is among the likeliest tokens."""
    logits, ids = drawn_logits(256, 3, 3.0), np.arange(256, dtype=np.int64)
    for position in range(50):
        for wish in (GREEDY, *WISHES[3:6]):
            (expected,) = sample_tokens(torch.from_numpy(logits)[None], [draw_of(wish, position)])
            token, chance = chosen(logits, ids, wish, position, 128)
            assert token == expected and 0 < chance <= 1


@pytest.mark.parametrize("wish", [GREEDY, WISHES[3]], ids=["greedy", "sampled"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [3, 7])
def test_logits_that_are_not_finite_are_no_proposal(wish: SamplingParams, value: float, at: int) -> None:
    ids = np.arange(8, dtype=np.int64)
    logits = np.zeros(8, np.float32)
    logits[at] = value
    assert chosen(logits, ids, wish, 5, 4) == choice_reference(logits, ids, draw_of(wish, 5)) == (NO_CHOICE, 0.0)


@pytest.mark.parametrize("wish", WISHES, ids=str)
def test_of_equal_logits_one_is_chosen(wish: SamplingParams) -> None:
    """Where more are equal than may be drawn, which of them is drawn is not said."""
    ids = np.arange(300, dtype=np.int64)
    token, chance = chosen(np.full(300, 2.5, np.float32), ids, wish, 9, 200)
    assert token in ids and 0 < chance <= 1
