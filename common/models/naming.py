"""What a model is called when the operator gave it no name: after what was typed as `--model`. No file is opened.

smollm2-135m-instruct, dummy:tiny     as typed
./my-model.gguf                       my-model; a link's own name, not its target's
./my-model-00001-of-00003.gguf        my-model
./Qwen3-0.6B, ./Qwen3-0.6B/           Qwen3-0.6B, the folder's own name
owner/name[@revision]                 owner/name, unless there is a local folder of that name
owner/name:Q4_K_M[@revision]          owner/name:Q4_K_M, a GGUF model of a repository
…/models--owner--name/snapshots/…     owner/name: such a folder of a Hugging Face cache is named by a commit
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from common.protocol.errors import ConfigError

DUMMY_PREFIX = "dummy:"
HUB_ID = re.compile(r"(?P<repo>[\w.-]{1,96}/[\w.-]{1,96})(:(?P<label>[\w-]{1,64}))?(@(?P<revision>[\w./-]{1,128}))?")
GGUF_SUFFIX = ".gguf"
GGUF_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})")
"""The name of a part of a model's files, without suffix (`gguf_parts`)."""


def local_path(spec: str) -> Path:
    """`spec` as a path, with `~` expanded where there is such a user."""
    try:
        return Path(spec).expanduser()
    except RuntimeError:
        return Path(spec)


def expanded(folder: str, setting: str) -> Path:
    """`folder`, the value of a setting, as a path with `~` expanded. :raises ConfigError: there is no such user."""
    try:
        return Path(folder).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{setting} is {folder!r}, and there is no such user: write the folder out", param=setting) from error


def is_gguf(path: Path) -> bool:
    return path.suffix.lower() == GGUF_SUFFIX


def hub_id(spec: str) -> re.Match[str] | None:
    """The match of a Hugging Face id (groups `repo`, `label` and `revision`); None for anything that can only be a path."""
    if spec.startswith(".") or is_gguf(Path(spec)):
        return None
    return HUB_ID.fullmatch(spec)


def hub_name(match: re.Match[str]) -> str:
    """The name of the model that a Hugging Face id means: without the revision."""
    return f"{match['repo']}:{match['label']}" if match["label"] else match["repo"]


def model_name(spec: str) -> str:
    """The name of the model that `spec` (the setting `model`) means."""
    if spec.startswith(DUMMY_PREFIX):
        return spec
    path = local_path(spec)
    if (match := hub_id(spec)) and not path.exists():
        return hub_name(match)
    absolute = Path(os.path.abspath(path))  # noqa: PTH100 — resolve() would follow links
    if is_gguf(absolute):
        part = GGUF_PART.fullmatch(absolute.stem)
        return part["stem"] if part else absolute.stem
    repository = absolute.parent.parent.name
    if absolute.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/", 1)
    return absolute.name or "model"
