"""Keys of config.json: what changes nothing is accepted, what nobody reads is an error that names it, and nothing in a file
is a traceback or a hang."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.models.config import check_config_file, config_from_gguf, config_from_json
from common.models.families.registry import JSON_FAMILIES
from common.models.spec import ModelSpec
from common.protocol.errors import ConfigError

SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"max_position_embeddings": 512}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
EXTREMES: list[Any] = [0, -1, 1, "x", [], [1], [[1]], [{}], {}, {"a": 1}, True, False, 2**31, 10**400, 0.5, 1e308, float("nan")]


def tiny(family: str, **changes: Any) -> ModelSpec:
    return config_from_json({"model_type": family, **SIZES, **changes})


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("gemma2", {"sliding_window": 64, "sliding_window_size": 64}),
        ("llama", {"is_llama_config": True, "rope_interleaved": False}),
        ("llama", {"max_sequence_length": 512}),
        ("llama", {"_flash_attn_2_enabled": True, "num_labels": 2, "neftune_noise_alpha": 5}),
        ("llama", {"use_qk_norm": False}),
        ("qwen3", {"use_qk_norm": True}),
        ("qwen3_moe", {"use_qk_norm": True, "qkv_bias": False, "shared_expert_intermediate_size": 0}),
        ("qwen3", {"rope_scaling": {**YARN, "attn_factor": 0.8782488562869419}}),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0, "attn_factor": 1.0}}),
    ],
)
def test_a_key_that_changes_nothing_is_accepted(family: str, keys: dict[str, Any]) -> None:
    without = {"rope_scaling": {name: value for name, value in keys.get("rope_scaling", {}).items() if name != "attn_factor"}}
    assert tiny(family, **keys) == tiny(family, sliding_window=keys.get("sliding_window"), **without)


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("gemma2", {"sliding_window": 64, "sliding_window_size": 32}, "sliding_window_size in config.json is 32, but .* is 64"),
        ("llama", {"is_llama_config": 2}, "sets is_llama_config"),
        ("llama", {"rope_interleaved": True}, "sets rope_interleaved"),
        ("llama", {"max_sequence_length": 256}, "max_sequence_length in config.json is 256, but .* is 512"),
        ("llama", {"use_qk_norm": True}, "sets use_qk_norm"),
        ("qwen3", {"use_qk_norm": False}, "use_qk_norm False is not supported"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0, "attn_factor": 0.9}}, "sets attn_factor"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
        ("llama", {"rope_scaling": {**LONGROPE, "type": "su"}}, "rope type 'su' is not supported"),
    ],
)
def test_a_key_that_would_change_something_is_named(family: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny(family, **keys)


def test_the_first_name_of_longrope_means_the_same() -> None:
    long = {"original_max_position_embeddings": 128, "rope_scaling": LONGROPE}
    early = {"original_max_position_embeddings": 128, "rope_scaling": {**LONGROPE, "type": "su"}}
    assert tiny("phi3", **early) == tiny("phi3", **long)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({**YARN, "rope_theta": 1}, "rope_theta .* more than 1 for YaRN"),
        ({"rope_type": "default", "rope_theta": 0}, "rope_theta .* more than 0"),
        ({"rope_type": "linear", "factor": 0}, "factor .* more than 0, not 0"),
        ({**YARN, "factor": -2.0}, "factor .* more than 0, not -2"),
        ({**YARN, "beta_fast": 0}, "beta_fast .* more than 0"),
        ({**YARN, "attention_factor": -1.0}, "no scale above 0"),
        ({**YARN, "mscale": 1.0, "mscale_all_dim": -10 / 1.3862943611198906}, "no scale above 0"),
        ({**YARN, "factor": 1e300}, "reaches more than"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 0}, "low_freq_factor .* more than 0"),
        ({"rope_type": ["yarn"]}, "rope type .* is not supported"),
    ],
)
def test_rotary_parameters_without_a_meaning_are_refused(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny("llama", rope_parameters=rope)


def test_yarn_of_gguf_metadata_without_a_meaning_is_refused() -> None:
    named = {"block_count": 2, "embedding_length": 64, "feed_forward_length": 128, "attention.head_count": 4}
    named |= {"context_length": 512, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    metadata = {"general.architecture": "llama", "llama.vocab_size": 9} | {f"llama.{key}": one for key, one in named.items()}
    assert config_from_gguf(metadata).rope.type == "yarn"
    with pytest.raises(ConfigError, match="more than 1 for YaRN"):
        config_from_gguf({**metadata, "llama.rope.freq_base": 1.0})
    with pytest.raises(ConfigError, match=r"factor .* more than 0"):
        config_from_gguf({**metadata, "llama.rope.scaling.factor": -4.0})
    with pytest.raises(ConfigError, match=r"rope scaling \[\] is not supported"):
        config_from_gguf({**metadata, "llama.rope.scaling.type": []})
    with pytest.raises(ConfigError, match=r"block_count .* at most 10,000"):
        config_from_gguf({**metadata, "llama.block_count": 10**9})


@pytest.mark.parametrize("name", ["num_hidden_layers", "vocab_size", "hidden_size", "max_position_embeddings"])
def test_absurd_sizes_are_refused_before_anything_is_built(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} in config.json must be at most"):
        tiny("llama", **{name: 10**10})


@pytest.mark.parametrize("family", JSON_FAMILIES)
def test_no_value_is_a_traceback(family: str) -> None:
    """Each key that the families read, with each value that is not what is expected."""
    keys = {
        *SIZES,
        "head_dim",
        "num_key_value_heads",
        "rms_norm_eps",
        "hidden_act",
        "layer_types",
        "sliding_window",
        "moe_layers",
    }
    keys |= {"rope_theta", "rope_scaling", "rope_parameters", "query_pre_attn_scalar", "max_window_layers", "mlp_only_layers"}
    keys |= {
        "num_experts",
        "num_experts_per_tok",
        "no_rope_layers",
        "eos_token_id",
        "attn_logit_softcapping",
        "sliding_window_size",
    }
    keys |= {"partial_rotary_factor", "rope_local_base_freq", "use_sliding_window", "tie_word_embeddings", "draft_vocab_size"}
    for key in sorted(keys):
        for value in EXTREMES:
            try:
                tiny(family, **{"use_sliding_window": True, key: value})
            except ConfigError as error:
                assert len(str(error)) < 800


@pytest.mark.parametrize("depth", [200, 100_000])
def test_a_file_that_is_nested_too_deeply_is_one_error(tmp_path: Path, depth: int) -> None:
    path = tmp_path / "config.json"
    config = json.dumps({"model_type": "llama", **SIZES})[:-1]
    path.write_text(f'{config}, "odd": {"[" * depth}{"]" * depth}}}')
    with pytest.raises(ConfigError, match="nested more than 100 levels deep"):
        check_config_file(path)
