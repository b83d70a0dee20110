"""Heads on this machine: which one is meant, what is wrong with a folder, and what `penstock up` makes of that."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from common.cli import head_check, up_settings
from common.cli.doctor import check_head as doctor_check
from common.cli.up import _checked
from common.cli.up_settings import UpSettings
from common.engine.engine import Engine
from common.engine.load.head import attach_head
from common.engine.plan import StepPlan, StepRow
from common.models import head_folder
from common.models.config import load_config
from common.models.head_folder import check_head, find_head, open_head
from common.models.source import ModelFiles, resolve
from common.protocol.errors import ConfigError
from common.protocol.messages import SamplingParams
from tests.fixtures.head import edit_tensors, head_config, write_head
from tests.fixtures.tiny_model import write_tiny_model
from tests.models.driver import open_runner
from tests.unit.test_draft_check import _settled


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
        ({"rope_theta": 1 << 2000}, "rope_theta must be a positive number, not '1148"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling"),
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
        ({"d2t": torch.arange(256) * -1}, "increasing order"),
        ({"d2t": torch.full((256,), 1 << 20)}, "increasing order"),
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
