"""Heads on this machine: which one is meant, what is wrong with a folder, and what `penstock up` makes of that."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from common.cli import head_check, pull, up_settings
from common.cli.doctor import check_head as doctor_check
from common.cli.up import _checked
from common.cli.up_settings import UpSettings
from common.engine.engine import Engine
from common.engine.load.head import attach_head
from common.engine.plan import StepPlan, StepRow
from common.models import head_folder
from common.models.config import load_config
from common.models.head_folder import HeldHead, check_head, find_head, open_head
from common.models.head_weights import load_head
from common.models.source import ModelFiles, resolve
from common.protocol.errors import ConfigError, UnknownModel
from common.protocol.messages import SamplingParams
from tests.fixtures.head import edit_tensors, head_config, write_head
from tests.fixtures.tiny_model import write_tiny_model
from tests.models.driver import open_runner
from tests.unit.test_draft_check import _settled

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture
def model(tmp_path: Path) -> ModelFiles:
    return resolve(str(write_tiny_model(tmp_path / "tiny")))


def reason(folder: Path, model: ModelFiles) -> str:
    """Why the head can't draft, as a line."""
    with pytest.raises(ConfigError) as caught:
        check_head(open_head(folder), load_config(model), model.name)
    said = str(caught.value)
    assert "\n" not in said and caught.value.param == "head"
    return said


def test_a_whole_folder_is_fine(model: ModelFiles, tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", model)
    check_head(open_head(folder), load_config(model), model.name)
    (folder / "config.json").write_text(json.dumps(head_config(model, head_dim=None, rope_scaling=None)))
    check_head(open_head(folder), load_config(model), model.name)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "--draft-model"),
        ({"vocab_size": 999}, "is for a vocabulary of 999"),
        ({"hidden_size": 48}, "is for a hidden size of 48"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1]}, "must be 3 different layers"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2, 1]}, "rising"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 99]}, "reads hidden states of layer 99"),
        ({"num_attention_heads": "many"}, "num_attention_heads must be a positive number, not 'many'"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"draft_vocab_size": 1 << 20}, "draft_vocab_size"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a positive number, not 'nan'"),
        ({"hidden_size": math.inf}, "hidden_size must be a positive number, not 'inf'"),
        ({"rope_theta": 1 << 2000}, "must be a number, not 1148"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope type 'yarn'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope' is not supported"),
        ({"attention_bias": True}, "attention_bias 'True' is not supported in a head, only False"),
        ({"num_hidden_layers": 2}, "lacks the tensor layers.1.input_layernorm.weight"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers must be a positive number, not '2.5'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive number, not '0'"),
        ({"num_hidden_layers": 1 << 40}, "num_hidden_layers must be at most 8, not '1099511627776'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"target_hidden_size": 128}, "not as wide as its target"),
        ({"norm_before_residual": "yes"}, "norm_before_residual must be true or false"),
        ({"architectures": ["Eagle3Speculator"]}, "num_attention_heads must be a positive number"),
        ({"architectures": ["Eagle3Speculator"], "transformer_layer_config": 3}, "transformer_layer_config must be an object"),
        ({"eagle_aux_hidden_state_layer_ids": None}, "does not say which layers it reads"),
        ({"eagle_aux_hidden_state_layer_ids": None, "eagle_config": {LAYER_IDS: [0, 1, 9]}}, "hidden states of layer 10"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object, not 'yarn'"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object, not '[1]'"),
        ({"target": "smollm2"}, "target must be an object, not 'smollm2'"),
        ({"intermediate_size": 32}, "mlp.gate_proj.weight of [64, 64], and [32, 64] is what its config.json says"),
    ],
)
def test_a_wrong_config_is_one_line(model: ModelFiles, tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    folder = write_head(tmp_path / "head", model)
    (folder / "config.json").write_text(json.dumps(head_config(model, **changes)))
    assert why in reason(folder, model)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"fc__weight": None}, "lacks the tensor fc.weight"),
        ({"norm__weight": torch.ones(7).bfloat16()}, "norm.weight of [7]"),
        ({"norm__weight": torch.full((64,), torch.nan).bfloat16()}, "norm.weight with numbers that are NaN"),
        ({"norm__weight": torch.ones(64, dtype=torch.int8)}, "norm.weight of type I8"),
        ({"d2t": torch.zeros(256)}, "d2t of type F32"),
        ({"d2t": torch.arange(256) * -1}, "each once at most"),
        ({"d2t": torch.full((256,), 1 << 20)}, "each once at most"),
    ],
)
def test_wrong_tensors_are_one_line(model: ModelFiles, tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    folder = write_head(tmp_path / "head", model, draft_vocab_size=256)
    edit_tensors(folder, **changes)
    assert why in reason(folder, model)


def _with_header(said: bytes) -> bytes:
    return len(said).to_bytes(8, "little") + said


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 100,
        b"\x10\0\0\0\0\0\0\0{",
        _with_header(b"[1]"),
        _with_header(b"[" * 100_000),
        _with_header(b'{"fc.weight": 1}'),
    ],
    ids=["empty", "binary", "cut", "list", "nested", "number"],
)
def test_a_damaged_file_is_one_line(model: ModelFiles, tmp_path: Path, content: bytes) -> None:
    folder = write_head(tmp_path / "head", model)
    (folder / "model.safetensors").write_bytes(content)
    assert "can't be read" in reason(folder, model)
    (folder / "model.safetensors").unlink()
    assert "can't be read" in reason(folder, model)


def test_published_heads_say_less_and_say_it_elsewhere(model: ModelFiles, tmp_path: Path) -> None:
    """EAGLE's own: neither layers nor where embedding and output head are; SGLang's: layers by what leaves them; vLLM's
    speculators: another form, names, and norms."""
    target = msgspec.structs.replace(load_config(model), layers=load_config(model).layers * 12)
    folder, config = tmp_path / "head", head_config(model)
    write_head(folder, model, embedding_from_target=False, head_from_target=False)
    bare = {name: value for name, value in config.items() if name not in (LAYER_IDS, "target") and "from_target" not in name}
    bare["rope_scaling"] = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}

    def held(**changes: Any) -> HeldHead:
        (folder / "config.json").write_text(json.dumps(bare | changes))
        return check_head(open_head(folder), target, model.name)

    spec = held().spec
    layers = target.num_layers
    assert spec.layers == (2, layers // 2, layers - 3)
    assert (spec.rope.type, spec.rope.factor, spec.rope.original_max_context) == ("llama3", 8.0, 8192)
    assert not spec.embedding_from_target and not spec.head_from_target and not spec.norm_before_residual
    assert held(eagle_config={LAYER_IDS: [1, 5, 9], "use_aux_hidden_state": True}).spec.layers == (2, 6, 10)
    assert held(**{LAYER_IDS: [1, 5, 9]}).spec.layers == (1, 5, 9)
    edit_tensors(folder, embed_tokens__weight=None, lm_head__weight=None, t2d=torch.ones(model_vocab(config)).bool())
    assert held().spec.embedding_from_target and held().spec.head_from_target

    whole = {name: config[name] for name in ("vocab_size", "hidden_size")}
    layer = {name: value for name, value in bare.items() if name not in ("architectures", "draft_vocab_size")} | whole
    speculator = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer | {"num_hidden_layers": 1, "hidden_act": "silu", "model_type": "llama"},
        "draft_vocab_size": config["draft_vocab_size"],
        "norm_before_residual": True,
        "target_hidden_size": None,
        LAYER_IDS: None,
    }
    (folder / "config.json").write_text(json.dumps(speculator))
    tensors = load_file(folder / "model.safetensors")
    save_file({name.replace("midlayer.", "layers.0."): one for name, one in tensors.items()}, folder / "model.safetensors")
    found = check_head(open_head(folder), target, model.name)
    assert found.prefix == "layers.0." and found.spec.norm_before_residual and found.spec.rope.type == "llama3"


def model_vocab(config: dict[str, Any]) -> int:
    return int(config["vocab_size"])


def test_a_head_of_the_whole_vocabulary_need_not_list_it(model: ModelFiles, tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", model, draft_vocab_size=None)
    edit_tensors(folder, d2t=None)
    held = check_head(open_head(folder), load_config(model), model.name)
    assert held.spec.draft_vocab_size == held.spec.vocab_size and "d2t" not in held.shapes
    runner: Any = open_runner(model, num_blocks=20)
    tensors = load_head(open_head(folder), runner.decoder, model.name)
    assert tensors.ids.tolist() == list(range(held.spec.vocab_size))


def test_auto_is_the_head_that_is_shipped_for_this_very_model(
    model: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_folder, "SHIPPED", tmp_path / "shipped")
    assert find_head("auto", model) is None
    target = {"name": model.name, "revision": "another"}
    write_head(tmp_path / "shipped" / "older", model, target=target)
    assert find_head("auto", model) is None
    write_head(tmp_path / "shipped" / "mine", model)
    found = find_head("auto", model)
    assert found is not None and found.name == "mine"
    assert find_head("off", model) is None
    (finding,) = doctor_check(str(model.path), {})
    assert finding.level == "ok" and finding.found.startswith("mine: drafts")


def asked(model: ModelFiles, *flags: str) -> UpSettings:
    found = up_settings.read(["--model", str(model.path), "--shm-dir", str(model.path.parent), "--kv-cache-mb=16", *flags], {})
    assert found is not None
    return _settled(found)


def test_up_starts_without_a_head_that_can_not_draft(model: ModelFiles, tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", model)
    checked, warnings = _checked(asked(model, f"--head={folder}"))
    assert not any("head" in warning for warning in warnings)
    assert checked.fleets[0].passed["decode"]["head"] == str(folder)
    edit_tensors(folder, fc__weight=None)
    checked, warnings = _checked(asked(model, f"--head={folder}"))
    (warning,) = [one for one in warnings if "head" in one]
    assert warning == "no head drafts: the head head lacks the tensor fc.weight"
    assert checked.fleets[0].passed["decode"]["head"] == "off"
    for flag, why in ((f"--head={tmp_path}/none", "no folder"), (f"--head={folder}", "lacks")):
        (warning,) = [one for one in _checked(asked(model, flag))[1] if "head" in one]
        assert why in warning


def test_engines_that_can_not_run_a_head_say_so_when_they_are_asked_to(
    model: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_head(tmp_path / "heads" / "head", model)
    for flag in ("--engine=simulated", "--zero-retention"):
        found = head_check.check_fleet_head(asked(model, f"--head={folder}", flag).fleets[0])
        assert (found.head is None and "use --head off" in found.reason) or "--head off" in found.reason
        monkeypatch.setattr(head_folder, "SHIPPED", folder.parent)
        found = head_check.check_fleet_head(asked(model, flag).fleets[0])
        assert found.head is None and not found.reason, "nobody asked for it"


def test_a_worker_serves_on_without_a_head_that_is_damaged(model: ModelFiles, tmp_path: Path) -> None:
    runner: Any = open_runner(model, num_blocks=20)
    engine = Engine(runner, None, files=model)  # type: ignore[arg-type]
    folder = write_head(tmp_path / "head", model)
    edit_tensors(folder, d2t=None)
    attach_head(engine, str(folder), max_sequences=2)
    assert runner.head is None and not engine.head
    attach_head(engine, str(write_head(folder, model)), max_sequences=2)
    assert runner.head is not None and engine.head == "head"


def test_a_head_whose_numbers_overflow_proposes_nothing(model: ModelFiles, tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", model)
    edit_tensors(folder, fc__weight=torch.full((64, 192), 3e38).bfloat16())
    for dtype in ("float32", "auto"):
        runner: Any = open_runner(model, num_blocks=20, dtype=dtype, threads=2)
        engine = Engine(runner, None, files=model)  # type: ignore[arg-type]
        attach_head(engine, str(folder), max_sequences=4)
        assert engine.head == "head"
        row = StepRow([3, 4, 5], 0, [0], 1, SamplingParams(temperature=0.0), 3, serial=0, drafts=2)
        (found,) = runner.execute(StepPlan(0, [row])).rows
        assert found.tokens[0] >= 0 and found.drafted is not None and not found.drafted.tokens


def test_a_head_is_pulled_and_named_like_a_model(
    model: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_head(tmp_path / "head", model)
    pull.command(str(folder))
    assert "it is a head that drafts for another model: head: drafts 256 of 512 tokens" in " ".join(
        capsys.readouterr().err.split()
    )
    monkeypatch.setattr(head_folder, "resolve", lambda spec: msgspec.structs.replace(model, name=spec, path=folder))
    found = find_head("owner/head", model)
    assert found is not None and (found.name, found.path) == ("owner/head", folder)

    def missing(spec: str) -> ModelFiles:
        raise UnknownModel(f"{spec} is not on this machine")

    monkeypatch.setattr(head_folder, "resolve", missing)
    with pytest.raises(ConfigError, match="owner/head is not on this machine"):
        find_head("owner/head", model)


def test_weights_that_are_pickled_are_named(model: ModelFiles, tmp_path: Path) -> None:
    folder = write_head(tmp_path / "head", model)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "convert it to safetensors" in reason(folder, model)
