"""GGUF files of every family that is served in them give the text of the model that they were converted from."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize

from common.models.config import load_config
from common.models.registry import open_weights
from common.models.source import resolve
from common.models.spec import ExpertsSpec
from common.models.weights.base import WeightLoader
from common.models.weights.experts import take_experts
from common.models.weights.inventory import take_inventory
from common.ops import backend
from common.protocol.errors import ConfigError, UnknownModel
from tests.models.driver import Request, open_runner, run
from tests.models.gguf_writer import write_model
from tests.models.oracles import build, greedy_choices, oracle_prompt
from tests.models.test_weights_experts import grouped

_PATTERN = ["sliding_attention"] * 5 + ["full_attention"]
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "mistral": ("mistral", {}, {}),
    "qwen2": ("qwen2", {}, {}),
    "gemma": ("gemma", {}, {}),
    "granite": ("granite", {"attention_bias": False}, {}),
    "granite4": ("granite4", {}, {}),
    "granite4-without-positions": ("granite4", {"position_embedding_type": None}, {}),
    "glm4-moe": ("glm4-moe", {}, {"expert_group_count": 1, "expert_group_used_count": 1}),
    "glm4-moe-without-norms": ("glm4-moe", {"use_qk_norm": False, "attention_bias": False}, {}),
    "ernie4.5": ("ernie4.5", {}, {}),
    "ernie4.5-moe": ("ernie4.5-moe", {"moe_layer_end_index": -1}, {}),
    "ernie4.5-moe-every-other": ("ernie4.5-moe", {"moe_layer_end_index": -1, "moe_layer_interval": 2}, {}),
    "exaone4": ("exaone4", {}, {}),
    "exaone4-without-windows": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}, {}),
    "seed-oss": ("seed-oss", {}, {}),
    "seed-oss-without-biases": ("seed-oss", {"attention_bias": False}, {}),
    "ministral3": ("ministral3", {}, {}),
    "olmoe": ("olmoe", {}, {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 32}, {}),
    "gemma3": (
        "gemma3",
        {"query_pre_attn_scalar": 32},
        {"attention.sliding_window_pattern": [True, False, True]},
    ),
    "gemma3-every-sixth": ("gemma3", {"query_pre_attn_scalar": 32, "num_hidden_layers": 6, "layer_types": _PATTERN}, {}),
    "phi3": ("phi3", {}, {}),
    "olmo2": ("olmo2", {}, {}),
    "olmo3": ("olmo3", {}, {}),
    "smollm3": ("smollm3", {}, {}),
    "glm4": ("glm4", {}, {}),
    "glm4-without-biases": ("glm4", {"attention_bias": False}, {}),
    "mixtral": ("mixtral", {}, {}),
    "qwen3-moe": ("qwen3-moe", {"mlp_only_layers": []}, {}),
    "gpt-oss": ("gpt-oss", {"swiglu_limit": 7.0}, {}),
}
"""Oracle, changes of its configuration, and further metadata."""


@pytest.mark.parametrize("name", CASES)
def test_the_text_is_that_of_the_model_that_was_converted(tmp_path: Path, name: str) -> None:
    oracle, changes, extra = CASES[name]
    model = build(oracle, **changes)
    files = write_model(tmp_path / "model.gguf", model, extra=extra)
    prompt = oracle_prompt()[:40]
    output = run(open_runner(files), [Request(prompt, 10, chunk=24)])[0]
    assert output == greedy_choices(model, prompt, output)


def test_longrope_comes_as_tensors(tmp_path: Path) -> None:
    model = build("phi3-longrope")
    files = write_model(tmp_path / "model.gguf", model)
    assert len(load_config(files).rope.long_factors) == 6
    prompt = oracle_prompt()[:40]
    output = run(open_runner(files), [Request(prompt, 10)])[0]
    assert output == greedy_choices(model, prompt, output)
    with pytest.raises(ConfigError, match="8 pairs of dimensions"):
        load_config(write_model(tmp_path / "other.gguf", model, extra={"rope.dimension_count": 16}))


@pytest.mark.parametrize("small_first_part", [False, True])
def test_a_model_in_parts_is_the_model_in_one_file(tmp_path: Path, small_first_part: bool) -> None:
    model = build("gpt-oss", swiglu_limit=7.0)
    _round_experts(model, Type.MXFP4)
    folder = tmp_path / "parts"
    folder.mkdir()
    parts = write_model(
        folder / "model.gguf", model, experts=Type.MXFP4, tensors_of_a_part=11, small_first_part=small_first_part
    )
    whole = write_model(tmp_path / "model.gguf", model, experts=Type.MXFP4)
    assert len(list(folder.glob("*.gguf"))) >= 3
    assert take_inventory(parts, load_config(parts)) == take_inventory(whole, load_config(whole))
    prompt = oracle_prompt()[:40]
    output = run(open_runner(parts), [Request(prompt, 8)])[0]
    assert output == greedy_choices(model, prompt, output)
    found = [resolve(str(path)) for path in (parts.path, folder)]
    assert [(one.path, one.revision) for one in found] == [(parts.path, found[0].revision)] * 2
    assert [one.name for one in found] == ["model", "parts"]
    last = max(folder.glob("model-*.gguf"))
    with pytest.raises(UnknownModel, match=r"name the first one, model-00001-of-"):
        resolve(str(last))
    identity = load_config(parts).identity
    with last.open("r+b") as file:  # a weight
        file.seek(-1, 2)
        file.write(b"\x07")
    assert resolve(str(folder)).revision != found[0].revision
    assert load_config(parts).identity != identity
    last.unlink()
    for path in (parts.path, folder):
        with pytest.raises(UnknownModel, match=f"lacks {last.name}"):
            resolve(str(path))


def test_layers_that_only_draft_are_passed_over(tmp_path: Path) -> None:
    model = build("glm4-moe")
    further = {f"blk.3.{name}.weight": np.ones(64, np.float32) for name in ("attn_norm", "nextn.enorm", "nextn.hnorm")}
    extra = {"block_count": 4, "nextn_predict_layers": 1}
    files = write_model(tmp_path / "model.gguf", model, extra=extra, tensors=further)
    assert load_config(files).num_layers == 3
    without = write_model(tmp_path / "without.gguf", model)
    assert take_inventory(files, load_config(files)) == take_inventory(without, load_config(without))
    prompt = oracle_prompt()[:40]
    output = run(open_runner(files), [Request(prompt, 8)])[0]
    assert output == greedy_choices(model, prompt, output)
    with pytest.raises(ConfigError, match="nextn_predict_layers"):
        load_config(write_model(tmp_path / "none.gguf", model, extra={"nextn_predict_layers": 3}))


def test_heads_of_kv_that_differ_by_layer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="head_count_kv in the GGUF metadata must be the same"):
        load_config(write_model(tmp_path / "model.gguf", build("granite4"), extra={"attention.head_count_kv": [2, 4]}))


def _round_experts(model: Any, kind: Type) -> None:
    """In place: what a file has that holds them as `kind`."""
    for key, tensor in model.named_parameters():
        if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored = tensor.data.transpose(1, 2) if model.config.model_type == "gpt_oss" else tensor.data
            rounded = torch.from_numpy(dequantize(quantize(np.ascontiguousarray(stored.numpy()), kind), kind))
            tensor.data = (rounded.transpose(1, 2) if model.config.model_type == "gpt_oss" else rounded).contiguous()


@pytest.mark.parametrize(
    ("oracle", "kind", "kept"),
    [
        ("gpt-oss", Type.MXFP4, "mxfp4"),
        ("qwen3-moe", Type.Q4_0, "int4"),
        ("mixtral", Type.Q8_0, "plain"),
        ("mixtral", Type.Q4_1, "plain"),
    ],
)
def test_quantised_experts(tmp_path: Path, oracle: str, kind: Type, kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: dict[str, Any] = {"gpt-oss": {"swiglu_limit": 7.0}, "qwen3-moe": {"mlp_only_layers": []}}.get(oracle, {})
    model = build(oracle, 0, **changes)
    _round_experts(model, kind)
    files = write_model(tmp_path / "model.gguf", model, experts=kind)
    prompt = oracle_prompt()[:40]
    output = run(open_runner(files), [Request(prompt, 8)])[0]
    assert output == greedy_choices(model, prompt, output)

    config = load_config(files)
    spec = config.layers[0].mlp
    assert isinstance(spec, ExpertsSpec)
    found = []
    for weights in ("groups", "none"):
        loader = WeightLoader(open_weights(files, config), torch.float32, weights=weights)
        take = partial(take_experts, loader, "model.layers.0", config.names.layer, spec, config.hidden_size)
        with backend.interpreted():  # packed as for a GPU
            found.append(grouped(monkeypatch, take)[0])
    assert found[0].format == kept
    torch.testing.assert_close(found[0].dequantised(), found[1].values)


@pytest.mark.parametrize(
    ("oracle", "extra", "message"),
    [
        ("mixtral", {"expert_gating_func": 2}, "expert_gating_func 2 is not supported"),
        ("mixtral", {"expert_shared_count": 1}, "sets expert_shared_count to '1'"),
        ("glm4-moe", {"expert_group_count": 4, "expert_group_used_count": 1}, "sets expert_group_count to '4'"),
        ("ministral3", {"rope.scaling.yarn_log_multiplier": 0.5}, "yarn_log_multiplier 0.5 is not supported"),
        ("mixtral", {"expert_weights_scale": 2.5}, "sets expert_weights_scale"),
        ("mixtral", {"expert_used_count": 5}, "can't visit 5 of 4 experts"),
        ("gemma3", {"attention.sliding_window_pattern": [True]}, "a value for each of 3 layers"),
        ("gemma2", {"expert_count": 4}, "a mixture of experts is not supported for this family"),
        ("phi3", {"rope.scaling.yarn_log_multiplier": 0.1}, "sets rope.scaling.yarn_log_multiplier"),
    ],
)
def test_metadata_that_would_change_the_computation_are_refused_by_name(
    tmp_path: Path, oracle: str, extra: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write_model(tmp_path / "model.gguf", build(oracle), extra=extra))
