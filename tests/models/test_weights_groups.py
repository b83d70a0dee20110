"""Published 4- and 8-bit checkpoints: each format gives the weights that its writer meant; damage is an error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file

from bench.engine.format_writers import (
    Written,
    write_awq,
    write_gptq,
    write_int8,
    write_mxfp4,
    write_nf4,
    write_nvfp4,
    write_packed,
)
from common.models.config import config_from_json, load_config
from common.models.formats.gguf import groups_of_blocks
from common.models.formats.mxfp4 import experts_reference
from common.models.formats.scheme import WeightScheme
from common.models.registry import open_weights
from common.models.source import DEFAULT_MODEL, ModelFiles, resolve
from common.models.weights.base import LinearFormat, WeightLoader, WeightsError
from common.models.weights.inventory import take_inventory
from common.ops.quant.grouped import dequantise_grouped
from common.protocol.errors import ConfigError
from tests.models.driver import Request, open_runner, run
from tests.models.oracles import build, oracle_prompt, save


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32} | weights}
    return {"quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"], "config_groups": {"group_0": group}}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head*"]}
FLOAT4 = {"num_bits": 4, "type": "float"}
Writer = Callable[[torch.Tensor], Written]
FORMATS: dict[str, tuple[dict[str, Any], Writer]] = {
    "awq": (AWQ, write_awq),
    "gptq": (GPTQ, write_gptq),
    "gptq-act-order": (GPTQ | {"desc_act": True}, lambda weight: write_gptq(weight, act_order=True)),
    "gptq-v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, lambda weight: write_gptq(weight, version=2)),
    "gptq-channel": (GPTQ | {"group_size": -1}, lambda weight: write_gptq(weight, weight.shape[1])),
    "gptq-8": (GPTQ | {"bits": 8}, lambda weight: write_gptq(weight, bits=8)),
    "packed": (compressed("pack-quantized"), write_packed),
    "packed-zeros": (compressed("pack-quantized", symmetric=False), lambda weight: write_packed(weight, zeros=True)),
    "packed-order": (compressed("pack-quantized", actorder="group"), lambda weight: write_packed(weight, act_order=True)),
    "int8": (compressed("int-quantized", num_bits=8, strategy="channel"), write_int8),
    "nvfp4": (compressed("nvfp4-pack-quantized", group_size=16, **FLOAT4), write_nvfp4),
    "modelopt": (MODELOPT, lambda weight: write_nvfp4(weight, modelopt=True)),
    "mxfp4": (compressed("mxfp4-pack-quantized", **FLOAT4), write_mxfp4),
    "nf4": (NF4, write_nf4),
    "nf4-nested": (NF4 | {"bnb_4bit_use_double_quant": True}, lambda weight: write_nf4(weight, nested=True)),
}
Q, K, V = (f"model.layers.0.self_attn.{name}_proj" for name in "qkv")
UP, GATE = "model.layers.1.mlp.up_proj", "model.layers.1.mlp.gate_proj"


class Checkpoint:
    """A tiny Llama in one format, and beside it the dequantised model that it means, in float32. plain: parts of names that
    stay as they are. more: parts of names that are quantised, too. changes: of the configuration."""

    def __init__(
        self,
        folder: Path,
        name: str,
        plain: tuple[str, ...] = (),
        ignore: list[str] | None = None,
        *,
        more: tuple[str, ...] = (),
        **changes: Any,
    ) -> None:
        quantization, write = FORMATS[name]
        torch.manual_seed(3)
        self.meant_files = save(build("llama", **changes), folder / "meant")
        self.files = save(build("llama", **changes), folder / "stored")
        self.meant = load_file(self.meant_files.path / "model.safetensors")
        self.tensors: dict[str, torch.Tensor] = {}
        for key, tensor in list(self.meant.items()):
            if not any(part in key for part in ("_proj.", *more)) or any(part in key for part in plain):
                self.tensors[key] = tensor
                continue
            module = key.removesuffix(".weight")
            written, self.meant[key] = write(tensor)
            self.tensors |= {f"{module}.{last}": part.contiguous() for last, part in written.items()}
        save_file(self.meant, self.meant_files.path / "model.safetensors")
        path = self.files.path / "config.json"
        if ignore is not None:
            quantization = quantization | {"ignore": ignore}
        path.write_text(json.dumps(json.loads(path.read_bytes()) | {"quantization_config": quantization}))
        self.write()

    def write(self) -> None:
        save_file(self.tensors, self.files.path / "model.safetensors")

    def loader(self, weights: LinearFormat = "groups") -> WeightLoader:
        config = load_config(self.files)
        source = open_weights(self.files, config)
        return WeightLoader(source, torch.float32, weights=weights, scheme=config.quantization)


@pytest.mark.parametrize("name", FORMATS)
def test_the_weight_is_what_the_writer_meant(tmp_path: Path, name: str) -> None:
    checkpoint = Checkpoint(tmp_path, name)
    loader = checkpoint.loader()
    packed = loader.take_linear({Q: 64, K: 32, V: 32}, 64, bias=False)
    meant = torch.cat([checkpoint.meant[f"{module}.weight"] for module in (Q, K, V)])
    assert packed.format == "grouped"
    assert packed.grouped is not None
    torch.testing.assert_close(dequantise_grouped(packed.grouped), meant, atol=1e-4, rtol=1e-3)
    plain = checkpoint.loader("none").take_linear({UP: 128}, 64, bias=False)
    assert plain.format == "tiles"
    tiles = plain.data.transpose(1, 2).reshape(-1, 64)[:128]
    torch.testing.assert_close(tiles, checkpoint.meant[f"{UP}.weight"], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    "name", [name if name in ("awq", "nf4-nested") else pytest.param(name, marks=pytest.mark.slow) for name in FORMATS]
)
def test_greedy_tokens_are_those_of_the_dequantised_model(tmp_path: Path, name: str) -> None:
    checkpoint = Checkpoint(tmp_path, name)
    prompts = [oracle_prompt()[:20], oracle_prompt()[5:30]]

    def tokens(files: ModelFiles) -> list[list[int]]:
        return run(open_runner(files), [Request(prompt, 6, chunk=16) for prompt in prompts])

    assert tokens(checkpoint.files) == tokens(checkpoint.meant_files)


@pytest.mark.parametrize("name", ["int8", "gptq", "packed", "nf4"])
def test_a_head_that_is_quantised_is_read(tmp_path: Path, name: str) -> None:
    checkpoint = Checkpoint(tmp_path, name, ignore=[], more=("lm_head",), tie_word_embeddings=False)
    assert "lm_head.weight" not in checkpoint.tensors or checkpoint.tensors["lm_head.weight"].dtype != torch.float32
    take_inventory(checkpoint.files, load_config(checkpoint.files))
    for weights in ("none", "groups"):
        head = checkpoint.loader(weights).take("lm_head.weight", *checkpoint.meant["lm_head.weight"].shape)
        torch.testing.assert_close(head, checkpoint.meant["lm_head.weight"], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("ignore", [["model.layers.0.self_attn.k_proj"], [r"re:.*layers\.0\.self_attn\.k_proj"], ["k_proj"]])
def test_modules_that_are_left_alone_are_read_as_floats(tmp_path: Path, ignore: list[str]) -> None:
    checkpoint = Checkpoint(tmp_path, "packed", plain=("k_proj",), ignore=ignore)
    loader = checkpoint.loader()
    mixed = loader.take_linear({Q: 64, K: 32, V: 32}, 64, bias=False)
    assert mixed.format == "tiles", "parts of two kinds are one float weight"
    assert loader.take_linear({GATE: 128, UP: 128}, 64, bias=False).format == "grouped"


def _nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[0] = float("nan")
    return tensor


@pytest.mark.parametrize(
    ("name", "last", "change", "message"),
    [
        ("awq", "scales", None, "lack .*scales"),
        ("awq", "qweight", None, "lack .*qweight"),
        ("awq", "qzeros", lambda x: x[:1], r"qzeros has shape \[1, 16\], \[2, 16\] was expected"),
        ("awq", "scales", _nan, "NaN"),
        ("gptq", "scales", lambda x: -x, "negative"),
        ("gptq", "g_idx", lambda x: x * 0, "does not divide 64 inputs into groups of 32"),
        ("packed", "weight_scale", lambda x: x[:, :1], "weight_scale has shape"),
        ("packed", "weight_shape", lambda x: x * 2, "configuration asks for"),
        ("int8", "weight_scale", lambda x: x[:3], "weight_scale has shape"),
        ("nvfp4", "weight_global_scale", lambda x: x * 0, "must be one positive number"),
        ("mxfp4", "weight_scale", lambda x: x * 0 + 255, "NaN"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", lambda x: x[:5], "damaged"),
        ("nf4", "weight.quant_map", lambda x: x * 2, "not NF4's table"),
    ],
)
def test_damage_is_one_clear_error(tmp_path: Path, name: str, last: str, change: Any, message: str) -> None:
    checkpoint = Checkpoint(tmp_path, name)
    key = f"{UP}.{last}"
    tensor = checkpoint.tensors.pop(key)
    if change is not None:
        checkpoint.tensors[key] = change(tensor).contiguous()
    checkpoint.write()
    with pytest.raises(WeightsError, match=message):
        checkpoint.loader().take_linear({UP: 128}, 64, bias=False)


def test_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, "awq")
    path = checkpoint.files.path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(WeightsError, match="can't be read"):
        checkpoint.loader()


def test_biases_of_zeros_are_skipped(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, "gptq")
    checkpoint.tensors[f"{UP}.bias"] = torch.zeros(128)
    checkpoint.write()
    assert checkpoint.loader().take_linear({UP: 128}, 64, bias=False).bias is None


def test_experts_of_mxfp4_are_dequantised() -> None:
    weight = torch.randn(3 * 8, 64)
    written, meant = write_mxfp4(weight)
    blocks, scales = written["weight_packed"].view(3, 8, 2, 16), written["weight_scale"].view(3, 8, 2)
    torch.testing.assert_close(experts_reference(blocks, scales), meant.view(3, 8, 64))
    with pytest.raises(WeightsError, match="do not fit"):
        experts_reference(blocks, scales[:, :4])


JSON = {"model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2} | {
    "num_attention_heads": 4
}


def test_published_configurations_are_known() -> None:
    for quantization, found in (
        (AWQ, WeightScheme(name="awq", bits=4, group=32)),
        (GPTQ | {"group_size": -1}, WeightScheme(name="gptq", bits=4, group=0, zero_offset=1)),
        (FORMATS["packed"][0], WeightScheme(name="packed", bits=4, group=32, ignore=("lm_head",))),
        (NF4, WeightScheme(name="nf4", bits=4, group=64)),
        ({"quant_method": "mxfp4"}, WeightScheme(name="mxfp4", bits=4, group=32)),
    ):
        assert config_from_json({**JSON, "quantization_config": quantization}).quantization == found


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (AWQ | {"version": "gemv"}, "gemv"),
        (AWQ | {"bits": 3}, "3 bits"),
        (AWQ | {"group_size": 48}, "groups of 48"),
        (GPTQ | {"bits": 3}, "3 bits"),
        (GPTQ | {"checkpoint_format": "marlin"}, "marlin"),
        (GPTQ | {"dynamic": {"a": {}}}, "dynamic"),
        (NF4 | {"bnb_4bit_quant_type": "fp4"}, "'fp4'"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "NF4 only"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8"}, "W4A8"),
        ({"quant_method": "hqq"}, "'hqq' is not supported"),
        (compressed("pack-quantized", num_bits=3), "3 bits"),
        (compressed("pack-quantized") | {"transform_config": {"a": 1}}, "transform_config"),
        (compressed("pack-quantized") | {"ignore": ["re:("]}, "no regular expression"),
    ],
)
def test_what_is_not_supported_is_named(quantization: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_json({**JSON, "quantization_config": quantization})


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q4_K", "Q8_0", "Q6_K"])
def test_gguf_blocks_mean_what_the_package_says(name: str) -> None:
    kind = GGMLQuantizationType[name]
    size, num_bytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(4)
    raw = rng.integers(0, 256, (24 * 512 // size, num_bytes), np.uint8)
    halves = {"Q4_0": (0,), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q8_0": (0,), "Q6_K": (208,)}[name]
    for at in halves:  # random bits would be NaN now and then
        raw[:, at : at + 2] = rng.uniform(1e-3, 1e-2, (len(raw), 1)).astype(np.float16).view(np.uint8)
    wanted = torch.from_numpy(dequantize(raw, kind).reshape(24, 512))
    found = groups_of_blocks(torch.from_numpy(raw.reshape(-1)), kind, (24, 512))
    torch.testing.assert_close(found.dequantise(), wanted, atol=1e-6, rtol=1e-5)
    packed = found.pack()
    assert packed is not None
    torch.testing.assert_close(dequantise_grouped(packed), wanted, atol=2e-3 * float(wanted.abs().max()), rtol=1e-3)


def test_the_default_model_stays_quantised_on_a_gpu() -> None:
    files = resolve(DEFAULT_MODEL)
    config = load_config(files)
    assert (config.weight_format, config.quantization.bits) == ("groups", 4)
    source = open_weights(files, config)
    loader = WeightLoader(source, torch.float32, weights="groups", scheme=config.quantization)
    name = "model.layers.3.self_attn.q_proj"
    packed = loader.take_linear({name: 576}, 576, bias=False)
    assert packed.grouped is not None
    plain = WeightLoader(source, torch.float32).take(f"{name}.weight", 576, 576)
    torch.testing.assert_close(dequantise_grouped(packed.grouped), plain, atol=1e-3, rtol=1e-3)


def test_random_weights_come_in_the_format_of_the_shape() -> None:
    files = resolve("dummy:llama-3.1-8b-awq")
    config = load_config(files)
    source = open_weights(files, config, dummy=True)
    loader = WeightLoader(source, torch.float32, weights="groups", scheme=config.quantization, threads=0)
    packed = loader.take_linear({"model.layers.0.self_attn.k_proj": 1024}, 4096, bias=False)
    assert packed.grouped is not None
    assert (packed.grouped.code, packed.grouped.group, packed.grouped.offsets is None) == ("int4", 128, False)
    weight = dequantise_grouped(packed.grouped)
    assert 0.01 < float(weight.std()) < 0.04
    assert abs(float(weight.mean())) < 0.01 * float(weight.std()), "or what all outputs have in common grows in each layer"
