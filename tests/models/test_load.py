"""Configurations and layouts: what a model needs is known before torch is imported, and named when it is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.engine.load.runners import EngineConfig, cache_layout, load_runner, resolve_device
from common.engine.plan import StepPlan, StepRow
from common.models.config import ModelConfig, config_from_gguf, config_from_json, load_config
from common.models.source import ModelFiles
from common.protocol.errors import ConfigError
from tests.models.driver import GREEDY
from tests.models.oracles import build, save

JSON: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 128_000,
    "eos_token_id": 128_001,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
}


def test_llama_3_as_published() -> None:
    config = config_from_json(JSON, {"eos_token_id": [128_001, 128_008, 128_009]})
    assert (config.head_dim, config.num_kv_heads, config.qk_norm) == (128, 8, False)
    assert (config.rope.type, config.rope.theta, config.rope.original_max_context) == ("llama3", 500_000.0, 8192)
    assert config.eos_ids == [128_001, 128_008, 128_009]


def test_qwen3_has_its_own_head_size_and_qk_norm() -> None:
    config = config_from_json({**JSON, "model_type": "qwen3", "hidden_size": 1024, "rope_scaling": None})
    assert (config.head_dim, config.qk_norm, config.rope.type) == (128, True, "default")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "'mamba' is not supported"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"hidden_size": None}, "no hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"num_key_value_heads": 5}, "32 attention heads can't share 5"),
        ({"head_dim": 63}, "no halves"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"partial_rotary_factor": 0.5}, "part of the head"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_what_the_decoder_has_not_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_json({**JSON, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "starcoder"}, "'starcoder' is not supported"),
        ({"llama.block_count": None}, "no block_count"),
        ({"llama.expert_count": 8}, "expert_used_count"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.rope.dimension_count": 32}, "part of the head"),
        ({"llama.rope.dimension_count": 96}, "does not fit a head of 64"),
    ],
)
def test_what_the_decoder_has_not_is_named_for_gguf_too(changes: dict[str, Any], message: str) -> None:
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 512,
        "llama.embedding_length": 256,
        "llama.feed_forward_length": 512,
        "llama.attention.head_count": 4,
        "tokenizer.ggml.tokens": ["a", "b"],
    }
    assert config_from_gguf(metadata).vocab_size == 2
    with pytest.raises(ConfigError, match=message):
        config_from_gguf({**metadata, **changes})


def test_smollm2_is_read_from_its_gguf_metadata(smollm2: ModelFiles) -> None:
    config = load_config(smollm2)
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim) == (
        30,
        576,
        9,
        3,
        64,
    )
    assert (config.vocab_size, config.max_context, config.rope.theta) == (49_152, 8192, 100_000.0)
    assert (config.bos_id, config.eos_ids) == (1, [2])
    layout = cache_layout(config, EngineConfig(dtype="float32", kv_cache_mb=90))
    assert (layout.block_bytes, layout.num_blocks) == (16 * 30 * 2 * 3 * 64 * 4, 128)


@pytest.fixture
def model(tmp_path: Path) -> tuple[ModelFiles, ModelConfig]:
    files = save(build("llama", head_dim=32), tmp_path)  # FP8 KV on a GPU refuses heads of 16
    return files, load_config(files)


def test_a_fingerprint_names_weights_precision_and_layout(model: tuple[ModelFiles, ModelConfig]) -> None:
    files, config = model
    plain = cache_layout(config, EngineConfig(dtype="float32"))
    same = EngineConfig(dtype="float32", num_blocks=7, threads=3)
    assert plain.fingerprint == cache_layout(load_config(files), same).fingerprint
    others = [
        cache_layout(config, EngineConfig(dtype="bfloat16")),
        cache_layout(config, EngineConfig(dtype="float32", block_tokens=32)),
        cache_layout(config, EngineConfig(dtype="float32", engine="simulated")),
        cache_layout(config, EngineConfig(dtype="float32", load_format="dummy")),
        cache_layout(config, EngineConfig(dtype="bfloat16"), "cuda:0"),
        cache_layout(config, EngineConfig(dtype="bfloat16", kv_cache_dtype="fp8"), "cuda:0"),
        cache_layout(config, EngineConfig(dtype="bfloat16", quantization="fp8"), "cuda:0"),
        cache_layout(config, EngineConfig(dtype="bfloat16", quantization="fp8"), "cuda:0", fp8_choice="one"),
        cache_layout(config, EngineConfig(dtype="bfloat16", quantization="fp8"), "cuda:0", fp8_choice="another"),
    ]
    path = files.path / "model.safetensors"
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    others.append(cache_layout(load_config(files), EngineConfig(dtype="float32")))
    # bfloat16 on a CPU and on a GPU is one precision
    assert len({plain.fingerprint, *(other.fingerprint for other in others)}) == len(others)


def test_fp8_kv_of_heads_too_narrow_for_the_kernels_is_an_error_on_a_gpu(tmp_path: Path) -> None:
    narrow = load_config(save(build("llama"), tmp_path))
    engine = EngineConfig(dtype="bfloat16", kv_cache_dtype="fp8")
    with pytest.raises(ConfigError, match="more than 16 numbers, and this model's have 16") as error:
        cache_layout(narrow, engine, "cuda:0")
    assert error.value.param == "kv_cache_dtype"
    cache_layout(narrow, EngineConfig(dtype="bfloat16"), "cuda:0")


def test_impossible_settings_are_errors(model: tuple[ModelFiles, ModelConfig]) -> None:
    files, config = model
    with pytest.raises(ConfigError, match="float16"):
        cache_layout(config, EngineConfig(dtype="float16"))
    for device in ("tpu", "cuda:", "cuda:99", "cuda:x"):
        with pytest.raises(ConfigError, match=device):
            resolve_device(EngineConfig(device=device))
    with pytest.raises(ConfigError, match="1 MiB for KV hold no block"):
        cache_layout(config, EngineConfig(kv_cache_mb=1, block_tokens=100_000))
    with pytest.raises(ConfigError, match="KV memory"):
        load_runner(files, EngineConfig(), [np.zeros((4, 100), np.uint8)])
    (files.path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_config(files)


def test_a_simulated_engine_needs_no_weights(model: tuple[ModelFiles, ModelConfig]) -> None:
    files, config = model
    engine = EngineConfig(engine="simulated", num_blocks=4)
    layout = cache_layout(config, engine)
    runner = load_runner(files, engine, [np.zeros((4, layout.block_bytes), np.uint8)])
    assert (runner.vocab_size, runner.fingerprint) == (256, layout.fingerprint)
    assert len(runner.execute(StepPlan(0, [StepRow([5], 0, [1], 1, GREEDY, 1)])).rows[0].tokens) == 1


def test_layouts_are_known_without_torch() -> None:
    program = "import sys, common.engine.load.runners, common.models.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
