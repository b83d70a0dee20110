"""What is said of a model's memory on a GPU is what its loaded weights take: of tiny models, packed on the CPU as for a GPU."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type

from common.cli.doctor import check_footprint
from common.cli.footprint import Footprint, footprint
from common.engine.load.layout import EngineConfig, cache_layout
from common.engine.load.precision import Precision, Weights
from common.models.config import load_config
from common.models.decoder import Decoder
from common.models.registry import load_decoder
from common.models.source import ModelFiles
from common.models.weights.gguf_tensors import read_types
from common.ops import backend
from tests.models.gguf_writer import write_model
from tests.models.oracles import build
from tests.models.test_weights_experts import CASES
from tests.models.test_weights_experts import Checkpoint as Experts
from tests.models.test_weights_groups import FORMATS
from tests.models.test_weights_groups import Checkpoint as Llama

LEFT_ALONE = {
    "gpt-oss": ["self_attn", "router", "embed_tokens", "lm_head"],
    "qwen3-moe": ["self_attn", "model.layers.1.mlp", "lm_head"],
    "mixtral": ["self_attn", "lm_head"],
    "llama4": ["self_attn", "shared_expert", "model.layers.0.feed_forward", "model.layers.2.feed_forward", "lm_head"],
}
"""What is no expert: the checkpoints of these tests hold it as floats."""
WITH_ZEROS = {"gptq", "gptq-act-order", "gptq-v2", "gptq-channel", "gptq-8", "packed-zeros"}
WITH_ZEROS |= {"qwen3-moe-gptq", "qwen3-moe-gptq-order"}
"""Formats whose configuration does not say that files have zero points: what is said is without."""
EXACT = 1e-4
"""But for the sinks of attention, which are float32."""


def loaded(files: ModelFiles, weights: Weights) -> int:
    """The bytes of all tensors of a loaded model, each once."""
    with backend.interpreted():  # packed as for a GPU
        decoder = load_decoder(files, load_config(files), dtype=torch.bfloat16, device=torch.device("cpu"), weights=weights)
    return sum(tensor.nbytes for tensor in tensors_of(decoder).values())


def tensors_of(value: object) -> dict[int, torch.Tensor]:
    """The tensors in `value`, by their addresses."""
    if isinstance(value, torch.Tensor):
        return {value.data_ptr(): value}
    if isinstance(value, Decoder):
        parts: list[Any] = [value.embedding, value.layers, value.norm, value.head]
    elif dataclasses.is_dataclass(value):
        parts = [getattr(value, field.name) for field in dataclasses.fields(value)]
    else:
        parts = list(value) if isinstance(value, list | tuple) else []
    return {address: tensor for part in parts for address, tensor in tensors_of(part).items()}


def said(files: ModelFiles, weights: Weights) -> Footprint:
    model = load_config(files)
    types = read_types(files.path) if files.format == "gguf" else None
    layout = cache_layout(model, EngineConfig(num_blocks=1, dtype="bfloat16"))
    return footprint(model, Precision(compute="bfloat16", weights=weights, kv="bfloat16"), layout, types)


def set_quantisation(files: ModelFiles, **changes: Any) -> None:
    path = files.path / "config.json"
    config = json.loads(path.read_bytes())
    path.write_text(json.dumps(config | {"quantization_config": config["quantization_config"] | changes}))


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        *((name, weights) for name in CASES for weights in ("groups", "none")),
        *((name, "fp8") for name in ("qwen3-moe-fp8", "qwen3-moe-fp8-blocks", "qwen3-moe-nvfp4")),
        pytest.param("mixtral-awq", "fp8", marks=pytest.mark.slow),  # the kernel that quantises is interpreted
    ],
)
def test_experts_take_what_is_said(tmp_path: Path, name: str, weights: Weights) -> None:
    files = Experts(tmp_path, name).files
    set_quantisation(files, ignore=LEFT_ALONE[CASES[name][0]], desc_act="order" in name)
    tolerance = 0.05 if name in WITH_ZEROS and weights != "none" else EXACT
    assert said(files, weights).weight_bytes == pytest.approx(loaded(files, weights), rel=tolerance)


@pytest.mark.parametrize("name", FORMATS)
def test_linears_take_what_is_said(tmp_path: Path, name: str) -> None:
    files = Llama(tmp_path, name).files
    tolerance = 0.1 if name in WITH_ZEROS else EXACT
    assert said(files, "groups").weight_bytes == pytest.approx(loaded(files, "groups"), rel=tolerance)


def test_a_linear_with_a_part_that_is_left_alone_takes_as_many_bytes_as_floats(tmp_path: Path) -> None:
    """Q is left alone, so that Q, K and V, which are one linear, are floats; and so is all of a layer's MLP."""
    plain = ("layers.0.self_attn.q_proj", "layers.1.mlp")
    files = Llama(tmp_path, "awq", plain, [f"model.{name}" for name in plain]).files
    found, whole = said(files, "groups"), said(Llama(tmp_path / "whole", "awq").files, "groups")
    assert found.weight_bytes == pytest.approx(loaded(files, "groups"), rel=EXACT)
    floats = 64 * (64 + 2 * 32) + 3 * 64 * 128
    assert found.weight_bytes - whole.weight_bytes == pytest.approx(floats * (2 - 0.5), rel=0.15)


@pytest.mark.parametrize(
    ("oracle", "kind"),
    [("gpt-oss", Type.MXFP4), ("qwen3-moe", Type.Q4_0), ("mixtral", Type.Q8_0), ("mixtral", Type.Q4_1)],
)
def test_gguf_experts_take_what_is_said(tmp_path: Path, oracle: str, kind: Type) -> None:
    changes: dict[str, Any] = {"gpt-oss": {"swiglu_limit": 7.0}, "qwen3-moe": {"mlp_only_layers": []}}.get(oracle, {})
    files = write_model(tmp_path / "model.gguf", build(oracle, **changes), experts=kind)
    assert said(files, "groups").weight_bytes == pytest.approx(loaded(files, "groups"), rel=EXACT)


def test_doctor_counts_a_gguf_file_by_the_types_of_its_tensors(tmp_path: Path) -> None:
    """Both files say that they are of 4 bits; experts of one of them stay so on a GPU."""
    sizes = []
    for kind in (Type.Q4_0, Type.Q4_1):
        files = write_model(tmp_path / f"{kind.name}.gguf", build("mixtral"), experts=kind, file_type=2)
        found = check_footprint(str(files.path), {})[1].found
        assert ("experts in bfloat16" in found) == (kind is Type.Q4_1)
        sizes.append(said(files, "groups").weight_bytes)
    assert sizes[1] > 1.5 * sizes[0]
