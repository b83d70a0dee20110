"""Prompts that are read: their tokens' log-probabilities and their hidden states are those of transformers, and the same bits
however the prompt is cut and whatever runs beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from common.engine.plan import FIXED_POINT, RowSamples, Runner, StepPlan, StepRow
from common.models.source import ModelFiles
from common.ops.backend import interpreted
from common.ops.linear.candidates import Candidate
from common.protocol.errors import InvalidParameter
from common.protocol.messages import SamplingParams, TokenLogprobs
from tests.models.driver import GREEDY, open_runner
from tests.models.oracles import build, oracle_prompt, save
from tests.models.test_device_runner import device_runner
from tests.ops.interpreter import act_as_a_gpu

TOP = SamplingParams(temperature=0.0, logprobs=3)
OTHERS = [StepRow(oracle_prompt(seed=9, length=n), 0, [50 + n], 1, GREEDY, n) for n in (1, 12)]


def chunks_of(runner: Runner, rows: list[StepRow], chunk: int, beside: list[StepRow]) -> Iterator[list[RowSamples]]:
    """What each of `rows` gives, of which each step runs `chunk` tokens, and `beside` besides."""
    for start in range(0, max(len(row.tokens) for row in rows), chunk):
        cut: list[StepRow] = []
        for row in rows:
            tokens, targets = row.tokens[start : start + chunk], row.targets[start : start + chunk]
            num_read = len(tokens) if row.num_read else 0
            blocks = list(row.blocks)
            if tokens:
                cut.append(StepRow(tokens, start, blocks, 0, row.sampling, 1, num_read=num_read, targets=targets))
        samples = runner.execute(StepPlan(0, [*beside, *cut])).rows
        assert [len(one.tokens) for one in samples] == [1] * len(beside) + [0] * len(cut)
        yield samples[len(beside) :]


def score(
    runner: Runner, prompt: list[int], *, chunk: int = 1 << 30, beside: list[StepRow] | None = None
) -> list[TokenLogprobs]:
    row = StepRow(prompt[:-1], 0, list(range(40)), 0, TOP, 1, num_read=len(prompt) - 1, targets=prompt[1:])
    return [one for results in chunks_of(runner, [row], chunk, beside or []) for one in results[0].scores or []]


def total(runner: Runner, prompt: list[int], *, chunk: int = 1 << 30, beside: list[StepRow] | None = None) -> NDArray[np.int64]:
    row = StepRow(prompt, 0, list(range(40)), 0, GREEDY, len(prompt), num_read=len(prompt))
    sums = [results[0].total for results in chunks_of(runner, [row], chunk, beside or [])]
    return np.sum([one for one in sums if one is not None], axis=0)


@pytest.mark.parametrize("settings", [{}, {"dtype": "auto"}], ids=["float32", "int8"])
def test_neither_chunks_nor_a_batch_change_a_bit(llama: tuple[Any, ModelFiles], settings: dict[str, Any]) -> None:
    runner, prompt = open_runner(llama[1], **settings), oracle_prompt(length=150)
    scores, summed = score(runner, prompt), total(runner, prompt)
    assert len(scores) == 149
    for chunk in (1, 7, 64, 100):
        assert score(runner, prompt, chunk=chunk, beside=OTHERS) == scores, chunk
        assert np.array_equal(total(runner, prompt, chunk=chunk, beside=OTHERS), summed), chunk


@pytest.mark.parametrize("settings", [{}, {"dtype": "auto"}], ids=["float32", "int8"])
def test_scored_and_summed_rows_share_a_step_with_sampled_ones(llama: tuple[Any, ModelFiles], settings: dict[str, Any]) -> None:
    runner, prompt = open_runner(llama[1], **settings), oracle_prompt(length=40)
    summed = StepRow(prompt, 0, [10, 11, 12], 0, GREEDY, 40, num_read=40)
    scored = StepRow(prompt[:-1], 0, [20, 21, 22], 0, TOP, 1, num_read=39, targets=prompt[1:])
    middle = StepRow(prompt, 0, [30, 31, 32], 0, GREEDY, 50)
    sampled = StepRow(prompt, 0, [40, 41, 42], 1, TOP, 40)
    alone = runner.execute(StepPlan(0, [sampled])).rows[0]
    first, second, third, fourth = runner.execute(StepPlan(0, [summed, scored, middle, sampled])).rows
    assert np.array_equal(first.total, total(runner, prompt))  # type: ignore[arg-type]
    assert second.scores == score(runner, prompt)
    assert third == RowSamples(tokens=[])
    assert fourth == alone


def expected_of(model: Any, prompt: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [tokens, vocab] and last hidden states [tokens, hidden]."""
    with torch.inference_mode():
        output = model(torch.tensor([prompt]), output_hidden_states=True)
    return output.logits[0].log_softmax(-1), output.hidden_states[-1][0]


def check(model: Any, runner: Runner, *, length: int, tolerance: float) -> None:
    prompt = oracle_prompt(length=length)
    logprobs, states = expected_of(model, prompt)
    for position, found in enumerate(score(runner, prompt, chunk=50)):
        row, token = logprobs[position], prompt[position + 1]
        assert found.logprob == pytest.approx(row[token].item(), abs=tolerance)
        assert abs(found.rank - 1 - int((row > row[token]).sum())) <= (0 if tolerance < 1e-3 else 30)
        assert list(found.top_logprobs) == pytest.approx(row.topk(3).values.tolist(), abs=tolerance)
        if tolerance < 1e-3:
            assert list(found.top_tokens) == row.topk(3).indices.tolist()
    mean = total(runner, prompt, chunk=50) * FIXED_POINT / length
    assert mean == pytest.approx(states.mean(0).numpy(), abs=tolerance)


def test_they_are_those_of_transformers(llama: tuple[Any, ModelFiles]) -> None:
    check(llama[0], open_runner(llama[1]), length=140, tolerance=2e-4)


def test_with_eight_bits_they_are_close(llama: tuple[Any, ModelFiles]) -> None:
    check(llama[0], open_runner(llama[1], dtype="auto"), length=140, tolerance=0.2)


@pytest.fixture
def as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[ModelFiles], Runner]]:
    monkeypatch.setattr("common.ops.linear.device._choose", lambda *_: Candidate("library"))
    act_as_a_gpu()
    with interpreted():
        yield device_runner


@pytest.mark.slow
def test_a_gpu_reads_what_transformers_says(llama: tuple[Any, ModelFiles], as_a_gpu: Callable[[ModelFiles], Runner]) -> None:
    check(llama[0], as_a_gpu(llama[1]), length=20, tolerance=2e-4)


def test_a_gpu_reads_beside_sampled_rows(llama: tuple[Any, ModelFiles], as_a_gpu: Callable[[ModelFiles], Runner]) -> None:
    runner, prompt = as_a_gpu(llama[1]), oracle_prompt(length=20)
    beside = StepRow(oracle_prompt(seed=9, length=12), 0, [50], 1, TOP, 12)
    alone = runner.execute(StepPlan(0, [beside])).rows[0]
    row = StepRow(prompt[:-1], 0, [1, 2], 0, TOP, 1, num_read=19, targets=prompt[1:])
    scored, sampled = runner.execute(StepPlan(0, [row, beside])).rows
    assert sampled.tokens == alone.tokens
    assert [one.logprob for one in scored.scores or []] == pytest.approx(
        [one.logprob for one in score(runner, prompt)], abs=1e-4
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_card_reads_what_transformers_says(tmp_path: Path) -> None:
    from common.engine.gpu.runner import DeviceRunner
    from common.engine.layer_group import LayerGroup
    from common.models.config import load_config
    from common.models.registry import load_decoder

    model = build("llama")
    files = save(model, tmp_path)
    config, device = load_config(files), torch.device("cuda")
    decoder = load_decoder(files, config, dtype=torch.bfloat16, device=device)
    pool = torch.zeros(64, config.num_layers, 2, 16, config.num_kv_heads, config.head_dim, dtype=torch.bfloat16, device=device)
    runner = DeviceRunner(
        decoder, [LayerGroup(pool, range(config.num_layers))], fingerprint="test", max_rows=16, token_budget=512
    )
    check(model, runner, length=140, tolerance=0.15)


@pytest.mark.parametrize(
    "row",
    [
        StepRow([5, 6], 0, [0], 0, GREEDY, 2, num_read=3),
        StepRow([5, 6], 0, [0], 1, GREEDY, 2, num_read=1),
        StepRow([5, 6], 0, [0], 0, GREEDY, 2, num_read=2, targets=[1]),
        StepRow([5, 6], 0, [0], 0, GREEDY, 2, num_read=1, targets=[1 << 20]),
    ],
)
def test_a_row_that_can_not_be_read_is_refused(llama: tuple[Any, ModelFiles], row: StepRow) -> None:
    with pytest.raises(InvalidParameter):
        open_runner(llama[1]).execute(StepPlan(0, [row]))
