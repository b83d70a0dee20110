"""Draft models that leave tensors to their target: what a draft worker makes of them is what a complete folder would be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from common.models.config import load_config
from common.models.draft_folder import lacking
from common.models.registry import open_weights
from common.models.source import ModelFiles, resolve
from common.models.weights.base import WeightLoader
from common.protocol.errors import ConfigError, PenstockError
from common.text.vocabulary import vocabulary_digest
from services.draft.complete_draft import complete
from services.draft.config import DraftConfig
from services.draft.model_engine import open_draft_engine
from tests.fixtures.tiny_model import edit_config, write_tiny_model
from tests.models.driver import open_runner

IDS = np.concatenate([np.arange(5, 300, 7), np.array([500, 511])])


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = write_tiny_model(tmp_path / "target")
    edit_config(folder, tie_word_embeddings=False)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][::-1].copy()
    save_file(tensors, folder / "model.safetensors")
    return folder


def draft_for(target: Path, name: str = "draft", *, lacks: bool = True) -> Path:
    """The target's own layers with a part of its head; without what is the target's, if `lacks`."""
    folder = target.with_name(name)
    folder.mkdir()
    (folder / "config.json").write_text((target / "config.json").read_text())
    edit_config(folder, draft_vocab_size=len(IDS), embedding_from_target=lacks, head_from_target=lacks, target={"name": "x"})
    tensors = load_file(target / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][IDS]
    tensors["d2t"] = IDS.astype(np.int64) - np.arange(len(IDS))
    if lacks:
        del tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]
    else:
        (folder / "tokenizer.json").write_text((target / "tokenizer.json").read_text())
    save_file(tensors, folder / "model.safetensors")
    return folder


def files_of(folder: Path) -> ModelFiles:
    return resolve(str(folder))


def test_it_computes_what_a_folder_with_everything_computes(target: Path) -> None:
    found = complete(files_of(draft_for(target)), files_of(target))
    whole = files_of(draft_for(target, "whole", lacks=False))
    assert complete(whole, files_of(target)) == whole
    assert not any(lacking(found)) and found.name == "draft"
    torch.manual_seed(0)
    states = torch.randn(3, load_config(whole).hidden_size)
    logits = [open_runner(files).decoder.logits(states) for files in (found, whole)]  # type: ignore[attr-defined]
    torch.testing.assert_close(logits[0], logits[1], rtol=0.01, atol=0.01)  # what the target holds in float32 is bfloat16 here
    tables = [open_runner(files).decoder.embedding.float() for files in (found, whole)]  # type: ignore[attr-defined]
    torch.testing.assert_close(tables[0], tables[1], rtol=0.01, atol=0.01)


def test_it_is_written_once_and_has_the_targets_vocabulary(target: Path, home: Path) -> None:
    draft = files_of(draft_for(target))
    found = complete(draft, files_of(target))
    assert found.path.parent == home / "drafts"
    written = (found.path / "of-target.safetensors").stat()
    assert complete(draft, files_of(target)) == found
    assert (found.path / "of-target.safetensors").stat().st_mtime_ns == written.st_mtime_ns
    assert [path.name for path in found.path.parent.iterdir()] == [found.path.name], "nothing half done is left"
    assert vocabulary_digest(found, 512) == vocabulary_digest(files_of(target), 512) != ""


def test_another_targets_tensors_are_another_folder(target: Path) -> None:
    draft = files_of(draft_for(target))
    first = complete(draft, files_of(target))
    tensors = load_file(target / "model.safetensors")
    tensors["model.embed_tokens.weight"] *= 2
    save_file(tensors, target / "model.safetensors")
    assert complete(draft, files_of(target)).path != first.path


def test_what_does_not_fit_is_one_error_and_leaves_nothing(target: Path, tmp_path: Path, home: Path) -> None:
    draft = draft_for(target)
    edit_config(draft, hidden_size=32)
    with pytest.raises(ConfigError, match="a hidden size of 32, and target has 512 and"):
        complete(files_of(draft), files_of(target))
    other = draft_for(target, "other")
    tensors = load_file(other / "model.safetensors")
    save_file(tensors | {"d2t": tensors["d2t"][:3]}, other / "model.safetensors")
    with pytest.raises(ConfigError, match=r"\[3\] entries, and draft_vocab_size is"):
        complete(files_of(other), files_of(target))
    del tensors["d2t"]
    save_file(tensors, other / "model.safetensors")
    with pytest.raises(ConfigError, match="no tensor d2t"):
        complete(files_of(other), files_of(target))
    home.chmod(0o700)
    assert not list((home / "drafts").iterdir())


def test_a_draft_worker_opens_it(target: Path, tmp_path: Path) -> None:
    draft = draft_for(target)
    config = DraftConfig(model=str(target), draft_model=str(draft), kv_cache_mb=8, shm_dir=str(tmp_path))
    opened = open_draft_engine(config, "test", lambda done, total: None)
    try:
        assert opened.vocabulary == vocabulary_digest(files_of(target), 512)
        assert opened.engine.runner.vocab_size == 512
    finally:
        opened.engine.close()
    gone = DraftConfig(model=str(tmp_path / "nowhere"), draft_model=str(draft), kv_cache_mb=8, shm_dir=str(tmp_path))
    with pytest.raises(PenstockError, match="nowhere"):
        open_draft_engine(gone, "test", lambda done, total: None)


def test_a_gguf_target_gives_its_tied_embedding_as_a_head(smollm2: ModelFiles, tmp_path: Path) -> None:
    theirs = load_config(smollm2)
    folder = tmp_path / "draft"
    folder.mkdir()
    keys = {"model_type": "llama", "vocab_size": theirs.vocab_size, "hidden_size": theirs.hidden_size, "intermediate_size": 64}
    keys |= {"num_hidden_layers": 1, "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 64}
    keys |= {"rms_norm_eps": 1e-5, "tie_word_embeddings": False, "draft_vocab_size": 3}
    (folder / "config.json").write_text("{}")
    edit_config(folder, **keys, embedding_from_target=True, head_from_target=True)
    ids = np.array([7, 400, 49_151])
    save_file({"d2t": ids - np.arange(3), "model.norm.weight": np.ones(576, np.float32)}, folder / "model.safetensors")
    found = load_tensors(complete(files_of(folder), smollm2).path)
    with WeightLoader(open_weights(smollm2, theirs), torch.float32, threads=0) as loader:
        embedding = loader.take(f"{theirs.names.embedding}.weight", theirs.vocab_size, theirs.hidden_size)
    assert torch.equal(found["lm_head.weight"], embedding[torch.from_numpy(ids)].bfloat16())
    assert torch.equal(found["model.embed_tokens.weight"], embedding.bfloat16())


def load_tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file as load_torch

    return load_torch(folder / "of-target.safetensors")
