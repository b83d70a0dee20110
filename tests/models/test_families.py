"""Families: what is served, what their files must not say unread, and where a model can run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from common.engine.load.abilities import features, int8_lacks
from common.engine.load.layout import EngineConfig, cache_layout, resolve_engine_precision
from common.engine.load.precision import has_int8
from common.models.config import config_from_gguf, config_from_json, load_config
from common.models.families.registry import GGUF_FAMILIES, JSON_FAMILIES
from common.models.formats.detect import detect
from common.models.spec import AttentionSpec, ExpertsSpec, ModelSpec, RopeSpec
from common.models.weights.expected import decoder_shapes
from common.protocol.errors import ConfigError
from tests.models.oracles import ORACLES, save

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
}
_GGUF: dict[str, Any] = {
    "block_count": 2,
    "context_length": 512,
    "embedding_length": 64,
    "feed_forward_length": 128,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "vocab_size": 256,
}


_OWN: dict[str, dict[str, Any]] = {"granitemoehybrid": {"layer_types": ["attention"] * 4, "num_local_experts": 0}}
"""What a family's smallest file must have."""


def tiny(family: str, **changes: Any) -> ModelSpec:
    return config_from_json({"model_type": family, **_SIZES, **_OWN.get(family, {}), **changes})


def gguf(architecture: str, **changes: Any) -> ModelSpec:
    named = {f"{architecture}.{key}": value for key, value in {**_GGUF, **changes}.items()}
    return config_from_gguf({"general.architecture": architecture, **named})


def mixers(spec: ModelSpec) -> list[AttentionSpec]:
    return [layer.mixer for layer in spec.layers]


def test_what_is_not_served_is_refused_with_the_list_of_what_is() -> None:
    with pytest.raises(ConfigError, match=f"'mamba' is not supported; supported are {', '.join(JSON_FAMILIES)}"):
        tiny("mamba")
    with pytest.raises(ConfigError, match=f"'bert' is not supported; supported are {', '.join(GGUF_FAMILIES)}"):
        gguf("bert")


@pytest.mark.parametrize("family", JSON_FAMILIES)
def test_a_key_that_nobody_reads_is_an_error_that_names_it(family: str) -> None:
    tiny(family, full_attn_mod=1, rope_theta=1e4, use_cache=True, unheard_of=None, other=False)
    with pytest.raises(ConfigError, match="attention_sparsity"):
        tiny(family, attention_sparsity=0.5)
    with pytest.raises(ConfigError, match="full_attn_mod"):
        tiny(family, full_attn_mod=4)
    with pytest.raises(ConfigError, match="mrope_section"):
        tiny(family, rope_parameters={"rope_type": "default", "mrope_section": [2, 1, 1]})


@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_a_key_of_gguf_metadata_that_nobody_reads_is_an_error(family: str) -> None:
    sparse = ("qwen3moe", "gpt-oss", "olmoe", "glm4moe", "ernie4_5-moe")
    experts = {"expert_count": 4, "expert_used_count": 2} if family in sparse else {}
    gguf(family, **experts)
    with pytest.raises(ConfigError, match="clamp_kqv"):
        gguf(family, **{"attention.clamp_kqv": 8.0}, **experts)


def test_transforms_of_compressed_tensors_are_refused() -> None:
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    groups = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"weights": weights}},
    }
    plain = {"quantization_config": {**groups, "transform_config": {}}}
    assert detect(plain).kind == "fp8"
    assert tiny("llama", **plain).num_layers == 4
    with pytest.raises(ConfigError, match="transform_config"):
        tiny("llama", quantization_config={**groups, "transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}})


def test_a_gguf_window_is_read() -> None:
    assert {mixer.window for mixer in mixers(gguf("llama", **{"attention.sliding_window": 64}))} == {64}


def test_gguf_rope_scaling_is_as_in_llama_cpp() -> None:
    old = gguf("llama", **{"rope.scale_linear": 4.0}).rope
    assert (old.type, old.factor) == ("linear", 4.0)
    untyped = gguf("llama", **{"rope.scaling.factor": 2.0}).rope
    assert (untyped.type, untyped.factor) == ("linear", 2.0)
    with pytest.raises(ConfigError, match="attn_factor"):
        gguf("llama", **{"rope.scaling.attn_factor": 1.19})
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 512}
    plain, tuned = gguf("llama", **yarn), gguf("llama", **yarn, **{"rope.scaling.attn_factor": 0.5})
    assert tuned.rope.yarn_attention == pytest.approx(plain.rope.yarn_attention / 2)
    assert plain.max_context == 2048


def test_yarn_extends_the_context() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 400}
    assert tiny("qwen3", rope_scaling=yarn).max_context == 1600
    assert tiny("qwen3", rope_scaling={**yarn, "original_max_position_embeddings": 100}).max_context == 512


def test_layers_say_what_they_keep() -> None:
    assert [mixer.retention for mixer in mixers(tiny("gemma2", sliding_window=24))] == [("window", 24), ("full", 0)] * 2
    assert {mixer.retention for mixer in mixers(tiny("mistral", sliding_window=None))} == {("full", 0)}


def test_windows_as_long_as_the_context_are_none() -> None:
    spec = tiny("mistral", sliding_window=512)
    assert spec.layers[0].mixer.window == 0
    assert features(spec) == []


def test_gemma_3_of_transformers_4_has_a_theta_for_local_layers() -> None:
    spec = tiny("gemma3_text", rope_theta=1e6, rope_local_base_freq=1e4, sliding_window_pattern=2, sliding_window=24)
    ropes = [mixer.rope for mixer in mixers(spec)]
    assert [rope.theta for rope in ropes if rope is not None] == [1e4, 1e6] * 2


def test_granite_adds_what_blocks_compute_to_a_smaller_stream() -> None:
    factors = {"embedding_multiplier": 12.0, "residual_multiplier": 0.25, "attention_multiplier": 0.0078125}
    spec = tiny("granite", rms_norm_eps=1e-5, logits_scaling=16.0, **factors)
    assert (spec.embedding_scale, spec.logit_scale, spec.layers[0].mixer.scale) == (48.0, 1 / 16, 0.0078125)
    assert spec.rms_eps == pytest.approx(1.6e-4)
    assert set(int8_lacks(spec)) == {
        "scaled embeddings",
        "scaled logits",
        "attention scores of another scale than 1/√head_dim",
    }
    for name in factors:
        with pytest.raises(ConfigError, match=f"{name} in config.json must be more than 0"):
            tiny("granite", **{name: 0.0})
    with pytest.raises(ConfigError, match=r"residual_multiplier in config\.json must be between 1e-06"):
        tiny("granite", residual_multiplier=1e-200)


def test_granite_4_is_served_where_it_has_attention_alone() -> None:
    dense: dict[str, Any] = {"num_experts_per_tok": 0}
    dense |= {"mamba_d_conv": 4, "mamba_conv_bias": True, "init_method": "mup", "normalization_function": "rmsnorm"}
    dense |= {"position_embedding_type": "rope", "shared_intermediate_size": 96}
    spec = tiny("granitemoehybrid", **dense)
    assert (spec.layers[0].mlp.intermediate_size, spec.rope.theta) == (96, 1e4)
    assert tiny("granitemoehybrid", **{**dense, "position_embedding_type": "nope"}).layers[0].mixer.rope is None
    for changed, message in (
        ({"layer_types": ["attention", "mamba", "mamba", "attention"]}, "layer type 'mamba' is not supported"),
        ({"layer_types": None}, "layer type 'mamba' is not supported"),
        ({"num_local_experts": 8}, "num_local_experts.* is not supported for Granite 4"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type 'alibi'"),
    ):
        with pytest.raises(ConfigError, match=message):
            tiny("granitemoehybrid", **{**dense, **changed})


def test_experts_that_are_chosen_by_a_bias_of_their_own() -> None:
    glm = tiny("glm4_moe", n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, routed_scaling_factor=1.5)
    assert [isinstance(layer.mlp, ExpertsSpec) for layer in glm.layers] == [False, True, True, True]
    experts = glm.layers[-1].mlp
    assert isinstance(experts, ExpertsSpec) and experts.shared_size == 32
    assert (experts.router.scoring, experts.router.weight_scale, experts.router.choice_bias) == ("sigmoid", 1.5, True)
    assert (glm.layers[0].mixer.rope or RopeSpec()).dims == 8
    assert list(glm.drafting) == [4] and not tiny("glm4_moe", num_nextn_predict_layers=0).drafting
    with pytest.raises(ConfigError, match="n_group 8 is not supported"):
        tiny("glm4_moe", n_group=8)

    ernie = {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 2, "moe_gate": "topk"}
    found = tiny("ernie4_5_moe", **ernie, moe_layer_start_index=1, moe_layer_end_index=2)
    assert [isinstance(layer.mlp, ExpertsSpec) for layer in found.layers] == [False, True, True, False]
    last = tiny("ernie4_5_moe", **ernie, moe_layer_interval=2).layers[-1].mlp
    assert isinstance(last, ExpertsSpec) and (last.shared_size, last.router.scoring) == (64, "softmax")
    with pytest.raises(ConfigError, match="moe_use_aux_free"):
        tiny("ernie4_5_moe", moe_use_aux_free=False)


def test_ministral_3_says_how_its_queries_grow() -> None:
    temperature = mixers(tiny("ministral3"))[0].temperature
    assert temperature is not None
    assert (temperature.scale, temperature.floor, temperature.shift) == (0.1, 16_384, 0)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert mixers(tiny("ministral3", rope_parameters={**yarn, "llama_4_scaling_beta": 0.0}))[0].temperature is None
    with pytest.raises(ConfigError, match="must have llama_4_scaling_beta"):
        tiny("ministral3", rope_parameters=yarn)
    with pytest.raises(ConfigError, match="llama_4_scaling_beta"):
        tiny("mistral", rope_parameters={**yarn, "llama_4_scaling_beta": 0.1})


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({}, [1, 1, 1, 0]),
        ({"sliding_window_pattern": "LG"}, [1, 0, 1, 0]),
        ({"sliding_window_pattern": "LLL"}, [1, 1, 1, 0]),
        ({"sliding_window_pattern": 2}, [1, 0, 1, 0]),
        ({"layer_types": ["full_attention", *["sliding_attention"] * 3]}, [0, 1, 1, 1]),
        ({"sliding_window": None}, [0, 0, 0, 0]),
    ],
)
def test_exaone_4_has_positions_where_there_are_windows(fields: dict[str, Any], windows: list[int]) -> None:
    found = mixers(tiny("exaone4", **{"sliding_window": 24, **fields}))
    assert [int(mixer.window > 0) for mixer in found] == windows
    assert [mixer.rope is not None for mixer in found] == [bool(one) or not any(windows) for one in windows]


def test_exaone_4_of_another_pattern_is_refused() -> None:
    with pytest.raises(ConfigError, match="sliding_window_pattern"):
        tiny("exaone4", sliding_window_pattern="LXG")


def test_the_first_gemma_calls_its_activation_gelu() -> None:
    assert tiny("gemma", hidden_act="gelu") == tiny("gemma", hidden_activation="gelu_pytorch_tanh")
    with pytest.raises(ConfigError, match="hidden_activation 'relu'"):
        tiny("gemma", hidden_activation="relu")


def test_longrope_is_chosen_by_the_context_that_is_served() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    spec = tiny("phi3", original_max_position_embeddings=128, rope_scaling={"type": "longrope", **factors})
    assert (spec.rope.original_max_context, spec.rope.is_long(128), spec.rope.is_long(129)) == (128, False, True)
    short, long = (cache_layout(spec, EngineConfig(max_model_len=length, num_blocks=4)) for length in (128, 256))
    assert short.fingerprint != long.fingerprint
    with pytest.raises(ConfigError, match="8 pairs"):
        tiny("phi3", rope_scaling={"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]})


def test_a_gpu_computes_every_family_in_bfloat16() -> None:
    for model in (tiny("llama"), tiny("mistral", sliding_window=24), tiny("gemma2", sliding_window=24), tiny("olmo2")):
        assert resolve_engine_precision(model, EngineConfig(), "cuda:0").compute == "bfloat16"


def test_fp8_kv_of_narrow_heads_is_refused() -> None:
    with pytest.raises(ConfigError, match="heads of more than 16 numbers, and this model's have 16"):
        resolve_engine_precision(tiny("llama"), EngineConfig(kv_cache_dtype="fp8"), "cuda:0")


@pytest.mark.skipif(not has_int8(), reason="the package numba is not installed")
def test_a_cpu_takes_8_bits_where_they_can_express_the_model() -> None:
    assert resolve_engine_precision(tiny("llama"), EngineConfig(), "cpu").weights == "int8"
    gemma = tiny("gemma2", sliding_window=24)
    assert "norms behind blocks" in int8_lacks(gemma)
    assert resolve_engine_precision(gemma, EngineConfig(), "cpu").weights == "none"
    with pytest.raises(ConfigError, match=r"int8 lacks .*norms behind blocks"):
        resolve_engine_precision(gemma, EngineConfig(quantization="int8"), "cpu")


@pytest.mark.parametrize("name", [name for name in ORACLES if "-" not in name or name in ("qwen3-moe", "gpt-oss")])
def test_a_family_names_every_tensor_of_its_files(name: str, tmp_path: Path) -> None:
    files = save(ORACLES[name](), tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="np") as file:
        opened: Any = file
        held = {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118 — no mapping
    assert decoder_shapes(load_config(files)) == held
