"""The samples of a step's rows on a CPU: those that somebody takes are drawn, and no others."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.engine import sampling
from common.engine.plan import NO_TOKEN, StepRow
from common.engine.sampling import sample_rows
from common.ops.sampling.sample import Draw, sample_token
from common.protocol.messages import SamplingParams

VOCAB = 64
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, seed=5),
    SamplingParams(temperature=1.0, top_p=0.9, seed=6, logprobs=2),
    SamplingParams(temperature=1.0, seed=7, presence_penalty=1.0, logit_bias={3: 2.0}),
]


def row_of(params: SamplingParams, guessed: list[int], start: int = 4) -> StepRow:
    tokens = [9, *guessed]
    history = [1, 2, 3, 4, *tokens]
    return StepRow(tokens, start, [0], len(tokens), params, prompt_tokens=3, history=history)


def one_by_one(logits: torch.Tensor, row: StepRow) -> list[int]:
    """Draw each sample by itself, as a row of one token does that has the guesses before it as its history."""
    found = []
    for place in range(row.num_samples):
        end = row.start + place + 1
        alone = StepRow(
            row.tokens[place : place + 1], end - 1, [0], 1, row.sampling, prompt_tokens=3, history=row.history[:end]
        )
        found += sample_rows(logits[place : place + 1], [alone])[0].tokens
    return found


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled", "logprobs", "adjusted"])
def test_samples_are_those_of_single_rows_up_to_the_first_wrong_guess(
    params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Draw] = []

    def noted(values: np.ndarray, draw: Draw) -> int:
        drawn.append(draw)
        return sample_token(values, draw)

    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(3)) * 4
    right: list[int] = []
    for place in range(4):  # what follows a token depends on it, with penalties
        right.append(one_by_one(logits[: place + 1], row_of(params, right))[place])
    monkeypatch.setattr(sampling, "sample_token", noted)
    for num_right in range(4):
        guessed = [*right[:num_right], *((token + 1) % VOCAB for token in right[num_right:3])]
        wrong, other = row_of(params, guessed), row_of(SamplingParams(temperature=0.0), [])
        drawn.clear()
        first, second = sample_rows(torch.cat([logits[:4], logits[5:6]]), [wrong, other])
        assert first.tokens == [*right[: num_right + 1], *[NO_TOKEN] * (3 - num_right)]
        assert second.tokens == [int(logits[5].argmax())], "rows behind it keep their own logits"
        assert [draw.position for draw in drawn] == [*range(5, 6 + num_right), 5]
        assert (first.logprobs is not None) == (params.logprobs >= 0)
        if first.logprobs is not None:
            expected = logits[range(num_right + 1), right[: num_right + 1]] - logits[: num_right + 1].logsumexp(-1)
            np.testing.assert_allclose([said.logprob for said in first.logprobs], expected, atol=1e-5)


@pytest.mark.parametrize("logprobs", [-1, 3])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_give_no_token_to_their_own_row_alone(bad: float, logprobs: int) -> None:
    params = SamplingParams(temperature=0.7, seed=1, logprobs=logprobs)
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(4))
    guess = one_by_one(logits[:1], row_of(params, []))[0]
    logits[1, 7] = bad
    before = logits.clone()
    first, second = sample_rows(logits, [row_of(params, [guess, 1]), row_of(params, [], start=9)])
    assert first.tokens == [guess, NO_TOKEN, NO_TOKEN]
    assert second.tokens == one_by_one(logits[3:], row_of(params, [], start=9))
    assert torch.equal(logits.nan_to_num(), before.nan_to_num()), "a step's logits are left as they are"
    if logprobs >= 0:
        assert first.logprobs is not None and np.isfinite(first.logprobs[0].logprob)
