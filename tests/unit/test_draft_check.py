"""What `penstock up` makes of a draft model: an engine like others, or a warning and a start without drafts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import load_file, save_file

from common.cli import up_settings
from common.cli.doctor import check_draft
from common.cli.draft_check import check_draft_model
from common.cli.fleet import ProcessSpec, processes, settled
from common.cli.up import _checked
from common.cli.up_settings import UpSettings
from common.models.config import load_config
from common.models.source import resolve
from common.models.weights.errors import WeightsError
from services.draft.config import DraftConfig
from services.draft.model_engine import draft_quantization, open_draft_engine
from tests.fixtures.tiny_model import edit_config, write_tiny_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


@pytest.fixture
def other(model: Path) -> Path:
    folder = model.with_name("other")
    shutil.copytree(model, folder)
    return folder


def asked(model: Path, *flags: str) -> UpSettings:
    found = up_settings.read(["--model", str(model), "--shm-dir", str(model.parent), *flags], {})
    assert found is not None
    return found


def test_a_draft_worker_with_a_model_is_an_engine(model: Path, other: Path) -> None:
    settings = asked(model, "--draft=1", f"--draft-model={other}", "--kv-cache-mb=16")
    checked, warnings = _checked(_settled(settings))
    assert not any("drafted" in warning for warning in warnings)
    (draft,) = [spec for spec in _processes(checked) if spec.role == "draft"]
    assert draft.threads == 2
    for flag, value in (("--draft-model", str(other)), ("--model", str(model)), ("--kv-cache-mb", "16"), ("--threads", "2")):
        assert draft.arguments[draft.arguments.index(flag) + 1] == value
    found = check_draft_model(checked.fleets[0])
    assert found.servable is not None and found.servable.pool_bytes <= 16 << 20 and not found.reason


def test_n_grams_need_no_engine(model: Path) -> None:
    (draft,) = [spec for spec in _processes(_settled(asked(model, "--draft=1"))) if spec.role == "draft"]
    assert draft.threads == 0 and "--threads" not in draft.arguments


def test_a_draft_model_with_a_shorter_context_drafts_as_far_as_it_goes(model: Path, other: Path) -> None:
    edit_config(other, max_position_embeddings=512)
    settings = asked(model, "--draft=1", f"--draft-model={other}", "--max-model-len=2000", "--kv-cache-mb=16")
    found = check_draft_model(settings.fleets[0])
    assert found.servable is not None and found.servable.model.max_context == 512


def other_tokens(folder: Path) -> None:
    path = folder / "tokenizer.json"
    said = json.loads(path.read_text())
    said["model"]["vocab"] = {name: (token + 1) % 512 for name, token in said["model"]["vocab"].items()}
    path.write_text(json.dumps(said))


def named_twice(folder: Path) -> None:
    """Give the draft model a vocabulary of its own, all of whose tokens are one of the target's."""
    edit_config(folder, draft_vocab_size=100, tie_word_embeddings=False)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][:100].copy()
    save_file(tensors | {"d2t": -np.arange(100)}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "flags", "says"),
    [
        (named_twice, ["--draft=1"], "d2t does not name tokens of the target, each once at most"),
        (other_tokens, ["--draft=1"], "another tokenizer"),
        (lambda folder: (folder / "tokenizer.json").unlink(), ["--draft=1"], "tokenizer of the draft model other is missing"),
        (lambda folder: edit_config(folder, vocab_size=400), ["--draft=1"], "a vocabulary of 400"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"no"), ["--draft=1"], "model.safetensors"),
        (lambda folder: None, ["--draft=0"], "add --draft 1"),
    ],
)
def test_a_draft_model_that_cannot_be_used_is_a_warning_and_no_draft_worker_starts(
    damage: Callable[[Path], object], flags: list[str], says: str, model: Path, other: Path
) -> None:
    damage(other)
    settings = asked(model, *flags, f"--draft-model={other}", "--kv-cache-mb=16")
    checked, warnings = _checked(_settled(settings))
    (warning,) = [warning for warning in warnings if warning.startswith("nothing is drafted")]
    assert says in warning and "\n" not in warning
    assert [spec.role for spec in _processes(checked)] == ["gateway", "decode", "kvstore"]


@pytest.mark.parametrize("with_model", [False, True])
def test_drafts_that_decode_would_not_verify_are_a_warning_and_no_draft_worker_starts(
    with_model: bool, model: Path, other: Path
) -> None:
    flags = [f"--draft-model={other}"] if with_model else []
    settings = asked(model, "--draft=2", "--speculation-tokens=0", "--kv-cache-mb=16", *flags)
    checked, warnings = _checked(_settled(settings))
    (warning,) = [warning for warning in warnings if warning.startswith("nothing is drafted")]
    assert "with --speculation-tokens 0 nobody asks --draft 2: leave one out" in warning
    assert [spec.role for spec in _processes(checked)] == ["gateway", "decode", "kvstore"]
    joining = _settled(asked(model, "--draft=2", "--decode=0", "--speculation-tokens=0", "--kv-cache-mb=16", *flags))
    assert not check_draft_model(joining.fleets[0]).reason, "decode workers with other settings may be there"


def _settled(settings: UpSettings) -> UpSettings:
    """On two cores, without a GPU."""
    fleets = tuple(replace(fleet, config=settled(fleet.config, 0, 2)) for fleet in settings.fleets)
    return replace(settings, config=fleets[0].config, fleets=fleets)


def _processes(settings: UpSettings) -> list[ProcessSpec]:
    return processes(settings.config, cores=2, passed=settings.passed, services=settings.services, fleets=settings.fleets)


def test_doctor_checks_the_draft_model_that_variables_name(model: Path, other: Path) -> None:
    assert not check_draft(str(model), {})
    (finding,) = check_draft(str(model), {"PENSTOCK_DRAFT": "1", "PENSTOCK_DRAFT_MODEL": str(other)})
    assert finding.level == "ok" and finding.found.startswith("other: llama, 2 layers")
    other_tokens(other)
    (finding,) = check_draft(str(model), {"PENSTOCK_DRAFT": "1", "PENSTOCK_DRAFT_MODEL": str(other)})
    assert finding.level == "warning" and "another tokenizer than tiny" in finding.advice
    (finding,) = check_draft(str(model), {"PENSTOCK_DRAFT": "1", "PENSTOCK_DRAFT_MODEL": "no-such/model"})
    assert "run `penstock pull no-such/model`" in finding.advice, "nothing is fetched"


def leave_to_the_target(folder: Path, *, but: str = "") -> None:
    """Make a draft model's folder lack embedding, head and tokenizer, and the tensor `but`, which is not the target's."""
    own = {"embedding_from_target": True, "head_from_target": True, "tie_word_embeddings": False}
    edit_config(folder, **own, draft_vocab_size=100)
    (folder / "tokenizer.json").unlink()
    tensors = load_file(folder / "model.safetensors") | {"d2t": np.zeros(100, np.int64)}
    del tensors["model.embed_tokens.weight"]
    tensors.pop(but, None)
    save_file(tensors, folder / "model.safetensors")


def test_a_damaged_draft_model_that_takes_tensors_from_its_target_is_found_before_the_start(model: Path, other: Path) -> None:
    whole = shutil.copytree(other, other.with_name("whole"))
    leave_to_the_target(other, but="model.norm.weight")
    settings = asked(model, "--draft=1", f"--draft-model={other}", "--kv-cache-mb=16")
    assert check_draft_model(settings.fleets[0]).reason == "the weights lack model.norm.weight"
    leave_to_the_target(whole)
    settings = asked(model, "--draft=1", f"--draft-model={whole}", "--kv-cache-mb=16")
    assert not check_draft_model(settings.fleets[0]).reason
    weights = whole / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert "model.safetensors can't be read" in check_draft_model(settings.fleets[0]).reason
    with pytest.raises(WeightsError, match=r"model\.safetensors can't be read"):
        open_draft_engine(DraftConfig(model=str(model), draft_model=str(whole)), "damaged", lambda done, total: None)


def test_a_draft_model_that_takes_tensors_from_its_target_needs_one_of_its_sizes(model: Path, other: Path) -> None:
    leave_to_the_target(other)
    settings = asked(model, "--draft=1", f"--draft-model={other}", "--kv-cache-mb=16")
    assert not check_draft_model(settings.fleets[0]).reason
    edit_config(other, hidden_size=128)
    assert "a hidden size of 128, and tiny has" in check_draft_model(settings.fleets[0]).reason


HOPPER, AMPERE = (9, 0), (8, 0)


@pytest.mark.parametrize(
    ("settings", "capability", "expected"),
    [
        ({}, HOPPER, "fp8"),
        ({}, AMPERE, "auto"),
        ({}, None, "auto"),
        ({"quantization": "none"}, HOPPER, "none"),
        ({"quantization": "fp8"}, HOPPER, "fp8"),
        ({"quantization": "fp8", "draft_quantization": "none"}, HOPPER, "none"),
        ({"draft_quantization": "fp8"}, AMPERE, "fp8"),
        ({"dtype": "float32"}, HOPPER, "auto"),
    ],
)
def test_a_draft_model_is_fp8_where_nobody_says_otherwise(
    model: Path, settings: dict[str, Any], capability: tuple[int, int] | None, expected: str
) -> None:
    config = DraftConfig(model=str(model), draft_model=str(model), **settings)
    assert draft_quantization(config, load_config(resolve(str(model))), capability) == expected
