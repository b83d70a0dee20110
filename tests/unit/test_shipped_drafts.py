"""`--draft-model auto`: which draft model is shipped for a target, what is said where none is, whether its files are whole."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from common.cli import up_settings
from common.cli.doctor import check_draft
from common.cli.draft_check import check_draft_model
from common.cli.up import _checked
from common.models import draft_folder
from common.models.config import load_config
from common.models.draft_folder import SHIPPED, check_fits, check_whole, draft_spec, lacking
from common.models.json_files import read_object
from common.models.source import ModelFiles, resolve
from common.protocol.errors import ConfigError, UnknownModel
from common.testing.memory_bus import MemoryBroker
from services.draft.__main__ import make_draft
from services.draft.config import DraftConfig
from services.draft.model_engine import open_draft_engine
from tests.fixtures.tiny_model import edit_config, write_tiny_model
from tests.unit.test_draft_check import _processes, _settled, asked, leave_to_the_target

NONE_SHIPPED = "no draft model is shipped for "
INSTEAD = "name one with --draft-model, or leave that out for n-grams"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny")


@pytest.fixture
def shipped(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the only draft model that is shipped, which is for `model`."""
    folder = tmp_path / "drafts" / "tiny-2-layers"
    shutil.copytree(model, folder)
    leave_to_the_target(folder)
    target = resolve(str(model))
    edit_config(folder, target={"name": target.name, "revision": target.revision})
    monkeypatch.setattr(draft_folder, "SHIPPED", folder.parent)
    return folder


def test_auto_is_the_draft_model_that_is_shipped_for_this_very_model(model: Path, shipped: Path) -> None:
    assert draft_spec("auto", str(model)) == str(shipped)
    assert draft_spec("owner/name", str(model)) == "owner/name"
    renamed = model.rename(model.with_name("other"))
    revision = resolve(str(renamed)).revision
    only = f"only for tiny ({revision})"
    with pytest.raises(ConfigError) as caught:
        draft_spec("auto", str(renamed))
    assert str(caught.value) == f"{NONE_SHIPPED}other ({revision}), {only}: {INSTEAD}" and caught.value.param == "draft_model"
    edit_config(shipped, target={"name": "other", "revision": "of another day"})
    with pytest.raises(ConfigError, match="only for other"):
        draft_spec("auto", str(renamed))
    edit_config(shipped, target=None)
    with pytest.raises(ConfigError, match=NONE_SHIPPED):
        draft_spec("auto", str(renamed))


def test_up_doctor_and_the_draft_worker_name_the_draft_model(model: Path, shipped: Path) -> None:
    settings = _settled(asked(model, "--draft=1", "--draft-model=auto", "--kv-cache-mb=16"))
    checked, warnings = _checked(settings)
    assert not any("drafted" in warning for warning in warnings)
    found = check_draft_model(checked.fleets[0])
    assert found.files is not None and found.files.name == "tiny-2-layers"
    (draft,) = [spec for spec in _processes(checked) if spec.role == "draft"]
    assert draft.arguments[draft.arguments.index("--draft-model") + 1] == "auto" and draft.threads
    (finding,) = check_draft(str(model), {"PENSTOCK_DRAFT": "1", "PENSTOCK_DRAFT_MODEL": "auto"})
    assert (finding.level, finding.found) == ("ok", "tiny-2-layers: llama, 2 layers, int8 weights, context 4,096")
    worker = make_draft(MemoryBroker().connect("draft"), DraftConfig(model=str(model), draft_model="auto"))
    assert worker.presence("starting").drafting.model == "tiny-2-layers"


def test_up_counts_the_memory_of_tensors_that_the_target_gives(model: Path, shipped: Path, tmp_path: Path) -> None:
    whole = str(shutil.copytree(model, tmp_path / "whole"))
    found = [
        check_draft_model(asked(model, "--draft=1", f"--draft-model={name}", "--kv-cache-mb=16").fleets[0]).servable
        for name in ("auto", whole)
    ]
    own, wanted = found
    assert own is not None and wanted is not None
    head = own.model.draft_vocab_size * (5 * own.model.hidden_size + 1)  # its own, in float32 and in bytes, and its offsets
    assert own.engine_bytes == wanted.engine_bytes + head and own.pool_bytes == wanted.pool_bytes > 0
    assert own.model.max_context == wanted.model.max_context


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--draft=1", "--load-format=dummy"], f"{NONE_SHIPPED}random weights: {INSTEAD}"),
        (["--draft=0"], "--draft-model auto needs a draft worker: add --draft 1"),
    ],
)
def test_what_auto_can_not_serve_is_a_warning(model: Path, shipped: Path, flags: list[str], says: str) -> None:
    settings = _settled(asked(model, *flags, "--draft-model=auto", "--kv-cache-mb=16"))
    checked, warnings = _checked(settings)
    assert [warning for warning in warnings if warning.startswith("nothing is drafted")] == [f"nothing is drafted: {says}"]
    assert [spec.role for spec in _processes(checked)] == ["gateway", "decode", "kvstore"]


def test_a_damaged_folder_is_a_warning(model: Path, shipped: Path) -> None:
    settings = asked(model, "--draft=1", "--draft-model=auto", "--kv-cache-mb=16")
    (shipped / "model.safetensors").write_bytes(b"no")
    assert "model.safetensors" in check_draft_model(settings.fleets[0]).reason
    (shipped / "config.json").write_text("[]")
    assert "must hold a JSON object" in check_draft_model(settings.fleets[0]).reason


def test_of_two_models_the_one_without_a_draft_model_has_no_draft_worker(model: Path, shipped: Path, tmp_path: Path) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    file = tmp_path / "penstock.toml"
    tables = "".join(f'[[models]]\nmodel = "{folder}"\ndraft = 1\n' for folder in (model, other))
    file.write_text(f'[draft]\ndraft_model = "auto"\n{tables}')
    settings = up_settings.read(["--config", str(file), "--shm-dir", str(tmp_path), "--kv-cache-mb=16"], {})
    assert settings is not None
    checked, warnings = _checked(_settled(settings))
    (warning,) = [warning for warning in warnings if warning.startswith("nothing is drafted")]
    assert f"{NONE_SHIPPED}other (" in warning
    assert [spec.name for spec in _processes(checked) if spec.role == "draft"] == ["draft-tiny-0"]


def test_where_none_is_shipped_a_draft_worker_says_so_when_it_opens_its_engine(model: Path, tmp_path: Path) -> None:
    for target, error in ((model, ConfigError), (tmp_path / "nowhere", UnknownModel)):
        config = DraftConfig(model=str(target), draft_model="auto")
        assert make_draft(MemoryBroker().connect("draft"), config).presence("starting").drafting.model == "auto"
        with pytest.raises(error, match=NONE_SHIPPED + "tiny" if target == model else "nowhere"):
            open_draft_engine(config, "none", lambda done, total: None)


@pytest.mark.parametrize("folder", [path.parent for path in SHIPPED.glob("*/config.json")], ids=lambda folder: folder.name)
def test_a_shipped_folder_is_whole_and_fits_its_target(folder: Path, smollm2: ModelFiles) -> None:
    assert {path.name for path in folder.iterdir()} == {"README.md", "config.json", "model.safetensors"}
    target = read_object(folder / "config.json")["target"]
    assert (target["name"], target["revision"]) == (smollm2.name, smollm2.revision)
    files = resolve(str(folder))
    assert files.name == folder.name and all(lacking(files))
    check_fits(files, smollm2)
    check_whole(files)
    config = load_config(files)
    assert config.max_context == load_config(smollm2).max_context
    with safe_open(folder / "model.safetensors", framework="np") as file:
        ids = file.get_tensor("d2t") + np.arange(config.draft_vocab_size)
    assert (np.diff(ids) > 0).all() and ids[0] >= 0 and ids[-1] < config.vocab_size
