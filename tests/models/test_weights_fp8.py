"""Published FP8 checkpoints: every scheme gives the weights that it means, and what nobody knows is an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.models.config import config_from_json, load_config
from common.models.registry import load_decoder, open_weights
from common.models.source import ModelFiles
from common.models.weights.base import LinearFormat, WeightLoader, WeightsError
from common.ops.linear.weight import LinearWeight
from common.protocol.errors import ConfigError
from tests.models.driver import Request, open_runner, run
from tests.models.oracles import build, oracle_prompt, save

Scheme = Literal["tensor", "channel", "block"]
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
}
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
CONFIGS: dict[str, dict[str, Any]] = {
    "channel": COMPRESSED,
    "tensor": {"quant_method": "fp8", "activation_scheme": "static"},
    "block": BLOCKS,
}


def quantise(weight: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float8 weight, its scale as files hold it, and the weight that both mean (float32)."""
    rows, columns = weight.shape
    if scheme == "block":
        padded = torch.zeros(-(-rows // 128) * 128, -(-columns // 128) * 128)
        padded[:rows, :columns] = weight
        scale = padded.view(len(padded) // 128, 128, -1, 128).abs().amax((1, 3)).clamp(min=1e-6) / 448
        whole = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    elif scheme == "channel":
        scale = (weight.abs().amax(1, keepdim=True) / 448).to(torch.bfloat16)
        whole = scale.float()
    else:
        scale = weight.abs().amax() / 448
        whole = scale
    data = (weight / whole).to(torch.float8_e4m3fn)
    return data, scale, data.float() * whole


class Checkpoint:
    """A tiny Llama in FP8. `meant`: the tensors that its files stand for."""

    def __init__(self, folder: Path, scheme: Scheme, *, plain: tuple[str, ...] = (), **changes: Any) -> None:
        torch.manual_seed(3)
        save(build("llama"), folder)
        self.files = ModelFiles(name="fp8", format="safetensors", path=folder)
        self.meant = load_file(folder / "model.safetensors")
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in self.meant.items():
            if "_proj." not in name or any(part in name for part in plain):
                tensors[name] = tensor
                continue
            tensors[name], scale, self.meant[name] = quantise(tensor, scheme)
            tensors[f"{name}_scale_inv" if scheme == "block" else f"{name}_scale"] = scale
            if scheme == "tensor":
                tensors[name.replace("weight", "input_scale")] = torch.tensor([0.5])
        save_file(tensors | changes.pop("more", {}), folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_bytes())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIGS[scheme] | changes}))

    def loader(self, weights: LinearFormat = "none", dtype: torch.dtype = torch.float32) -> WeightLoader:
        config = load_config(self.files)
        return WeightLoader(open_weights(self.files, config), dtype, weights=weights)


def meant(weight: LinearWeight) -> torch.Tensor:
    """The weight that a packed FP8 linear stands for."""
    assert weight.scale is not None
    scale = weight.scale[:, None]
    if weight.scale.ndim == 2:
        scale = weight.scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        scale = scale[: weight.out_features, : weight.in_features]
    return weight.data.float() * scale


Q, K, V = ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.v_proj")
UP = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize("scheme", ["tensor", "channel", "block"])
def test_a_weight_taken_as_a_tensor_is_what_the_file_means(tmp_path: Path, scheme: Scheme) -> None:
    checkpoint = Checkpoint(tmp_path, scheme)
    loader = checkpoint.loader()
    assert torch.equal(loader.take(f"{UP}.weight", 128, 64), checkpoint.meant[f"{UP}.weight"])
    packed = loader.take_linear({Q: 64, K: 32, V: 32}, 64, bias=False)
    assert packed.format != "fp8"


@pytest.mark.parametrize("scheme", ["tensor", "channel"])
def test_fp8_parts_are_joined_as_they_are(tmp_path: Path, scheme: Scheme) -> None:
    checkpoint = Checkpoint(tmp_path, scheme)
    packed = checkpoint.loader("fp8").take_linear({Q: 64, K: 32, V: 32}, 64, bias=False)
    assert (packed.format, packed.out_features, packed.in_features) == ("fp8", 128, 64)
    assert torch.equal(meant(packed), torch.cat([checkpoint.meant[f"{name}.weight"] for name in (Q, K, V)]))


def test_blocks_are_kept_and_joined_where_seams_allow(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, "block")
    loader = checkpoint.loader("fp8", torch.bfloat16)
    packed = loader.take_linear({"model.layers.1.mlp.gate_proj": 128, UP: 128}, 64, bias=False)
    assert (packed.format, packed.dtype) == ("fp8", torch.bfloat16)
    assert packed.scale is not None
    assert packed.scale.shape == (2, 1)
    assert torch.equal(meant(packed)[128:], checkpoint.meant[f"{UP}.weight"])
    # 64 + 32 + 32 rows: a block of the joined weight would have several scales
    assert loader.take_linear({Q: 64, K: 32, V: 32}, 64, bias=False).format != "fp8"


def test_what_a_checkpoint_left_alone_stays_so(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, "channel", plain=("layers.0.self_attn.k_proj", "layers.1"))
    loader = checkpoint.loader("fp8")
    assert loader.take_linear({UP: 128}, 64, bias=False).format != "fp8"
    assert loader.take_linear({Q: 64, K: 32, V: 32}, 64, bias=False).format != "fp8", "one part is not FP8"
    assert loader.take_linear({"model.layers.0.mlp.up_proj": 128}, 64, bias=False).format == "fp8"


@pytest.mark.parametrize("bias", [False, True])
def test_plain_weights_are_quantised_while_loading(tmp_path: Path, bias: bool) -> None:
    weights = {f"{name}.weight": torch.randn(size, 48) for name, size in ((Q, 40), (K, 24))}
    biases = {f"{name}.bias": torch.randn(size) for name, size in ((Q, 40), (K, 24))}
    save_file(weights | biases, tmp_path / "model.safetensors")
    files = ModelFiles(name="plain", format="safetensors", path=tmp_path)
    config = config_from_json(json.loads((Path(save(build("llama"), tmp_path / "m").path) / "config.json").read_bytes()))
    loader = WeightLoader(open_weights(files, config), torch.float32, weights="fp8")
    packed = loader.take_linear({Q: 40, K: 24}, 48, bias=bias)
    whole = torch.cat(list(weights.values()))
    assert packed.format == "fp8"
    assert ((meant(packed) - whole).abs() <= whole.abs() / 15 + 1e-3).all()
    if bias:
        assert packed.bias is not None
        assert torch.equal(packed.bias, torch.cat(list(biases.values())))


@pytest.mark.parametrize("scheme", ["tensor", "channel", "block"])
def test_a_cpu_runs_the_dequantised_model(tmp_path: Path, scheme: Scheme) -> None:
    checkpoint = Checkpoint(tmp_path / "fp8", scheme)
    plain = save(build("llama"), tmp_path / "plain")
    save_file(checkpoint.meant, plain.path / "model.safetensors")
    request = [Request(oracle_prompt(), 6)]
    expected = run(open_runner(plain), request)
    assert run(open_runner(checkpoint.files), [Request(oracle_prompt(), 6)]) == expected


def test_kv_scales_come_per_layer_or_not_at_all(tmp_path: Path) -> None:
    more = {
        "model.layers.0.self_attn.k_scale": torch.tensor(0.25),
        "model.layers.1.self_attn.v_scale": torch.tensor([2.0, 3.0]),
    }
    checkpoint = Checkpoint(tmp_path / "some", "channel", more=more)
    scales = checkpoint.loader().take_kv_scales(2, 2)
    assert scales is not None
    assert scales.tolist() == [[[0.25, 0.25], [1, 1]], [[1, 1], [2, 3]]]
    load_decoder(checkpoint.files, load_config(checkpoint.files), dtype=torch.float32, device=torch.device("cpu"))
    assert Checkpoint(tmp_path / "none", "channel").loader().take_kv_scales(2, 2) is None
    with pytest.raises(WeightsError, match="positive"):
        checkpoint.loader().take_kv_scales(2, 3)


def test_a_weight_without_its_scale_is_an_error(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, "channel")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {f"{UP}.weight_scale": torch.ones(5)}, path)
    with pytest.raises(WeightsError, match=r"shape \[5\], which fits no weight of shape \[128, 64\]"):
        checkpoint.loader().take(f"{UP}.weight", 128, 64)
    del tensors[f"{UP}.weight_scale"]
    save_file(tensors, path)
    with pytest.raises(WeightsError, match="no scale beside it"):
        checkpoint.loader().take(f"{UP}.weight", 128, 64)


JSON = {"model_type": "qwen3", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2} | {
    "num_attention_heads": 4
}


def test_published_configurations_are_known() -> None:
    for quantization, found in (
        (None, "plain"),
        (COMPRESSED, "fp8"),
        (BLOCKS, "fp8_blocks"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}, "fp8"),
    ):
        assert config_from_json({**JSON, "quantization_config": quantization}).weight_format == found


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "hqq"}, "'hqq' is not supported"),
        ("fp8", "must be an object"),
        ({**BLOCKS, "fmt": "e5m2"}, "e5m2"),
        ({**BLOCKS, "weight_block_size": [64, 128]}, r"\[64, 128\]"),
        ({**COMPRESSED, "format": "pack-quantized"}, "pack-quantized weights of type 'float'"),
        ({**COMPRESSED, "config_groups": {}}, "config_groups"),
        ({**COMPRESSED, "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int"}}}}, "8-bit floats only"),
        (
            {**COMPRESSED, "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float", "strategy": "group"}}}},
            "'group' is not supported",
        ),
    ],
)
def test_an_unknown_scheme_is_named(quantization: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_json({**JSON, "quantization_config": quantization})
