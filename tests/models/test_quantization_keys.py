"""Keys of `quantization_config`: published ones are accepted, and what changes weights and is not read is named."""

from __future__ import annotations

from typing import Any

import pytest

from common.models.config import config_from_json
from common.models.formats.scheme import WeightScheme
from common.protocol.errors import ConfigError
from tests.models.test_weights_groups import AWQ, FORMATS, GPTQ, JSON, MODELOPT, NF4, compressed
from tests.unit.cpu_cost import costs_at_most

FP8 = {"quant_method": "fp8", "activation_scheme": "static"}
BLOCKS = compressed("float-quantized", num_bits=8, type="float", strategy="block", group_size=None)
MXFP4 = {"quant_method": "mxfp4"}
EVERY: dict[str, dict[str, Any]] = {name: quantization for name, (quantization, _) in FORMATS.items()} | {
    "fp8": FP8,
    "mxfp4-experts": MXFP4,
}


def read(quantization: Any, **others: Any) -> WeightScheme:
    return config_from_json({**JSON, "quantization_config": quantization, **others}).quantization


def with_weights(quantization: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Change what the only group says of its weights."""
    group = quantization["config_groups"]["group_0"]
    return quantization | {"config_groups": {"group_0": group | {"weights": group["weights"] | changes}}}


@pytest.mark.parametrize("change", [{"rotation": "hadamard"}, {"rotate": True}, {"odd": 1}])
@pytest.mark.parametrize("name", EVERY)
def test_a_key_that_no_reader_knows_is_named(name: str, change: dict[str, Any]) -> None:
    (key,) = change
    with pytest.raises(ConfigError, match=key):
        read(EVERY[name] | change)


@pytest.mark.parametrize("name", ["packed", "int8", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("change", [{"rotation": "hadamard"}, {"dynamic": True}])
def test_a_key_of_a_group_that_no_reader_knows_is_named(name: str, change: dict[str, Any]) -> None:
    (key,) = change
    with pytest.raises(ConfigError, match=key):
        read(with_weights(EVERY[name], **change))


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (EVERY["int8"] | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config of format 'sparse-24-bitmask'"),
        (EVERY["int8"] | {"sparsity_config": {"format": "dense", "odd": 1}}, "sparsity_config sets odd"),
        (EVERY["int8"] | {"sparsity_config": "dense"}, "sparsity_config of quantization_config must be an object"),
        (with_weights(EVERY["nvfp4"], actorder="group"), "actorder"),
        (MODELOPT | {"group_size": 32}, "group_size 32 is not supported"),
        (MODELOPT | {"config_groups": {"g": {"weights": {"num_bits": 8}}}}, "num_bits 8 is not supported"),
        (MODELOPT | {"quantized_layers": {"a": {}}}, "quantized_layers"),
        (GPTQ | {"pack_dtype": "int64"}, "pack_dtype 'int64' is not supported"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format"),
        (GPTQ | {"dynamic": {"-:.*gate": {}, "+:.*up_proj": {"bits": 8}}}, "dynamic"),
        (GPTQ | {"dynamic": {"-:.*gate": {"bits": 8}}}, "dynamic"),
        (GPTQ | {"dynamic": {"-:(": {}}}, "no regular expression"),
        (GPTQ | {"bits": 4.0}, "bits in quantization_config must be a positive whole number"),
        (FP8 | {"expert_dtype": "fp4"}, "expert_dtype 'fp4' is not supported"),
    ],
)
def test_what_is_not_supported_is_named(quantization: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(quantization)


def test_a_group_of_another_format_than_the_whole_is_named() -> None:
    group = EVERY["packed"]["config_groups"]["group_0"]
    read(EVERY["packed"] | {"config_groups": {"group_0": group | {"format": "pack-quantized"}}})
    with pytest.raises(ConfigError, match="format 'int-quantized' is not supported"):
        read(EVERY["packed"] | {"config_groups": {"group_0": group | {"format": "int-quantized"}}})


PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "compressed-tensors": (
        EVERY["packed"],
        {"global_compression_ratio": 1.24, "kv_cache_scheme": {"num_bits": 8}, "quantization_status": "compressed"}
        | {"sparsity_config": {}, "transform_config": {}, "version": "0.12.0"},
    ),
    "dense sparsity": (
        EVERY["int8"],
        {"sparsity_config": {"format": "dense", "global_sparsity": 0.1, "ignore": [], "registry_requires_subclass": False}},
    ),
    "AutoGPTQ": (
        GPTQ,
        {"damp_percent": 0.1, "static_groups": False, "true_sequential": True, "model_name_or_path": "a", "sym": True}
        | {"model_file_base_name": "model"},
    ),
    "optimum": (
        GPTQ,
        {
            "batch_size": 1,
            "block_name_to_quantize": "model.layers",
            "cache_block_outputs": True,
            "dataset": ["a"],
            "backend": "auto",
        }
        | {"exllama_config": {"version": 1}, "use_exllama": True, "modules_in_block_to_quantize": [["a"]], "pad_token_id": 3}
        | {"format": "gptq", "act_group_aware": True, "tokenizer": "a", "use_cuda_fp16": True, "max_input_length": 9},
    ),
    "GPTQModel": (
        GPTQ,
        {"checkpoint_format": "gptq", "lm_head": True, "meta": {"quantizer": ["gptqmodel:2.2"]}, "pack_dtype": "int32"}
        | {"dynamic": {}, "rotation": None},
    ),
    "AutoAWQ": (AWQ, {"do_fuse": True, "exllama_config": {"version": 2}, "fuse_max_seq_len": 9, "backend": "autoawq"}),
    "bitsandbytes": (
        NF4,
        {"_load_in_4bit": True, "_load_in_8bit": False, "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8"}
        | {"llm_int8_enable_fp32_cpu_offload": False, "llm_int8_has_fp16_weight": True, "llm_int8_threshold": 6.0},
    ),
    "modelopt": (
        MODELOPT,
        {"producer": {"name": "modelopt"}, "kv_cache_scheme": {"num_bits": 8}, "kv_cache_quant_algo": "FP8", "group_size": 16}
        | {
            "config_groups": {
                "group_0": {"targets": ["Linear"], "input_activations": {"num_bits": 4}, "weights": {"num_bits": 4}}
            }
        },
    ),
    "fp8": (FP8, {"kv_cache_scheme": "static", "scale_fmt": "ue8m0", "fmt": "e4m3"}),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, {"activation_scale_ub": 1200.0}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_keys_that_change_nothing_are_accepted(name: str) -> None:
    quantization, more = PUBLISHED[name]
    assert read(quantization | more) == read(quantization)


def test_published_keys_of_a_group_that_change_nothing_are_accepted() -> None:
    more = {"actorder": None, "block_structure": None, "dynamic": False, "observer": "minmax", "observer_kwargs": {"a": 1}}
    more |= {"scale_dtype": "torch.bfloat16", "symmetric": True, "zp_dtype": None}
    assert read(with_weights(EVERY["packed"], **more)) == read(EVERY["packed"])


def test_awq_is_read_with_the_zero_points_of_the_files() -> None:
    assert read(AWQ | {"zero_point": False}) == read(AWQ)


def test_blocks_may_be_written_as_text() -> None:
    assert read(with_weights(BLOCKS, block_structure="128x128")) == read(with_weights(BLOCKS, block_structure=[128, 128]))
    with pytest.raises(ConfigError, match="64x128"):
        read(with_weights(BLOCKS, block_structure="64x128"))


def test_the_older_name_of_the_configuration_is_read() -> None:
    packed = {key: value for key, value in EVERY["packed"].items() if key != "quant_method"}
    assert read(None, compression_config=packed) == read(EVERY["packed"])
    assert read(EVERY["packed"], compression_config=EVERY["packed"]) == read(EVERY["packed"])
    with pytest.raises(ConfigError, match="which differ"):
        read(EVERY["int8"], compression_config=EVERY["packed"])


def test_modules_that_gptqmodel_excludes_are_left_alone() -> None:
    scheme = read(GPTQ | {"dynamic": {r"-:.*\.mlp\.gate$": {}, "-:model.layers.0": None}})
    assert scheme.leaves_alone("model.layers.1.mlp.gate")
    assert scheme.leaves_alone("model.layers.0.mlp.up_proj")
    assert not scheme.leaves_alone("model.layers.1.mlp.gate_proj")


GPT_OSS = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def test_a_star_stands_for_anything_within_a_name() -> None:
    scheme = read(MXFP4 | {"modules_to_not_convert": GPT_OSS})
    for module in ("model.layers.3.self_attn.q_proj", "model.layers.11.mlp.router", "model.embed_tokens", "lm_head"):
        assert scheme.leaves_alone(module), module
    for module in ("model.layers.3.mlp.experts", "model.layers.3.self_attn2.q_proj", "model.layers.3.mlp.router2"):
        assert not scheme.leaves_alone(module), module


@pytest.mark.parametrize(
    ("pattern", "module", "alone"),
    [
        ("lm_head*", "lm_head", True),
        ("model.layers.0.self_attn*", "model.layers.0.self_attn.q_proj", True),
        ("model.layers.0.self_attn*", "model.layers.10.self_attn.q_proj", False),
        ("*mlp*", "model.layers.0.mlp.up_proj", True),
        ("*.mlp.gate", "model.layers.0.mlp.gate", True),
        ("*.mlp.gate", "model.layers.0.mlp.gate_proj", False),
        ("mtp.*", "mtp", False),
        ("a*b*c", "a.x.b.c", True),
        ("a*b*c", "a.x.c.b", False),
    ],
)
@pytest.mark.parametrize("name", ["modelopt", "packed", "fp8"])
def test_stars_are_read_alike_in_every_format(name: str, pattern: str, module: str, alone: bool) -> None:
    assert read(EVERY[name] | {"ignore": [pattern]}).leaves_alone(module) == alone


@pytest.mark.parametrize(
    "pattern",
    [
        "re:(.+)+(.+)+(.+)+X$",
        "re:(a|a)*b",
        "re:(?:a+){2,}",
        "re:" + ".*" * 6,
        "re:" + ".*?" * 6,
        "re:{" + ".*" * 6 + "}",
        "re:" + r"\d+" * 11,
        "re:" + r"\\d+" * 6,
        "re:" + "(.|.)" * 9,
        "re:" + "a" * 1000,
        "re:" + "(" * 500,
    ],
)
def test_an_expression_that_might_take_forever_is_refused(pattern: str) -> None:
    with pytest.raises(ConfigError, match="is not supported: it"):
        read(EVERY["packed"] | {"ignore": [pattern]})


@pytest.mark.parametrize(
    "pattern",
    [
        r"re:.*\.mlp\.(gate|up)_proj$",
        r"re:model\.layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj",
        r"re:^(?!.*(layers\.(0|1|2)\.mlp)).*$",
        r"re:.*layers\.[0-9*+(]+\.self_attn\)*",
        "re:.*lm_head",
        r"re:.*?\.layers\.\d+\.mlp\.experts\.[0-9]{1,3}\.(gate|up|down)_proj\d?(_\d+)?\..*?weight(_scale)?",
        r"re:" + r"\d+\.?" * 5,
    ],
)
def test_expressions_of_published_files_are_read(pattern: str) -> None:
    scheme = read(EVERY["packed"] | {"ignore": [pattern]})
    with costs_at_most(1):
        scheme.leaves_alone("model.layers.1.mlp.down_proj" * 4)
