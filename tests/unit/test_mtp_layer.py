"""A model's own MTP layer: when `auto` is it, what is wrong with its tensors, and what `penstock up` makes of that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from common.cli import head_check, up_settings
from common.cli.doctor import check_head as doctor_check
from common.cli.preflight import check_model
from common.cli.up import _checked
from common.cli.up_settings import UpSettings
from common.engine.engine import Engine
from common.engine.load.head import attach_head
from common.engine.plan import StepPlan, StepRow
from common.models.config import config_from_json, load_config
from common.models.head_config import mtp_spec, num_mtp_layers
from common.models.head_folder import check_head, find_head, own_head
from common.models.source import ModelFiles, resolve
from common.models.weights.inventory import take_inventory
from common.models.weights.safetensors import SafetensorsWeights
from common.protocol.errors import ConfigError
from common.protocol.messages import SamplingParams
from tests.fixtures.head import write_head
from tests.fixtures.mtp import CONFIG, INDEX, edit_mtp, read_shards, write_mimo, write_shards
from tests.fixtures.tiny_model import edit_config
from tests.models.driver import open_runner
from tests.unit.test_draft_check import _settled


@pytest.fixture
def model(tmp_path: Path) -> ModelFiles:
    return resolve(str(write_mimo(tmp_path / "mimo")))


def reason(model: ModelFiles) -> str:
    """Why the layer can't draft, as a line."""
    head = own_head(model)
    assert head is not None
    with pytest.raises(ConfigError) as caught:
        check_head(head, load_config(model), model.name)
    said = str(caught.value)
    assert said.startswith("the MTP layer of mimo ") and "\n" not in said and caught.value.param == "head"
    return said


def test_auto_is_the_models_own_layer_on_either_device(model: ModelFiles, tmp_path: Path) -> None:
    for on_gpu in (False, True):
        head = find_head("auto", model, on_gpu=on_gpu)
        assert head is not None and (head.name, head.path) == ("MTP layer of mimo", model.path)
        held = check_head(head, load_config(model), model.name)
        assert held.spec.kind == "mtp" and held.spec.layers == (2,) and held.spec.qkv_bias
        assert len(set(held.paths.values())) == 2, "it lies in both shards"
    assert find_head("off", model) is None
    folder = write_head(tmp_path / "head", model)
    named = find_head(str(folder), model, on_gpu=True)
    assert named is not None and named.spec.kind == "eagle3"
    (finding,) = doctor_check(str(model.path), {})
    assert finding.level == "ok" and finding.found.startswith("MTP layer of mimo: drafts 512 of 512 tokens")


def test_an_mtp_layer_in_one_file_without_an_index_is_found(model: ModelFiles) -> None:
    tensors = read_shards(model.path)
    for path in [*model.path.glob("*.safetensors"), model.path / INDEX]:
        path.unlink()
    from safetensors.torch import save_file

    save_file(tensors, model.path / "model.safetensors")
    head = own_head(model)
    assert head is not None
    assert set(check_head(head, load_config(model), model.name).paths.values()) == {model.path / "model.safetensors"}
    take_inventory(model, load_config(model))
    assert not any("mtp" in name for name in SafetensorsWeights(model.path).shapes)


def test_a_model_without_the_layer_has_none(model: ModelFiles) -> None:
    edit_config(model.path, num_nextn_predict_layers=0)
    assert own_head(model) is None
    edit_config(model.path, num_nextn_predict_layers=1)
    write_shards(model.path, {name: one for name, one in read_shards(model.path).items() if "mtp_layers" not in name})
    assert own_head(model) is None and find_head("auto", model) is None
    assert head_check.check_fleet_head(asked(model).fleets[0]) == head_check.HeadCheck()


def test_its_tensors_are_no_weights_of_the_decoder(model: ModelFiles, tmp_path: Path) -> None:
    """Neither for the loader, nor where they are counted before anything is loaded."""
    config = load_config(model)
    with_layer = take_inventory(model, config)
    assert not any("mtp" in name for name in SafetensorsWeights(model.path).shapes)
    write_shards(model.path, {name: one for name, one in read_shards(model.path).items() if "mtp_layers" not in name})
    assert take_inventory(model, config) == with_layer
    assert "mimo, 2 layers" in str(check_model(str(model.path)))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"input_proj__weight": None}, "lacks the tensor model.mtp_layers.0.input_proj.weight"),
        ({"self_attn__k_proj__bias": None}, "lacks the tensor model.mtp_layers.0.self_attn.k_proj.bias"),
        (
            {"input_proj__weight": torch.ones(64, 64)},
            "input_proj.weight of [64, 64], and [64, 128] is what its config.json says",
        ),
        ({"final_layernorm__weight": torch.full((64,), torch.nan)}, "final_layernorm.weight with numbers that are NaN"),
        ({"final_layernorm__weight": torch.ones(64).double()}, "final_layernorm.weight is F64, and only plain floats"),
        (
            {
                "mlp__up_proj__weight": torch.ones(128, 64).to(torch.float8_e4m3fn),
                "mlp__up_proj__weight_scale": torch.ones(128, 1),
            },
            "can't be read: model.mtp_layers.0.mlp.up_proj.weight is F8_E4M3, and only plain floats (F32, BF16, F16) are",
        ),
        (
            {"mlp__up_proj__weight": None, "mlp__up_proj__qweight": torch.ones(64, 16, dtype=torch.int32)},
            "can't be read: model.mtp_layers.0.mlp.up_proj.qweight is I32",
        ),
    ],
)
def test_what_is_wrong_with_it_is_one_line_and_serving_goes_on(
    model: ModelFiles, tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    edit_mtp(model.path, **changes)
    assert why in reason(model)
    checked, warnings = _checked(asked(model))
    (warning,) = [one for one in warnings if "head" in one]
    assert warning.startswith("no head drafts: the MTP layer of mimo ") and why in warning
    assert checked.fleets[0].passed["decode"]["head"] == "off"
    runner: Any = open_runner(model, num_blocks=20)
    engine = Engine(runner, None, files=model)  # type: ignore[arg-type]
    with capture_logs() as logs:
        attach_head(engine, "auto", max_sequences=2)
    assert runner.head is None and not engine.head
    assert [why in line["reason"] for line in logs if line["event"] == "no_head"] == [True]


def test_a_quantised_model_whose_layer_is_plain_drafts_with_it(tmp_path: Path) -> None:
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    folder = write_mimo(tmp_path / "mimo", quantization_config=quantization)
    tensors = read_shards(folder)
    for name in [name for name in tensors if name.startswith("model.layers.") and name.endswith("_proj.weight")]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(1, 1)
    write_shards(folder, tensors)
    model = resolve(str(folder))
    check_model(str(folder))
    runner: Any = open_runner(model, num_blocks=20)
    engine = Engine(runner, None, files=model)  # type: ignore[arg-type]
    attach_head(engine, "auto", max_sequences=2)
    assert engine.head == "MTP layer of mimo"
    row = StepRow([3, 4, 5], 0, [0], 1, SamplingParams(temperature=0.0), 3, serial=0, drafts=2)
    (found,) = runner.execute(StepPlan(0, [row])).rows
    assert found.drafted is not None and len(found.drafted.tokens) == 2


def test_a_shard_that_is_cut_short_is_one_line(model: ModelFiles) -> None:
    shard = max(model.path.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(ConfigError, match="MTP layer of mimo can't be read"):
        own_head(model)


def test_of_several_layers_the_first_drafts_and_the_log_says_so(tmp_path: Path) -> None:
    folder = write_mimo(tmp_path / "mimo", num_nextn_predict_layers=3)
    tensors = read_shards(folder)
    more = {name.replace("mtp_layers.0", "mtp_layers.1"): one + 1 for name, one in tensors.items() if "mtp_layers" in name}
    write_shards(folder, tensors | more)
    model = resolve(str(folder))
    runner: Any = open_runner(model, num_blocks=20)
    engine = Engine(runner, None, files=model)  # type: ignore[arg-type]
    with capture_logs() as logs:
        attach_head(engine, "auto", max_sequences=2)
    (loaded,) = [line for line in logs if line["event"] == "head_loaded"]
    assert (loaded["head"], loaded["kind"], loaded["unused_mtp_layers"]) == ("MTP layer of mimo", "mtp", 2)


def test_random_weights_have_no_layer(model: ModelFiles) -> None:
    assert head_check.check_fleet_head(asked(model, "--load-format=dummy").fleets[0]) == head_check.HeadCheck()
    assert own_head(resolve("dummy:mimo-7b")) is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"attention_bias": False}, "attention_bias False is not supported"),
        ({"num_nextn_predict_layers": "one"}, "num_nextn_predict_layers in config.json must be a number"),
        ({"num_nextn_predict_layers": -1}, "must not be negative"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"use_mrope": True}, "use_mrope"),
    ],
)
def test_a_wrong_config_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        config_from_json(CONFIG | changes)


def test_the_layer_is_shaped_as_the_models(model: ModelFiles) -> None:
    assert num_mtp_layers(json.loads((model.path / "config.json").read_text())) == 1
    assert num_mtp_layers(CONFIG | {"model_type": "qwen2"}) == 0
    spec = mtp_spec(config_from_json(CONFIG))
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.rope.theta) == (4, 2, 16, 640_000.0)
    assert (spec.fc_inputs, spec.qkv_inputs, spec.draft_vocab_size) == (128, 64, 512)


def asked(model: ModelFiles, *flags: str) -> UpSettings:
    found = up_settings.read(["--model", str(model.path), "--shm-dir", str(model.path.parent), "--kv-cache-mb=16", *flags], {})
    assert found is not None
    return _settled(found)
