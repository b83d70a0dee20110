"""What a config.json leaves out, or says twice, means what it means to transformers, or is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from common.models.config import config_from_gguf, config_from_json
from common.models.spec import ModelSpec
from common.protocol.errors import ConfigError
from tests.models.driver import Request, open_runner, run
from tests.models.oracles import build, greedy_choices, oracle_prompt, save

CLASSES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3Text", "Phi3")
CLASSES += ("Olmo2", "Olmo3", "SmolLM3", "Glm4", "Mixtral", "Qwen3Moe", "GptOss", "Llama4Text")
TINY = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY |= {"max_position_embeddings": 512}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def tiny(family: str, **changes: Any) -> ModelSpec:
    return config_from_json({"model_type": family, **TINY, **changes})


@pytest.mark.parametrize("key", ["rms_norm_eps", "sliding_window", "rope_parameters", "hidden_act", "tie_word_embeddings"])
@pytest.mark.parametrize("name", CLASSES)
def test_a_key_left_out_is_what_transformers_takes_it_for(name: str, key: str) -> None:
    whole = getattr(transformers, f"{name}Config")().to_dict()
    assert config_from_json({one: value for one, value in whole.items() if one != key}) == config_from_json(whole)


def test_a_window_of_null_is_none_and_one_left_out_is_mistrals() -> None:
    sizes = {"max_position_embeddings": 32_768}
    assert [layer.mixer.window for layer in tiny("mistral", sliding_window=None, **sizes).layers] == [0, 0]
    assert [layer.mixer.window for layer in tiny("mistral", **sizes).layers] == [4096, 4096]


def test_the_published_file_of_smollm3_says_more_than_transformers_reads() -> None:
    unread = {"max_window_layers": 28, "pretraining_tp": 2, "sliding_window": None, "use_sliding_window": False}
    assert tiny("smollm3", **unread) == tiny("smollm3")
    assert tiny("smollm3", sliding_window=20) == tiny("smollm3"), "not used"
    model = tiny("smollm3", num_hidden_layers=4, sliding_window=20, use_sliding_window=True)
    assert [(layer.mixer.window, layer.mixer.rope is None) for layer in model.layers] == [(0, False)] * 3 + [(20, True)]


def test_olmo3_scales_the_positions_of_layers_without_a_window_in_files_of_transformers_4_too() -> None:
    scaled = {**YARN, "attention_factor": 1.2}
    local = {"rope_type": "default", "rope_theta": 1e6}
    new = {"full_attention": {**scaled, "rope_theta": 1e6}, "sliding_attention": local}
    old = tiny("olmo3", num_hidden_layers=4, rope_theta=1e6, rope_scaling=scaled)
    assert old == tiny("olmo3", num_hidden_layers=4, rope_parameters=new)
    types = [layer.mixer.rope and layer.mixer.rope.type for layer in old.layers]
    assert types == ["default"] * 3 + ["yarn"]


def test_a_window_of_qwen3_moe_is_in_every_layer(tmp_path: Path) -> None:
    model = build("qwen3-moe", use_sliding_window=True, sliding_window=20)
    runner = open_runner(save(model, tmp_path))
    request = Request(oracle_prompt(), 6, chunk=16)
    [output] = run(runner, [request])
    assert output == greedy_choices(model, request.prompt, output)


@pytest.mark.parametrize("some", [{"max_window_layers": 1}, {"layer_types": ["full_attention", "sliding_attention"]}])
def test_a_window_in_some_layers_of_qwen3_moe_is_refused(some: dict[str, Any]) -> None:
    unused = tiny("qwen3_moe", sliding_window=20, **some)
    assert [layer.mixer.window for layer in unused.layers] == [0, 0]
    with pytest.raises(ConfigError, match=f"{next(iter(some))} in config.json: a window in some layers alone"):
        tiny("qwen3_moe", sliding_window=20, use_sliding_window=True, **some)


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("gemma3_text", {"attn_logit_softcapping": 0.5}, "attn_logit_softcapping 0.5 is not supported"),
        ("gemma2", {"attn_logit_softcapping": -1}, "attn_logit_softcapping .* must not be negative, and is -1"),
        ("gemma2", {"final_logit_softcapping": -1.0}, "final_logit_softcapping .* must not be negative"),
        ("llama", {"rms_norm_eps": -1e-6}, "rms_norm_eps .* must not be negative"),
        ("llama4_text", {"floor_scale": 0}, "floor_scale .* must be more than 0"),
        ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit .* must be more than 0"),
        ("llama", {"tie_word_embeddings": "false"}, "tie_word_embeddings .* must be true or false, not 'false'"),
        ("llama", {"attention_bias": []}, "attention_bias .* must be true or false, not "),
        ("llama", {"is_causal": False}, "is_causal False is not supported"),
        ("phi3", {"partial_rotary_factor": 0.01}, "partial_rotary_factor 0.01 .* leaves nothing of 16 dimensions"),
        (
            "phi3",
            {"original_max_position_embeddings": 128, "rope_parameters": {**LONGROPE, "original_max_position_embeddings": 64}},
            "original_max_position_embeddings in config.json is 128, but that of the rotary parameters is 64: they must",
        ),
        ("llama", {"rope_scaling": {"type": "linear"}}, "rope type 'linear' in config.json has no factor"),
        ("llama", {"rope_parameters": {**YARN, "factor": None}}, "rope type 'yarn' in config.json has no factor"),
    ],
)
def test_a_value_without_a_meaning_is_refused(family: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny(family, **keys)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention.causal": False}, r"attention\.causal False is not supported"),
        ({"rope.scaling.yarn_ext_factor": 0.0}, r"rope\.scaling\.yarn_ext_factor 0\.0 is not supported"),
    ],
)
def test_metadata_that_switch_off_what_is_computed_are_refused(changes: dict[str, Any], message: str) -> None:
    named = {"block_count": 2, "embedding_length": 64, "feed_forward_length": 128, "attention.head_count": 4, "vocab_size": 9}
    named |= {"context_length": 512, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    usual = {"attention.causal": True, "rope.scaling.yarn_ext_factor": 1.0}

    def read(more: dict[str, Any]) -> ModelSpec:
        return config_from_gguf(
            {"general.architecture": "llama"} | {f"llama.{key}": one for key, one in (named | more).items()}
        )

    assert read(usual) == read({})
    with pytest.raises(ConfigError, match=message):
        read(changes)


def test_a_switch_that_is_a_number_is_on() -> None:
    assert tiny("llama4_text", attn_temperature_tuning=4) == tiny("llama4_text", attn_temperature_tuning=True)
    assert tiny("llama4_text", attn_temperature_tuning=0) == tiny("llama4_text", attn_temperature_tuning=False)


def test_two_places_for_rotary_parameters_must_say_the_same() -> None:
    new = {**YARN, "rope_theta": 1e6}
    assert tiny("llama", rope_parameters=new, rope_scaling={**YARN, "type": "yarn"}) == tiny("llama", rope_parameters=new)
    with pytest.raises(ConfigError, match=r"rope_scaling .* says factor 8.0, and rope_parameters 4.0: they must be equal"):
        tiny("llama", rope_parameters=new, rope_scaling={**YARN, "factor": 8.0})
    with pytest.raises(ConfigError, match=r"says rope_type 'yarn', and rope_parameters 'default'"):
        tiny("llama", rope_parameters={"rope_type": "default", "rope_theta": 1e6}, rope_scaling=YARN)
