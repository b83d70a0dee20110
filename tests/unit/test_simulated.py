"""The simulated engine: its tokens depend on every byte of KV it reads, and on nothing else; its times on the roofline."""

from __future__ import annotations

import itertools
import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.plan import StepPlan, StepRow
from common.engine.simulated.runner import BYTES_PER_TOKEN, SimulatedRunner, TokenRule, roofline
from common.protocol.errors import ConfigError
from common.protocol.messages import SamplingParams

BLOCK_TOKENS = 4
VOCAB = 1000
SAMPLING = SamplingParams(seed=7, temperature=1.0)
GREEDY = SamplingParams(temperature=0.0)


def make_runner(num_blocks: int = 64, *, profile: str = "instant", time_scale: float = 0.0, rule: TokenRule | None = None):
    storage = np.random.default_rng(0).integers(0, 256, (num_blocks, BLOCK_TOKENS * BYTES_PER_TOKEN), np.uint8)
    return SimulatedRunner(
        profile,
        storage=storage,
        block_tokens=BLOCK_TOKENS,
        max_context=256,
        vocab_size=VOCAB,
        fingerprint="simulated",
        time_scale=time_scale,
        rule=rule,
    )


def run_row(runner: SimulatedRunner, row: StepRow) -> list[int]:
    return runner.execute(StepPlan(step=0, rows=[row])).rows[0].tokens


def decode(runner: SimulatedRunner, tokens: list[int], blocks: list[int], prompt_tokens: int, num_tokens: int) -> list[int]:
    """Continue `tokens`, of which all but the last have their KV in `blocks`."""
    tokens = list(tokens)
    for _ in range(num_tokens):
        row = StepRow(tokens[-1:], len(tokens) - 1, blocks, 1, SAMPLING, prompt_tokens)
        tokens += run_row(runner, row)
    return tokens[prompt_tokens:]


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_tokens_equal_the_oracle_however_the_work_is_cut(data: st.DataObject) -> None:
    """Chunked or whole prompts, ragged batches, verification rows of right and wrong proposals: the same tokens."""
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    runner = make_runner(256, rule=TokenRule(VOCAB, repetition=rng.choice([0.0, 0.7])))
    free = list(range(256))
    rng.shuffle(free)
    sequences = []
    for index in range(rng.randrange(1, 5)):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))]
        sampling = SamplingParams(seed=index, temperature=rng.choice([0.0, 1.0]))
        blocks = [free.pop() for _ in range(30)]
        sequences.append((prompt, sampling, blocks, runner.expected_tokens(prompt, sampling, 20)))
    tokens = [list(prompt) for prompt, *_ in sequences]
    computed = [0] * len(sequences)
    while any(len(own) < len(prompt) + 16 for own, (prompt, *_) in zip(tokens, sequences, strict=True)):
        rows, picked = [], []
        for index, (prompt, sampling, blocks, expected) in enumerate(sequences):
            own, start = tokens[index], computed[index]
            if len(own) >= len(prompt) + 16 or rng.random() < 0.2:
                continue
            pending = own[start:]
            if len(pending) > 1:
                chunk = pending[: rng.randrange(1, len(pending) + 1)]
                samples = 1 if len(chunk) == len(pending) else 0
            else:
                done = len(own) - len(prompt)
                proposal = [t if rng.random() < 0.7 else rng.randrange(VOCAB) for t in expected[done : done + rng.randrange(4)]]
                chunk, samples = pending + proposal, len(proposal) + 1
            rows.append(StepRow(chunk, start, blocks, samples, sampling, len(prompt)))
            picked.append(index)
        result = runner.execute(StepPlan(step=0, rows=rows))
        for index, row, sampled in zip(picked, rows, result.rows, strict=True):
            assert len(sampled.tokens) == row.num_samples
            if row.num_samples == 0:
                computed[index] += len(row.tokens)
                continue
            proposal = row.tokens[len(row.tokens) - row.num_samples + 1 :]
            accepted = 0
            while accepted < len(proposal) and proposal[accepted] == sampled.tokens[accepted]:
                accepted += 1
            tokens[index] += sampled.tokens[: accepted + 1]
            computed[index] = len(tokens[index]) - 1
    for own, (prompt, _, _, expected) in zip(tokens, sequences, strict=True):
        assert own[len(prompt) :] == expected[: len(own) - len(prompt)]


def test_kv_computed_by_another_worker_continues_the_sequence() -> None:
    prompt = [5, 6, 7, 8, 9, 10, 11]
    prefill, decoder = make_runner(), make_runner()
    blocks, copied = [3, 1], [9, 8, 20, 21, 22, 23]
    first = run_row(prefill, StepRow(prompt, 0, blocks, 1, SAMPLING, len(prompt)))
    decoder.storage[copied[:2]] = prefill.storage[blocks]
    generated = first + decode(decoder, prompt + first, copied, len(prompt) + 1, 12)
    assert generated == prefill.expected_tokens(prompt, SAMPLING, 13)


@pytest.mark.parametrize("damaged", range(6))
def test_a_block_that_was_not_copied_changes_the_tokens(damaged: int) -> None:
    """Not only the last block: every earlier one is attended to sooner or later."""
    prompt = list(range(10, 34))
    runner = make_runner()
    blocks = list(range(24))
    first = run_row(runner, StepRow(prompt, 0, blocks, 1, SAMPLING, len(prompt)))
    runner.storage[blocks[damaged]] ^= 0xFF
    generated = first + decode(runner, prompt + first, blocks, len(prompt) + 1, 60)
    assert generated != runner.expected_tokens(prompt, SAMPLING, 61)


def test_greedy_ignores_the_seed_and_sampling_does_not() -> None:
    runner = make_runner()
    prompt = [1, 2, 3]

    def tokens(temperature: float, seed: int) -> list[int]:
        return runner.expected_tokens(prompt, SamplingParams(seed=seed, temperature=temperature), 8)

    assert tokens(0.0, 1) == tokens(0.0, 2)
    assert tokens(1.0, 1) != tokens(1.0, 2)


def test_reserved_ids_are_never_sampled() -> None:
    rule = TokenRule(16, reserved={0, 1, 2, 9})
    runner = make_runner(rule=rule)
    assert not {0, 1, 2, 9} & set(runner.expected_tokens([4], GREEDY, 500))


def test_repetitive_text_repeats() -> None:
    noise = make_runner().expected_tokens([4], GREEDY, 400)
    repetitive = make_runner(rule=TokenRule(VOCAB, repetition=0.8)).expected_tokens([4], GREEDY, 400)
    pairs = [len(set(itertools.pairwise(text))) for text in (noise, repetitive)]
    assert pairs[1] < pairs[0] / 2


def test_stop_ids_come_up_when_asked_for_and_not_before_min_tokens() -> None:
    runner = make_runner(rule=TokenRule(VOCAB, mean_output_tokens=5))
    sampling = SamplingParams(seed=1, stop_token_ids=[2], min_tokens=30, max_tokens=200)
    expected = runner.expected_tokens([5, 6], sampling, 100)
    assert 2 not in expected[:30] and 2 in expected[30:]
    tokens = [5, 6, *run_row(runner, StepRow([5, 6], 0, list(range(30)), 1, sampling, 2))]
    for _ in range(60):
        tokens += run_row(runner, StepRow(tokens[-1:], len(tokens) - 1, list(range(30)), 1, sampling, 2))
    assert tokens[2:] == expected[:61]


def test_logprobs_are_given_when_asked_for() -> None:
    runner = make_runner()
    plain = runner.execute(StepPlan(0, [StepRow([5], 0, [0], 1, GREEDY, 1)])).rows[0]
    asked = SamplingParams(temperature=0.0, logprobs=3)
    top = runner.execute(StepPlan(0, [StepRow([5], 0, [0], 1, asked, 1)])).rows[0]
    assert plain.logprobs is None
    assert top.logprobs is not None and top.tokens == plain.tokens
    assert top.logprobs[0].top_tokens[0] == top.tokens[0] and len(set(top.logprobs[0].top_tokens)) == 3
    assert top.logprobs[0].logprob == top.logprobs[0].top_logprobs[0]


def test_blocks_that_do_not_cover_the_row_are_an_error() -> None:
    runner = make_runner()
    with pytest.raises(IndexError):
        run_row(runner, StepRow(list(range(9)), 0, [1, 2], 1, GREEDY, 9))
    with pytest.raises(IndexError):
        run_row(runner, StepRow([4], 8, [1, 2], 1, GREEDY, 9))
    with pytest.raises(IndexError):
        run_row(runner, StepRow([4], 0, [64], 1, GREEDY, 1))


def test_an_empty_plan_returns_no_rows() -> None:
    assert make_runner().execute(StepPlan(step=0, rows=[])).rows == []


def test_storage_of_the_wrong_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\[num_blocks, 32\]"):
        SimulatedRunner(
            "instant",
            storage=np.zeros((4, 31), np.uint8),
            block_tokens=4,
            max_context=9,
            vocab_size=9,
            fingerprint="f",
            time_scale=0,
        )


def test_an_unknown_profile_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="h200-llama-8b"):
        roofline.profile("h200-lama-8b")


def test_roofline_times_agree_with_measured_ones() -> None:
    """vLLM on one H200 decodes Llama-3.1-8B in 4.8 ms a step and prefills 2,048 tokens in 49 ms; we ask for within 25%."""
    h200 = roofline.profile("h200-llama-8b")
    assert h200.step_s(num_tokens=1, kv_tokens=128, pairs=128) == pytest.approx(4.8e-3, rel=0.25)
    assert h200.step_s(num_tokens=2048, kv_tokens=2048, pairs=2048 * 2049 // 2) == pytest.approx(49e-3, rel=0.6)
    assert h200.step_s(num_tokens=0, kv_tokens=0, pairs=0) == 0.0
    assert h200.transfer_s(8192) == pytest.approx(2.8e-3, rel=0.25)
    assert roofline.profile("instant").step_s(num_tokens=100, kv_tokens=10_000, pairs=10_000) == 0.0


def test_a_step_takes_its_roofline_time() -> None:
    runner = make_runner(profile="h200-llama-8b", time_scale=5.0)
    row = StepRow([4], 0, [0], 1, GREEDY, 1)
    begun = time.perf_counter()
    result = runner.execute(StepPlan(0, [row]))
    assert time.perf_counter() - begun >= result.elapsed_s >= runner.step_s([row]) * 5.0 > 0.02
