"""Every family and format on a card: the kernels as compiled, in CUDA graphs, a step ahead of the host.

Tests of the interpreted kernels (`test_device_runner`) ask the same of the arithmetic; these ask it of the compiler, of graphs
and of streams.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GptOssConfig

from bench.engine.driver import Driver
from bench.engine.driver import Request as Ahead
from common.engine.gpu.runner import DeviceRunner
from common.engine.load.layout import EngineConfig
from common.engine.load.runners import load_runner
from common.engine.plan import Runner
from common.models.config import load_config
from common.models.shapes import byte_tokenizer
from common.models.source import ModelFiles
from common.protocol.errors import ConfigError
from common.protocol.messages import SamplingParams
from tests.models import test_weights_experts, test_weights_groups
from tests.models.driver import Request, run
from tests.models.oracles import build, greedy_choices, oracle_prompt, save
from tests.models.test_device_runner import FAMILIES

LENGTHS = (61, 44, 130, 1, 17)
"""Of prompts: longer and shorter than windows, chunks and blocks."""
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(autouse=True)
def untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which candidate is fastest is not asked, which would take most of the time."""
    nothing: Any = SimpleNamespace(seconds={}, failed={})
    monkeypatch.setattr("common.ops.linear.linear_tuning.tune_linears", lambda *_, **__: nothing)
    monkeypatch.setattr("common.ops.moe.experts_tuning.tune_experts", lambda *_, **__: nothing)


def on_gpu(files: ModelFiles, **settings: Any) -> Runner:
    given = {"dtype": "float32", "quantization": "none", "num_blocks": 400, "max_running": 16, "token_budget": 512, **settings}
    return load_runner(files, EngineConfig(device="cuda", **given))


def oracle(name: str) -> Any:
    """transformers before 5.20 keep gpt-oss' limit to themselves."""
    changes: dict[str, Any] = {"swiglu_limit": 7.0} if name == "gpt-oss" else {}
    return build(name, **changes)


def ahead(runner: Runner, seed: int = 0) -> list[Ahead]:
    """A decode worker's steps: prompts in chunks of 64 tokens beside rows that decode, planned a step ahead."""
    requests = [Ahead(oracle_prompt(seed=i + seed, length=length), 12) for i, length in enumerate(LENGTHS)]
    Driver(runner, token_budget=64, max_rows=16).generate(requests)
    return requests


@pytest.mark.parametrize("name", ["llama", "qwen3", *FAMILIES])
def test_the_text_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    model = oracle(name)
    runner = on_gpu(save(model, tmp_path))
    for request in ahead(runner):
        assert request.output == greedy_choices(model, request.prompt, request.output), len(request.prompt)
    assert runner._continuing._graphs, "no step continued the one before"  # type: ignore[attr-defined]
    requests = [
        Request(oracle_prompt(seed=i, length=n), 8, chunk=(1 << 30, 24)[i % 2], begins=i) for i, n in enumerate(LENGTHS)
    ]
    for request, output in zip(requests, run(runner, requests), strict=True):
        assert output == greedy_choices(model, request.prompt, output), len(request.prompt)


@pytest.mark.parametrize("name", ["llama", *FAMILIES])
@pytest.mark.parametrize("kv", ["auto", "fp8"])
def test_bfloat16_gives_nearly_the_logits_of_float32(name: str, kv: str, tmp_path: Path) -> None:
    """Log-probabilities of the same text; FP8 KV is coarse for random weights."""
    model, files = oracle(name), save(oracle(name), tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_tokenizer(256)))  # what FP8 costs is measured on text
    if kv == "fp8" and load_config(files).layers[0].mixer.head_dim <= 16:
        with pytest.raises(ConfigError, match="heads of more than 16"):
            on_gpu(files, dtype="bfloat16", kv_cache_dtype=kv)
        return
    runner = on_gpu(files, dtype="bfloat16", kv_cache_dtype=kv, quantization_max_loss=0.0)
    requests = [Ahead(oracle_prompt(seed=i, length=60), 8, SamplingParams(temperature=0.0, logprobs=0)) for i in range(3)]
    Driver(runner, token_budget=64, max_rows=16).generate(requests)
    for request in requests:
        text = torch.tensor([request.prompt + request.output[:-1]])
        with torch.no_grad():
            expected = model(text, use_cache=False).logits[0, len(request.prompt) - 1 :].log_softmax(-1)
        for place, (token, found) in enumerate(zip(request.output, request.logprobs, strict=True)):
            assert found.logprob == pytest.approx(float(expected[place, token]), abs=0.5 if kv == "fp8" else 0.15)


@pytest.mark.parametrize("name", test_weights_groups.FORMATS)
def test_weights_in_groups_give_the_text_of_the_dequantised_model(name: str, tmp_path: Path) -> None:
    checkpoint = test_weights_groups.Checkpoint(tmp_path, name)
    found, meant = (ahead(on_gpu(files, quantization="auto")) for files in (checkpoint.files, checkpoint.meant_files))
    assert [request.output for request in found] == [request.output for request in meant]


@pytest.mark.parametrize("name", test_weights_experts.CASES)
def test_experts_in_groups_give_the_text_of_transformers(name: str, tmp_path: Path) -> None:
    if name.startswith("gpt-oss") and not hasattr(GptOssConfig(), "swiglu_limit"):
        pytest.skip("transformers keep the limit to themselves")
    checkpoint = test_weights_experts.Checkpoint(tmp_path, name)
    model = checkpoint.transformers()
    for request in ahead(on_gpu(checkpoint.files, quantization="auto")):
        assert request.output == greedy_choices(model, request.prompt, request.output), len(request.prompt)


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4"])
@pytest.mark.parametrize("upload_bytes", [0, 1 << 20])
def test_block_tables_that_stay_on_the_card_are_those_of_the_rows(
    name: str, upload_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every cache group, for requests that come one after the other; upload_bytes: of a step's upload, for what is new."""
    monkeypatch.setattr("common.engine.gpu.runner.MAX_CHANGE_BYTES", upload_bytes)
    model = oracle(name)
    runner = on_gpu(save(model, tmp_path))
    assert isinstance(runner, DeviceRunner)
    for seed in range(3):
        for request in ahead(runner, seed):
            assert request.output == greedy_choices(model, request.prompt, request.output), len(request.prompt)
    torch.cuda.synchronize()
    tables = runner._tables
    assert not tables.slots.has_changed
    assert tables.slots.ids.any()
    assert torch.equal(tables.ids.cpu(), torch.from_numpy(tables.slots.ids).clamp(min=0))
