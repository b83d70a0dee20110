"""What a step promises: a token depends on its sequence, seed and position, on nothing else that runs beside it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from common.engine.cpu.torch_runner import TorchRunner
from common.engine.layer_group import LayerGroup
from common.engine.plan import Runner, StepPlan, StepRow
from common.protocol.errors import ConfigError, InvalidParameter
from common.protocol.messages import SamplingParams
from tests.models.driver import GREEDY, Request, logits_of_first, open_runner, run, seen_logits
from tests.models.oracles import build, oracle_prompt, save

SEEDED = SamplingParams(temperature=1.0, seed=11)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return open_runner(save(build("qwen3"), tmp_path_factory.mktemp("qwen3")))


def test_logits_have_the_same_bits_alone_and_in_any_batch(runner: Runner) -> None:
    prompt = oracle_prompt(length=300)
    alone = logits_of_first(runner, [Request(prompt, 8)])
    for chunk in (1, 7, 16, 100, 256):
        assert torch.equal(logits_of_first(runner, [Request(prompt, 8, chunk=chunk)]), alone), chunk
    others = [Request(oracle_prompt(seed=i, length=3 * i + 1), 60, begins=i % 4) for i in range(30)]
    assert torch.equal(logits_of_first(runner, [Request(prompt, 8, chunk=90), *others]), alone)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, SamplingParams(temperature=0.8, seed=5, top_p=0.9, min_p=0.02)])
def test_the_batch_and_the_chunks_do_not_change_the_text(runner: Runner, sampling: SamplingParams) -> None:
    prompts = [oracle_prompt(seed=i, length=length) for i, length in enumerate((1, 16, 40, 130, 131, 200))]
    alone = [run(runner, [Request(prompt, 30, sampling)])[0] for prompt in prompts]
    rng = random.Random(3)
    for seed in range(4):
        requests = [Request(prompt, 30, sampling, rng.choice([5, 64, 1000]), rng.randrange(5)) for prompt in prompts]
        assert run(runner, requests, seed=seed) == alone


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        SEEDED,
        SamplingParams(seed=2, frequency_penalty=0.8, presence_penalty=0.4, repetition_penalty=1.2),
        SamplingParams(seed=3, min_tokens=9, stop_token_ids=list(range(128)), logit_bias={200: 3.0}),
    ],
)
@pytest.mark.parametrize("right", [0, 2, 4])
def test_verified_tokens_are_those_of_one_at_a_time(runner: Runner, sampling: SamplingParams, right: int) -> None:
    """A row with four proposals, the first `right` of them right, samples as many steps of one token do."""
    prompt = oracle_prompt(length=61)
    expected = run(runner, [Request(prompt, 16, sampling)])[0]
    blocks = list(range(20, 30))
    tokens = list(prompt)
    runner.execute(StepPlan(0, [StepRow(prompt[:-1], 0, blocks, 0, sampling, len(prompt), prompt[:-1])]))
    while len(tokens) < len(prompt) + 16:
        made = len(tokens) - len(prompt)
        proposed = [*expected[made : made + right], *[250] * 4][:4]
        row = StepRow([tokens[-1], *proposed], len(tokens) - 1, blocks, 5, sampling, len(prompt), tokens + proposed)
        sampled = runner.execute(StepPlan(0, [row])).rows[0].tokens
        accepted = next((i for i, token in enumerate(proposed) if token != sampled[i]), 4)
        assert accepted >= min(right, 16 - made)
        tokens += sampled[: accepted + 1]
    assert tokens[len(prompt) : len(prompt) + 16] == expected


def test_minimum_tokens_bias_and_penalties_hold(runner: Runner) -> None:
    prompt = oracle_prompt()
    plain = run(runner, [Request(prompt, 6)])[0]
    held = SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=plain[:1])
    assert plain[0] not in run(runner, [Request(prompt, 3, held)])[0]
    banned = SamplingParams(temperature=0.0, logit_bias={plain[0]: -100.0, 99_999: 5.0})
    assert plain[0] not in run(runner, [Request(prompt, 6, banned)])[0]
    forced = SamplingParams(temperature=0.0, logit_bias={42: 100.0})
    assert run(runner, [Request(prompt, 3, forced)])[0] == [42, 42, 42]
    fresh = SamplingParams(temperature=0.0, presence_penalty=100.0)
    assert len(set(run(runner, [Request(prompt, 30, fresh)])[0])) == 30


def test_logprobs_are_those_of_untouched_logits(runner: Runner) -> None:
    sampling = SamplingParams(temperature=0.5, seed=1, top_k=1, logprobs=3, logit_bias={7: 100.0})
    prompt = [*oracle_prompt()[:-1], 7]  # its last token is what is drawn before it, so that the next one is drawn, too
    with seen_logits(runner) as seen:
        row = runner.execute(StepPlan(0, [StepRow(prompt, 0, [0, 1, 2, 3], 2, sampling, len(prompt), prompt)])).rows[0]
    assert row.tokens == [7, 7]
    assert row.logprobs is not None
    for found, logits in zip(row.logprobs, seen[0].log_softmax(-1), strict=True):
        assert found.logprob == pytest.approx(logits[7].item(), abs=1e-5)
        assert list(found.top_tokens) == logits.topk(3).indices.tolist()
    silent = runner.execute(StepPlan(0, [StepRow(prompt, 0, [0, 1, 2, 3], 1, GREEDY, len(prompt))])).rows[0]
    assert silent.logprobs is None


def test_prompt_chunks_without_samples_give_none(runner: Runner) -> None:
    prompt = oracle_prompt()
    rows = [StepRow(prompt, 0, [0, 1, 2, 3], 0, GREEDY, 60), StepRow(prompt[:1], 0, [5], 1, GREEDY, 1)]
    assert [len(row.tokens) for row in runner.execute(StepPlan(0, rows)).rows] == [0, 1]
    assert runner.execute(StepPlan(0, rows[:1])).rows[0].tokens == []
    assert runner.execute(StepPlan(0, [])).rows == []


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (StepRow([], 0, [0], 0, GREEDY, 1), "samples"),
        (StepRow([5], 0, [0], 2, GREEDY, 1), "samples"),
        (StepRow([5], 16, [0], 1, GREEDY, 1), "don't hold"),
        (StepRow([5], 0, [400], 1, GREEDY, 1), "pool"),
        (StepRow([256], 0, [0], 1, GREEDY, 1), "vocabulary"),
        (StepRow([5], 0, [0], 1, SamplingParams(presence_penalty=1.0), 1), "history"),
    ],
)
def test_a_row_that_can_not_run_is_refused_by_name(runner: Runner, row: StepRow, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        runner.execute(StepPlan(0, [row]))


def test_a_pool_of_another_model_is_refused(runner: Any) -> None:
    for pool in (torch.zeros(4, 2, 2, 16, 3, 32), torch.zeros(4, 2, 2, 16, 2, 32).bfloat16()):
        with pytest.raises(ConfigError, match="KV pool"):
            TorchRunner(runner.decoder, [LayerGroup(pool, range(2))], fingerprint="", threads=1)


def test_kv_written_by_one_runner_is_read_by_another(tmp_path: Path) -> None:
    """The bytes of a prompt's blocks, copied to other blocks of another pool, continue the text."""
    files = save(build("llama"), tmp_path)
    prefill, decode = open_runner(files), open_runner(files, threads=2)
    prompt = oracle_prompt(length=100)
    expected = run(prefill, [Request(prompt, 10, SEEDED)])[0]
    prefill.execute(StepPlan(0, [StepRow(prompt, 0, list(range(7)), 0, SEEDED, 100)]))
    moved = [30, 2, 17, 9, 55, 1, 8]
    decode.groups[0].pool[moved] = prefill.groups[0].pool[:7]  # type: ignore[attr-defined]
    output: list[int] = expected[:1]
    while len(output) < 10:
        row = StepRow(output[-1:], 99 + len(output), moved, 1, SEEDED, 100)
        output += decode.execute(StepPlan(0, [row])).rows[0].tokens
    assert output == expected
