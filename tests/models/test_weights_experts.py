"""Experts in published formats: a model's text is that of transformers with the weights that the format means."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.engine.format_writers import (
    Written,
    write_awq,
    write_fp8,
    write_fp8_blocks,
    write_gptq,
    write_int8,
    write_mxfp4,
    write_nf4,
    write_nvfp4,
    write_packed,
)
from common.models.config import config_from_json, load_config
from common.models.registry import open_weights
from common.models.shapes import SHAPES
from common.models.spec import ExpertsSpec
from common.models.weights.base import LinearFormat, WeightLoader, WeightsError
from common.models.weights.dummy import DummyWeights
from common.models.weights.experts import take_experts
from common.ops import backend
from common.ops.moe.experts import experts
from common.ops.moe.form import ExpertActivation, ExpertWeights, Routing
from common.ops.moe.grouped_weight import GroupedWeight
from tests.models.driver import Request, open_runner, run
from tests.models.oracles import build, greedy_choices, oracle_prompt, save
from tests.models.test_weights_groups import AWQ, FLOAT4, GPTQ, MODELOPT, NF4, compressed

FP8 = compressed("float-quantized", num_bits=8, type="float", strategy="channel", group_size=None)
FP8_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
Writer = Callable[[torch.Tensor], Written]
CASES: dict[str, tuple[str, dict[str, Any], Writer, str]] = {
    "gpt-oss-mxfp4": ("gpt-oss", MXFP4, write_mxfp4, "mxfp4"),
    "qwen3-moe-fp8-blocks": ("qwen3-moe", FP8_BLOCKS, write_fp8_blocks, "plain"),
    "qwen3-moe-fp8": ("qwen3-moe", FP8, write_fp8, "fp8"),
    "qwen3-moe-packed": ("qwen3-moe", compressed("pack-quantized"), write_packed, "int4"),
    "qwen3-moe-gptq": ("qwen3-moe", GPTQ, write_gptq, "int4"),
    "qwen3-moe-gptq-order": ("qwen3-moe", GPTQ, lambda weight: write_gptq(weight, act_order=True), "plain"),
    "qwen3-moe-int8": ("qwen3-moe", compressed("int-quantized", num_bits=8, strategy="channel"), write_int8, "plain"),
    "qwen3-moe-nvfp4": ("qwen3-moe", MODELOPT, lambda weight: write_nvfp4(weight, modelopt=True), "plain"),
    "mixtral-nf4": ("mixtral", NF4, write_nf4, "plain"),
    "mixtral-awq": ("mixtral", AWQ, write_awq, "int4"),
    "mixtral-mxfp4": ("mixtral", compressed("mxfp4-pack-quantized", **FLOAT4), write_mxfp4, "mxfp4"),
    "llama4-packed": ("llama4", compressed("pack-quantized"), write_packed, "int4"),
}
"""Oracle, quantization_config, writer, and how a GPU keeps gate and up."""
QUICK = ("gpt-oss-mxfp4", "qwen3-moe-fp8-blocks", "qwen3-moe-packed", "mixtral-awq")


class Checkpoint:
    """A tiny mixture of experts in one format, and in transformers the model that it means."""

    def __init__(self, folder: Path, name: str) -> None:
        oracle, quantization, self._write, self.kept = CASES[name]
        torch.manual_seed(3)
        model = build(oracle)
        self.meant_files, self.files = save(model, folder / "meant"), save(model, folder / "stored")
        self.meant = load_file(self.meant_files.path / "model.safetensors")
        self.tensors: dict[str, torch.Tensor] = {}
        for key, tensor in list(self.meant.items()):
            self._add(key, tensor)
        save_file(self.meant, self.meant_files.path / "model.safetensors", {"format": "pt"})
        path = self.files.path / "config.json"
        path.write_text(json.dumps(json.loads(path.read_bytes()) | {"quantization_config": quantization}))
        self.save()

    def _add(self, key: str, tensor: torch.Tensor) -> None:
        stacked = key.endswith(("experts.gate_up_proj", "experts.down_proj"))
        if stacked and "feed_forward" in key:  # Llama 4's, as quantisers write them
            parent = key.rpartition(".")[0]
            parts = tensor.chunk(2, 2) if "gate_up" in key else (tensor,)
            names = ("gate_proj", "up_proj") if "gate_up" in key else ("down_proj",)
            meant = []
            for part, name in zip(parts, names, strict=True):
                written = [self._write(one.t().contiguous()) for one in part]
                for expert, (tensors, _) in enumerate(written):
                    self._store(f"{parent}.{expert}.{name}", tensors)
                meant.append(torch.stack([one.t() for _, one in written]))
            self.meant[key] = torch.cat(meant, 2).contiguous()
        elif stacked:
            experts, inputs, outputs = tensor.shape
            written, meant = self._write(tensor.transpose(1, 2).reshape(experts * outputs, inputs))
            self.meant[key] = meant.view(experts, outputs, inputs).transpose(1, 2).contiguous()
            self.tensors[f"{key}_blocks"] = written["weight_packed"].view(experts, outputs, inputs // 32, 16)
            self.tensors[f"{key}_scales"] = written["weight_scale"].view(experts, outputs, inputs // 32)
        elif key.endswith(".weight") and "experts." in key:
            written, self.meant[key] = self._write(tensor)
            self._store(key.removesuffix(".weight"), written)
        else:
            self.tensors[key] = tensor

    def _store(self, module: str, written: dict[str, torch.Tensor]) -> None:
        self.tensors |= {f"{module}.{last}": part.contiguous() for last, part in written.items()}

    def save(self) -> None:
        save_file(self.tensors, self.files.path / "model.safetensors", {"format": "pt"})

    def transformers(self) -> Any:
        from transformers import AutoModelForCausalLM

        path = self.meant_files.path
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()

    def experts(self, weights: LinearFormat) -> ExpertWeights:
        """Of the first layer that has some."""
        config = load_config(self.files)
        layer, spec = next((i, one.mlp) for i, one in enumerate(config.layers) if isinstance(one.mlp, ExpertsSpec))
        loader = WeightLoader(open_weights(self.files, config), torch.float32, weights=weights, scheme=config.quantization)
        return take_experts(loader, f"model.layers.{layer}", config.names.layer, spec, config.hidden_size)


def grouped(monkeypatch: pytest.MonkeyPatch, load: Callable[[], ExpertWeights]) -> tuple[GroupedWeight, GroupedWeight]:
    """The linears that `load` packs for a GPU, before they are in the kernels' order."""
    seen: list[tuple[GroupedWeight, GroupedWeight]] = []
    pack = ExpertWeights.grouped

    def spy(gate_up: GroupedWeight, down: GroupedWeight, **settings: bool) -> ExpertWeights:
        seen.append((gate_up, down))
        return pack(gate_up, down, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(ExpertWeights, "grouped", spy)
        load()
    return seen[0]


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES])
def test_greedy_text_is_that_of_the_dequantised_model_in_transformers(tmp_path: Path, name: str) -> None:
    checkpoint = Checkpoint(tmp_path, name)
    model, prompt = checkpoint.transformers(), oracle_prompt()[:40]
    output = run(open_runner(checkpoint.files), [Request(prompt, 8, chunk=16)])[0]
    assert output == greedy_choices(model, prompt, output)


@pytest.mark.parametrize("name", CASES)
def test_a_gpu_keeps_what_its_kernels_read(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint(tmp_path, name)
    with backend.interpreted():  # packed as for a GPU
        kept, plain = (grouped(monkeypatch, partial(checkpoint.experts, weights)) for weights in ("groups", "none"))
    assert kept[0].format == checkpoint.kept
    for mine, whole in zip(kept, plain, strict=True):
        assert whole.format == "plain"
        torch.testing.assert_close(mine.dequantised(), whole.values.float(), atol=1e-5, rtol=1e-3)
        assert (mine.bias is None) == (whole.bias is None)


@pytest.mark.parametrize(
    "name",
    [
        "qwen3-moe-fp8",
        "qwen3-moe-packed",
        pytest.param("gpt-oss-mxfp4", marks=pytest.mark.slow),
        pytest.param("mixtral-awq", marks=pytest.mark.slow),
    ],
)
def test_a_gpus_kernels_compute_what_a_cpu_does(tmp_path: Path, name: str) -> None:
    pytest.importorskip("triton")
    from tests.ops.interpreter import act_as_a_gpu

    act_as_a_gpu()
    checkpoint = Checkpoint(tmp_path, name)
    on_cpu, activation = checkpoint.experts("none"), ExpertActivation()
    made = torch.Generator().manual_seed(1)
    x = torch.randn(3, on_cpu.gate_up[0].in_features, generator=made).bfloat16()
    routing = Routing(torch.tensor([[0, 3], [2, 1], [3, 0]], dtype=torch.int32), torch.rand(3, 2, generator=made))
    expected = experts(x.float(), routing, on_cpu, activation)
    with backend.interpreted():
        found = experts(x, routing, checkpoint.experts("groups"), activation)
    torch.testing.assert_close(found.float(), expected, atol=0.02 * float(expected.abs().max()), rtol=0.02)


@pytest.mark.parametrize(
    ("name", "key", "change", "message"),
    [
        ("gpt-oss-mxfp4", "experts.down_proj_scales", None, "lack .*down_proj_scales"),
        ("gpt-oss-mxfp4", "experts.down_proj_blocks", lambda x: x[:7], r"down_proj_blocks has shape \[7, "),
        ("gpt-oss-mxfp4", "experts.gate_up_proj_scales", lambda x: x[:, :, :1], "gate_up_proj_scales has shape"),
        ("gpt-oss-mxfp4", "experts.gate_up_proj_scales", lambda x: x | 255, "gate_up_proj_scales holds a scale that is NaN"),
        ("qwen3-moe-fp8-blocks", "experts.3.up_proj.weight_scale_inv", None, "up_proj.weight is float8 and has no scale"),
        ("qwen3-moe-fp8-blocks", "experts.3.up_proj.weight_scale_inv", lambda x: x * torch.inf, "NaN or infinite"),
        ("qwen3-moe-fp8", "experts.3.up_proj.weight_scale", lambda x: x[:5], "weight_scale has shape"),
        ("mixtral-awq", "experts.2.w2.scales", lambda x: x * torch.nan, "scales holds a scale that is NaN"),
        ("mixtral-awq", "experts.3.w1.qweight", None, "lack .*experts.3.w1"),
    ],
)
def test_damage_of_experts_is_one_clear_error(tmp_path: Path, name: str, key: str, change: Any, message: str) -> None:
    checkpoint = Checkpoint(tmp_path, name)
    key = next(one for one in checkpoint.tensors if one.endswith(key))
    tensor = checkpoint.tensors.pop(key)
    if change is not None:
        checkpoint.tensors[key] = change(tensor).contiguous()
    checkpoint.save()
    with pytest.raises(WeightsError, match=message):
        checkpoint.experts("none")


@pytest.mark.parametrize(
    ("shape", "changes", "kept"),
    [
        ("gpt-oss-20b", {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 8}, ("mxfp4", "mxfp4")),
        ("qwen3-30b-a3b", {"num_experts": 8, "hidden_size": 64, "moe_intermediate_size": 32}, ("plain", "plain")),
        ("qwen3-30b-a3b-fp8", {"num_experts": 8, "hidden_size": 64, "moe_intermediate_size": 32}, ("plain", "plain")),
        ("qwen3-30b-a3b-fp8", {"num_experts": 8, "hidden_size": 256, "moe_intermediate_size": 128}, ("fp8", "fp8")),
    ],
)
def test_random_experts_come_in_the_format_of_the_shape(
    shape: str, changes: dict[str, Any], kept: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_from_json(SHAPES[shape] | changes | {"num_hidden_layers": 1})
    source, spec = DummyWeights(config), config.layers[0].mlp
    assert isinstance(spec, ExpertsSpec)
    loader = WeightLoader(source, torch.bfloat16, weights="groups", scheme=config.quantization, threads=0)
    take = partial(take_experts, loader, "model.layers.0", config.names.layer, spec, config.hidden_size)
    with backend.interpreted():
        weights = grouped(monkeypatch, take)
    assert tuple(weight.format for weight in weights) == kept
    assert all(0.01 < float(weight.dequantised().std()) < 0.04 for weight in weights)
    assert source.holds_fp8 == shape.endswith("fp8")


@pytest.mark.parametrize("name", [name for name in SHAPES if SHAPES[name]["model_type"] != "llama"])
def test_every_shape_is_a_model_that_is_served(name: str) -> None:
    assert config_from_json(SHAPES[name]).num_layers == SHAPES[name]["num_hidden_layers"]
