"""`--dtype auto` on a CPU: 8-bit weights and bfloat16 KV, as invariant as float32, and close to it on real text."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from common.engine.plan import Runner, StepPlan, StepRow
from common.models.source import ModelFiles
from common.protocol.messages import SamplingParams
from tests.models.driver import GREEDY, Request, open_runner, run
from tests.models.test_smollm2 import text_tokens


@pytest.fixture(scope="module")
def runner(smollm2: ModelFiles) -> Any:
    return open_runner(smollm2, dtype="auto")


def all_logits(runner: Any, tokens: list[int]) -> torch.Tensor:
    """Logits of each position of `tokens`, computed in one step."""
    seen: list[torch.Tensor] = []
    forward = runner.decoder.forward

    def spy(*arguments: Any) -> torch.Tensor:
        seen.append(forward(*arguments))
        return seen[-1]

    runner.decoder.forward = spy
    try:
        blocks = list(range(-(-len(tokens) // runner.block_tokens)))
        runner.execute(StepPlan(0, [StepRow(tokens, 0, blocks, len(tokens), GREEDY, len(tokens))]))
    finally:
        runner.decoder.forward = forward
    return seen[0].float()


def test_logits_have_the_same_bits_alone_in_a_batch_in_chunks_and_on_two_threads(runner: Any, smollm2: ModelFiles) -> None:
    assert runner.decoder.layers[0].qkv.format == "int8" and runner.pool.dtype == torch.bfloat16
    prompt = text_tokens(smollm2, 200, seed=5)
    steps: list[torch.Tensor] = []
    forward = runner.decoder.forward

    def spy(*arguments: Any) -> torch.Tensor:
        steps.append(forward(*arguments))
        return steps[-1]

    def first_rows(requests: list[Request]) -> torch.Tensor:
        """The logits of each token of the first request."""
        steps.clear()
        run(runner, requests, seed=len(requests))
        return torch.stack([step[0] for step in steps if len(step)][-len(requests[0].output) :])

    threads = torch.get_num_threads()
    runner.decoder.forward = spy
    try:
        alone = first_rows([Request(prompt, 4)])
        for chunk in (7, 16, 100):
            assert torch.equal(first_rows([Request(prompt, 4, chunk=chunk)]), alone), chunk
        torch.set_num_threads(2)
        others = [Request(text_tokens(smollm2, 3 + 11 * i, seed=i), 4) for i in range(10)]
        assert torch.equal(first_rows([Request(prompt, 4), *others]), alone)
    finally:
        runner.decoder.forward = forward
        torch.set_num_threads(threads)


def test_rows_shared_out_among_threads_give_the_same_tokens_and_logprobs(runner: Any, smollm2: ModelFiles) -> None:
    params = SamplingParams(temperature=0.8, seed=3, logprobs=2)
    blocks = [[3 * row, 3 * row + 1, 3 * row + 2] for row in range(13)]
    prompts = [text_tokens(smollm2, 3 + 3 * row, seed=row) for row in range(13)]
    rows = [
        StepRow(prompt, 0, held, int(row % 5 > 0), params, len(prompt))
        for row, (prompt, held) in enumerate(zip(prompts, blocks, strict=True))
    ]
    threaded = open_runner(smollm2, dtype="auto", threads=3)
    assert threaded.execute(StepPlan(0, rows)).rows == runner.execute(StepPlan(0, rows)).rows


def test_a_prompt_s_logits_are_those_of_one_token_at_a_time(runner: Any, smollm2: ModelFiles) -> None:
    """Prefill, decode and verification agree on every position, not only on the last."""
    tokens = text_tokens(smollm2, 150, seed=9)
    whole = all_logits(runner, tokens)
    seen: list[torch.Tensor] = []
    forward = runner.decoder.forward
    runner.decoder.forward = lambda *arguments: seen.append(forward(*arguments)) or seen[-1]
    try:
        blocks = list(range(20, 30))
        for at in [*range(0, 140, 7), *range(140, 150)]:
            row = tokens[at : at + 7] if at < 140 else tokens[at : at + 1]
            runner.execute(StepPlan(0, [StepRow(row, at, blocks, len(row), GREEDY, len(tokens))]))
    finally:
        runner.decoder.forward = forward
    assert torch.equal(torch.cat(seen).float(), whole)


def test_it_is_close_to_float32_on_real_text(runner: Runner, smollm2: ModelFiles) -> None:
    tokens = text_tokens(smollm2, 160, seed=2)
    following = torch.tensor(tokens[1:])[:, None]
    exact = all_logits(open_runner(smollm2, num_blocks=20), tokens).log_softmax(-1)
    found = all_logits(runner, tokens).log_softmax(-1)
    errors = (found - exact)[:-1].gather(1, following).abs()
    assert errors.mean() < 0.05
    assert (exact.exp() * (exact - found)).sum(-1).mean() < 5e-3  # KL divergence, nats
    assert (found.argmax(-1) == exact.argmax(-1)).float().mean() > 0.95
