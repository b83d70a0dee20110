"""The real model: greedy text equals transformers' on the same GGUF file, whatever the prompt's length and the batch."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from common.engine.plan import Runner
from common.models.source import ModelFiles
from tests.fixtures.slow import some_slow
from tests.models.driver import Request, logits_of_first, open_runner, run
from tests.models.oracles import greedy_choices

TEXT = (
    "The harbour lay quiet under a sky the colour of slate. Nobody had expected the ship to come back, least of all the "
    "old woman who kept the lamp: she counted 17 sails, then 18, and wrote both numbers into her book. "
)


@pytest.fixture(scope="module")
def runner(smollm2: ModelFiles) -> Runner:
    return open_runner(smollm2, num_blocks=1200)


def text_tokens(smollm2: ModelFiles, length: int, seed: int) -> list[int]:
    """`length` tokens of plain text that begins somewhere in `TEXT`."""
    from common.text.tokenizer import load_tokenizer

    tokens = load_tokenizer(smollm2).encode(TEXT * 40, add_special=False)
    start = random.Random(seed).randrange(60)
    return tokens[start : start + length]


@pytest.mark.parametrize("length", some_slow([1, 2, 16, 129, 512, 1500], quick=(1, 2, 16, 129)))
def test_greedy_text_is_that_of_transformers(
    smollm2_in_transformers: Any, runner: Runner, smollm2: ModelFiles, length: int
) -> None:
    prompt = text_tokens(smollm2, length, seed=length)
    output = run(runner, [Request(prompt, 12)])[0]
    assert output == greedy_choices(smollm2_in_transformers, prompt, output)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_batch_of_32_that_starts_and_ends_raggedly(smollm2_in_transformers: Any, runner: Runner, smollm2: ModelFiles) -> None:
    rng = random.Random(7)
    requests = [
        Request(
            text_tokens(smollm2, rng.choice([1, 5, 17, 40, 70, 140]), seed=i),
            rng.randrange(3, 12),
            chunk=rng.choice([1 << 30, 16, 50]),
            begins=rng.randrange(8),
        )
        for i in range(32)
    ]
    for request, output in zip(requests, run(runner, requests, seed=1), strict=True):
        assert output == greedy_choices(smollm2_in_transformers, request.prompt, output), len(request.prompt)


@pytest.mark.slow
def test_logits_have_the_same_bits_alone_in_a_batch_in_chunks_and_on_two_threads(runner: Any, smollm2: ModelFiles) -> None:
    prompt = text_tokens(smollm2, 270, seed=5)
    threads = torch.get_num_threads()
    try:
        alone = logits_of_first(runner, [Request(prompt, 4)])
        assert torch.equal(logits_of_first(runner, [Request(prompt, 4, chunk=100)]), alone)
        torch.set_num_threads(2)
        others = [Request(text_tokens(smollm2, 3 + 11 * i, seed=i), 4) for i in range(12)]
        assert torch.equal(logits_of_first(runner, [Request(prompt, 4), *others]), alone)
    finally:
        torch.set_num_threads(threads)


def test_loading_tells_how_far_it_is(smollm2: ModelFiles) -> None:
    from common.models.config import load_config
    from common.models.registry import load_decoder

    seen: list[tuple[int, int]] = []
    load_decoder(
        smollm2,
        load_config(smollm2),
        dtype=torch.float32,
        device=torch.device("cpu"),
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > smollm2.path.stat().st_size * 0.9
