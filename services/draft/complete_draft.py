"""Writes what a draft model's folder leaves to its target beside what it has: see `common.models.draft_folder`.

The whole folder lies beside other models (`source.default_cache_dir`), and appears by rename: no reader sees half of it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from common.models.config import load_config
from common.models.draft_folder import check_fits, lacking
from common.models.json_files import read_object_if_any
from common.models.reduced_vocabulary import target_ids
from common.models.registry import open_weights
from common.models.source import ModelFiles, default_cache_dir
from common.models.spec import ModelSpec
from common.models.weights.base import WeightLoader
from common.models.weights.errors import WeightsError
from common.models.weights.expected import TARGET_OFFSETS
from common.protocol.errors import ConfigError
from common.text.tokenizer import load_tokenizer

_VERSION = 1


def complete(draft: ModelFiles, target: ModelFiles, cache_dir: Path | None = None) -> ModelFiles:
    """Return a draft model that lacks nothing: `draft` itself, or a folder with what the target has.

    :raises ConfigError: if the target has other sizes, a file is damaged, or the folder can't be written.
    """
    if not any(lacking(draft)):
        return draft
    check_fits(draft, target)
    key = hashlib.blake2b(repr((_VERSION, draft.revision, target.name, target.revision)).encode(), digest_size=12).hexdigest()
    folder = (cache_dir or default_cache_dir()) / "drafts" / f"{draft.name}-{key}"
    if not folder.is_dir():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".part-") as part:
                _write(draft, target, Path(part) / "model")
                _appear(Path(part) / "model", folder)
        except OSError as error:
            raise ConfigError(
                f"the draft model {draft.name} can't be completed in {folder}: {error}", param="draft_model"
            ) from error
    return ModelFiles(name=draft.name, format="safetensors", path=folder, revision=f"{draft.revision}+{target.revision}")


def _appear(part: Path, folder: Path) -> None:
    try:
        part.rename(folder)
    except OSError:
        if not folder.is_dir():  # another process was first otherwise
            raise


def _write(draft: ModelFiles, target: ModelFiles, into: Path) -> None:
    into.mkdir()
    for path in sorted(draft.path.glob("*.safetensors")):
        shutil.copy(path, into / path.name)
    config = read_object_if_any(draft.path / "config.json")
    whole = config | {"embedding_from_target": False, "head_from_target": False}
    (into / "config.json").write_text(json.dumps(whole, indent=1))
    (into / "tokenizer.json").write_text(json.dumps(load_tokenizer(target).serialised()))
    save_file(_tensors(draft, target), into / "of-target.safetensors", {"format": "pt"})


def _tensors(draft: ModelFiles, target: ModelFiles) -> dict[str, torch.Tensor]:
    """What the draft model leaves to its target, in bfloat16, by the draft model's names."""
    wanted, ours, theirs = lacking(draft), load_config(draft), load_config(target)
    with WeightLoader(open_weights(target, theirs), torch.bfloat16, scheme=theirs.quantization, threads=0) as loader:
        embedding = loader.take(f"{theirs.names.embedding}.weight", theirs.vocab_size, theirs.hidden_size)
        head = (
            embedding
            if theirs.tie_embeddings
            else loader.take(f"{theirs.names.head}.weight", theirs.vocab_size, theirs.hidden_size)
        )
    found: dict[str, Any] = {}
    if wanted.embedding:
        found[f"{ours.names.embedding}.weight"] = embedding.contiguous()
    if wanted.head:
        rows = _rows(draft, ours, TARGET_OFFSETS)
        ids = slice(None) if rows is None else target_ids(rows, ours.vocab_size)
        found[f"{ours.names.head}.weight"] = head[ids].clone()
    return found


def _rows(draft: ModelFiles, ours: ModelSpec, name: str) -> torch.Tensor | None:
    """The tensor `name` of a draft model with a part of the vocabulary. :raises ConfigError: if it is missing or of another
    size."""
    if not ours.draft_vocab_size:
        return None
    for path in sorted(draft.path.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                opened: Any = file
                offsets = opened.get_tensor(name) if name in opened.keys() else None  # noqa: SIM118 — no mapping
        except SafetensorError as error:
            raise WeightsError(f"{path} can't be read, it may be cut short: {error}") from error
        if offsets is not None:
            if tuple(offsets.shape) != (ours.draft_vocab_size,):
                raise ConfigError(f"{name} has {list(offsets.shape)} entries, and draft_vocab_size is {ours.draft_vocab_size}")
            return offsets
    raise ConfigError(f"{draft.path} has a draft_vocab_size, and no tensor {name}")
