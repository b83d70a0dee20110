"""The decoder equals transformers on tiny models: greedy tokens alone, in a ragged batch, and cut into chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.models.source import ModelFiles
from tests.models.driver import Request, open_runner, run
from tests.models.oracles import GREEDY, ORACLES, build, greedy_choices, oracle_prompt, save


@pytest.fixture(scope="module", params=list(ORACLES))
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ModelFiles, str]:
    model = build(request.param)
    return model, save(model, tmp_path_factory.mktemp(request.param)), request.param


def test_greedy_text_is_that_of_transformers(oracle: tuple[Any, ModelFiles, str]) -> None:
    model, files, name = oracle
    runner = open_runner(files)
    prompt = oracle_prompt()
    output = run(runner, [Request(prompt, 24)])[0]
    assert output == greedy_choices(model, prompt, output)
    assert output[:4] == GREEDY.get(name, output[:4])


def test_a_ragged_batch_in_chunks_gives_the_same_text(oracle: tuple[Any, ModelFiles, str]) -> None:
    model, files, _ = oracle
    runner = open_runner(files)
    lengths = [1, 2, 15, 16, 17, 53, 100, 127, 128, 129, 255, 256, 300, 450]
    requests = [
        Request(oracle_prompt(seed=i, length=length), 5 + 3 * (i % 7), chunk=(1 << 30, 7, 64, 1)[i % 4], begins=i % 5)
        for i, length in enumerate(lengths)
    ]
    for request, output in zip(requests, run(runner, requests), strict=True):
        assert output == greedy_choices(model, request.prompt, output), len(request.prompt)


def test_shards_load_like_one_file(tmp_path: Path) -> None:
    model = build("qwen3")
    files = save(model, tmp_path, shard_bytes=100_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    prompt = oracle_prompt()
    assert run(open_runner(files), [Request(prompt, 4)])[0] == GREEDY["qwen3"]


@pytest.mark.parametrize("block_tokens", [1, 5, 16, 32, 256])
def test_any_block_size_gives_the_same_text(tmp_path: Path, block_tokens: int) -> None:
    files = save(build("llama"), tmp_path)
    runner = open_runner(files, block_tokens=block_tokens)
    assert run(runner, [Request(oracle_prompt(), 4, chunk=20)])[0] == GREEDY["llama"]


def test_bfloat16_runs_and_stays_close(tmp_path: Path) -> None:
    model = build("llama")
    runner = open_runner(save(model, tmp_path), dtype="bfloat16")
    prompt = oracle_prompt()
    output = run(runner, [Request(prompt, 8), Request(prompt[:20], 3, chunk=6)])[0]
    agreed = sum(a == b for a, b in zip(output, greedy_choices(model, prompt, output), strict=True))
    assert agreed >= 6
