"""Published 4- and 8-bit checkpoints: each format gives the weights that its writer meant; damage is an error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file

from common.models.config import config_from_json, load_config
from common.models.formats.gguf import groups_of_blocks
from common.models.formats.mxfp4 import experts_reference
from common.models.formats.scheme import WeightScheme
from common.models.registry import open_weights
from common.models.source import DEFAULT_MODEL, ModelFiles, resolve
from common.models.weights.base import LinearFormat, WeightLoader, WeightsError
from common.ops.quant.grouped import dequantise_grouped
from common.protocol.errors import ConfigError
from tests.models.driver import Request, open_runner, run
from tests.models.oracles import build, oracle_prompt, save

Written = tuple[dict[str, torch.Tensor], torch.Tensor]
"""Tensors of a module by the last part of their names, and the float32 weight that they mean."""

NF4_TABLE = torch.tensor(
    (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
        *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    )
)
FP4_TABLE = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def words(codes: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """[a, b] → int32 [a, b · bits / 32]: code order[i] of each word in its bits i · `bits` and up."""
    each = 32 // bits
    packed = torch.zeros(codes.shape[0], codes.shape[1] // each, dtype=torch.int64)
    for i in range(each):
        packed |= codes[:, (order[i] if order else i) :: each].long() << (bits * i)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def asymmetric(weight: torch.Tensor, group: int, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """codes [out, in], zeros and scales [out, groups]; scales are float16 numbers."""
    parts = weight.view(len(weight), -1, group)
    low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
    scales = ((high - low) / (2**bits - 1)).half().float().clamp(min=1e-4)
    zeros = (-low / scales).round().clamp(1, 2**bits - 1)
    codes = (parts / scales[:, :, None]).round().add(zeros[:, :, None]).clamp(0, 2**bits - 1)
    return codes.view_as(weight).long(), zeros, scales


def spread(values: torch.Tensor, group: int) -> torch.Tensor:
    return values.repeat_interleave(group, 1)


def write_awq(weight: torch.Tensor, group: int = 32) -> Written:
    codes, zeros, scales = asymmetric(weight, group, 4)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {"qweight": words(codes.t(), 4, order), "qzeros": words(zeros.t().long(), 4, order), "scales": scales.t().half()}
    return tensors, (codes - spread(zeros, group)) * spread(scales, group)


def write_gptq(weight: torch.Tensor, group: int = 32, *, act_order: bool = False, version: int = 1, bits: int = 4) -> Written:
    inputs = weight.shape[1]
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(5)) if act_order else torch.arange(inputs)
    codes, zeros, scales = asymmetric(weight[:, order], group, bits)
    meant, stored = torch.empty_like(weight), torch.empty_like(codes)
    meant[:, order] = (codes - spread(zeros, group)) * spread(scales, group)
    stored[:, order] = codes
    indices = torch.empty(inputs, dtype=torch.int32)
    indices[order] = torch.arange(inputs, dtype=torch.int32) // group
    held = zeros.t().long() - (1 if version == 1 else 0)
    tensors = {"qweight": words(stored, bits).t(), "qzeros": words(held, bits), "scales": scales.t().half(), "g_idx": indices}
    return tensors, meant


def write_packed(weight: torch.Tensor, group: int = 32, *, zeros: bool = False, act_order: bool = False) -> Written:
    inputs = weight.shape[1]
    shape = torch.tensor(weight.shape)
    if zeros:
        codes, points, scales = asymmetric(weight, group, 4)
        scales = scales.bfloat16().float()
        tensors = {
            "weight_packed": words(codes, 4),
            "weight_zero_point": words(points.t().long(), 4).t(),
            "weight_shape": shape,
        }
        return tensors | {"weight_scale": scales.bfloat16()}, (codes - spread(points, group)) * spread(scales, group)
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(6)) if act_order else torch.arange(inputs)
    sorted_weight = weight[:, order]
    scales = (sorted_weight.view(len(weight), -1, group).abs().amax(2) / 7.5).bfloat16().float()
    codes = (sorted_weight / spread(scales, group)).round().clamp(-8, 7).long()
    meant, stored = torch.empty_like(weight), torch.empty_like(codes)
    meant[:, order], stored[:, order] = codes * spread(scales, group), codes + 8
    tensors = {"weight_packed": words(stored, 4), "weight_scale": scales.bfloat16(), "weight_shape": shape}
    if act_order:
        tensors["weight_g_idx"] = torch.empty(inputs, dtype=torch.int32)
        tensors["weight_g_idx"][order] = torch.arange(inputs, dtype=torch.int32) // group
    return tensors, meant


def write_int8(weight: torch.Tensor) -> Written:
    scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (weight / scales.float()).round().clamp(-127, 127)
    return {"weight": codes.to(torch.int8), "weight_scale": scales}, codes * scales.float()


def nearest(values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return (values[..., None] - table).abs().argmin(-1)


def write_nvfp4(weight: torch.Tensor, *, modelopt: bool = False) -> Written:
    whole = weight.abs().max() / (448 * 6)
    scales = (weight.view(len(weight), -1, 16).abs().amax(2) / 6 / whole).to(torch.float8_e4m3fn)
    exact = spread(scales.float() * whole, 16)
    codes = nearest(weight / exact.clamp(min=1e-9), FP4_TABLE)
    packed = (codes[:, ::2] | (codes[:, 1::2] << 4)).to(torch.uint8)
    meant = FP4_TABLE[codes] * exact
    if modelopt:
        return {"weight": packed, "weight_scale": scales, "weight_scale_2": whole, "input_scale": torch.tensor(1.0)}, meant
    return {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": (1 / whole).reshape(1)}, meant


def write_mxfp4(weight: torch.Tensor) -> Written:
    exponents = (weight.view(len(weight), -1, 32).abs().amax(2) / 6).log2().ceil().clamp(-126, 126)
    exact = spread(2.0**exponents, 32)
    codes = nearest(weight / exact, FP4_TABLE)
    packed = (codes[:, ::2] | (codes[:, 1::2] << 4)).to(torch.uint8)
    return {"weight_packed": packed, "weight_scale": (exponents + 127).to(torch.uint8)}, FP4_TABLE[codes] * exact


def write_nf4(weight: torch.Tensor, *, nested: bool = False) -> Written:
    blocks = weight.reshape(-1, 64)
    absmax = blocks.abs().amax(1)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    tensors = {"weight.quant_map": NF4_TABLE.clone()}
    if nested:
        table = torch.linspace(-1, 1, 256)
        offset = absmax.mean()
        centred = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % 256)).view(-1, 256)
        factors = centred.abs().amax(1)
        held = nearest(centred / factors[:, None], table)
        tensors |= {"weight.absmax": held.flatten()[: len(absmax)].to(torch.uint8), "weight.nested_absmax": factors}
        tensors["weight.nested_quant_map"] = table
        state |= {"nested_blocksize": 256, "nested_offset": offset.item(), "nested_dtype": "float32"}
        absmax = (table[held] * factors[:, None]).flatten()[: len(absmax)] + offset
    else:
        tensors["weight.absmax"] = absmax
    codes = nearest(blocks / absmax[:, None], NF4_TABLE)
    flat = codes.flatten()
    tensors["weight"] = ((flat[::2] << 4) | flat[1::2]).to(torch.uint8)[:, None]
    tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return tensors, (NF4_TABLE[codes] * absmax[:, None]).view_as(weight)


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
    stay as they are."""

    def __init__(self, folder: Path, name: str, plain: tuple[str, ...] = (), ignore: list[str] | None = None) -> None:
        quantization, write = FORMATS[name]
        torch.manual_seed(3)
        self.meant_files = save(build("llama"), folder / "meant")
        self.files = save(build("llama"), folder / "stored")
        self.meant = load_file(self.meant_files.path / "model.safetensors")
        self.tensors: dict[str, torch.Tensor] = {}
        for key, tensor in list(self.meant.items()):
            if "_proj." not in key or any(part in key for part in plain):
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
    config = msgspec.structs.replace(
        load_config(files), num_layers=1, hidden_size=256, intermediate_size=128, num_heads=2, num_kv_heads=1, vocab_size=64
    )
    source = open_weights(files, config, dummy=True)
    loader = WeightLoader(source, torch.float32, weights="groups", scheme=config.quantization, threads=0)
    packed = loader.take_linear({"model.layers.0.self_attn.o_proj": 256}, 256, bias=False)
    assert packed.grouped is not None
    assert (packed.grouped.code, packed.grouped.group, packed.grouped.offsets is None) == ("int4", 128, False)
    assert 0.01 < float(dequantise_grouped(packed.grouped).std()) < 0.04
