"""The decoder equals transformers on tiny models: greedy tokens alone, in a ragged batch, in chunks, and behind prefixes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.models.config import load_config
from common.models.source import ModelFiles
from common.models.weights.errors import WeightsError
from common.models.weights.inventory import take_inventory
from tests.models.driver import Request, open_runner, run, seen_logits
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


def test_a_prefix_that_another_request_computed_gives_the_same_text(oracle: tuple[Any, ModelFiles, str]) -> None:
    model, files, _ = oracle
    runner = open_runner(files)
    first = Request(oracle_prompt(length=64), 1, chunk=40)
    run(runner, [first])
    second = Request(first.prompt + oracle_prompt(seed=5, length=9), 8, tables=first.tables, computed=64)
    output = run(runner, [second])[0]
    assert output == greedy_choices(model, second.prompt, output)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mistral", {"sliding_window": None}),
        ("qwen2-windows-in-last-layers", {"use_sliding_window": False, "layer_types": None}),
        ("gemma2", {"sliding_window": 400}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma2", {"query_pre_attn_scalar": 32}),
        ("gemma3", {"sliding_window": 400}),
        ("gemma3", {"layer_types": ["full_attention"] * 3}),
        ("phi3-longrope", {"sliding_window": None}),
        ("phi3-longrope", {"max_position_embeddings": 300}),
        ("qwen3-moe", {"norm_topk_prob": False}),
        ("gpt-oss", {"sliding_window": 400}),
        ("gpt-oss", {"swiglu_limit": 70.0}),
        ("llama4", {"attention_chunk_size": 400}),
        ("llama4", {"floor_scale": 8192}),
        ("llama4-norms-of-q-and-k", {"use_qk_norm": False}),
    ],
)
def test_logits_are_those_of_transformers_and_show_each_setting(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = build(name)
    files, prompt = save(model, tmp_path), oracle_prompt(length=90)

    def logits() -> torch.Tensor:
        runner = open_runner(files)
        with seen_logits(runner) as seen:
            run(runner, [Request(prompt, 1, chunk=64)])
        return seen[-1][0]

    with torch.no_grad():
        expected = model(torch.tensor([prompt]), use_cache=False).logits[0, -1]
    assert torch.allclose(logits(), expected, atol=1e-4, rtol=1e-4)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert not torch.allclose(logits(), expected, atol=1e-3, rtol=1e-3)


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


def test_layers_that_only_draft_are_passed_over(tmp_path: Path) -> None:
    """GLM-4.5's files have them behind the decoder's, under the next numbers."""
    model = build("glm4-moe")
    files = save(model, tmp_path)
    path, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    behind = f"model.layers.{model.config.num_hidden_layers}"
    drafting = {f"{behind}.eh_proj.weight": torch.ones(64, 128), f"{behind}.self_attn.q_proj.weight": torch.ones(2, 2)}
    save_file(load_file(path) | drafting, path)
    prompt = oracle_prompt(length=20)
    output = run(open_runner(files), [Request(prompt, 4)])[0]
    assert output == greedy_choices(model, prompt, output)
    assert take_inventory(files, load_config(files)).others > 0
    config.write_text(json.dumps(json.loads(config.read_bytes()) | {"num_nextn_predict_layers": 0}))
    for refused in (lambda: open_runner(files), lambda: take_inventory(files, load_config(files))):
        with pytest.raises(WeightsError, match=r"tensors that this model does not have: model\.layers\.3\.eh_proj"):
            refused()
