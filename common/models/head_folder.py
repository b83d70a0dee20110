"""Finds the head that drafts from a target's hidden states: a folder's, the target's own MTP layer, or one that is shipped.

docs/heads.md describes the files. Everything that can be wrong is found here, from the files alone: `penstock up` asks before
it starts anything. Torch-free.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from common.models.config import load_config
from common.models.head_config import HeadSpec, mtp_spec, num_mtp_layers, read_spec, usual_layers
from common.models.head_tensors import (
    EAGLE_PREFIXES,
    EMBEDDING,
    LM_HEAD,
    MTP_PREFIX,
    StoredTensor,
    check_plain,
    check_tensors,
    eagle_tensors,
    head_shapes,
    mtp_tensors,
)
from common.models.json_files import read_object, read_object_if_any
from common.models.naming import hub_id, local_path, model_name
from common.models.shipped import index_for
from common.models.source import ModelFiles, resolve
from common.models.spec import ModelSpec
from common.models.weights.expected import TARGET_OFFSETS, Shapes
from common.protocol.errors import ConfigError, UnknownModel

SHIPPED = Path(__file__).parent / "heads"
"""A folder for each head that comes with the package."""
_MULTIPLE = 16
"""The hidden size must be a multiple of this: of the lanes of `ops.cpu_int8`."""


class HeadFiles(NamedTuple):
    """A head on this machine. `name`: the folder's, its Hugging Face id, or "MTP layer of" a model. `path`: its folder, or the
    model's. `num_unused`: MTP layers of the model behind the first, which is the one that drafts."""

    name: str
    path: Path
    spec: HeadSpec
    num_unused: int = 0

    @property
    def title(self) -> str:
        """How sentences call it."""
        return f"the {self.name}" if self.spec.kind == "mtp" else f"the head {self.name}"


def find_head(setting: str, target: ModelFiles, *, on_gpu: bool = False) -> HeadFiles | None:
    """Return the head that `--head` means: a folder's or a Hugging Face id's, or with `auto` the one that is shipped for the
    target, or else the target's own MTP layer; None for none. On a GPU `auto` is the MTP layer alone: heads that are shipped
    are for models whose steps are too short there.

    :raises ConfigError: if it is not here, or has no config.json of a head that is supported.
    """
    if setting == "off":
        return None
    if setting != "auto":
        return open_head(_folder_of(setting), model_name(setting))
    heads = [] if on_gpu else [open_head(path.parent) for path in sorted(SHIPPED.glob("*/config.json"))]
    index = index_for(target, [head.spec.target for head in heads])
    return own_head(target) if index is None else heads[index]


def own_head(target: ModelFiles) -> HeadFiles | None:
    """Return a model's own MTP layer; None if its config.json names none, or its files hold none.

    :raises ConfigError: if the files can't be read, or their configuration is of no model that is supported.
    """
    if target.format != "safetensors":
        return None
    count = num_mtp_layers(read_object_if_any(target.path / "config.json"))
    if not count:
        return None
    head = HeadFiles(f"MTP layer of {target.name}", target.path, mtp_spec(load_config(target)), count - 1)
    return head if _tensors_of(head) else None


def _folder_of(setting: str) -> Path:
    path = local_path(setting)
    if path.exists() or hub_id(setting) is None:
        return path
    try:
        return resolve(setting).path
    except UnknownModel as error:
        raise ConfigError(str(error), param="head") from error


def open_head(folder: Path, name: str = "") -> HeadFiles:
    """name: what it is called; the folder's name if that is empty.

    :raises ConfigError: if the folder has no config.json of a head that is supported.
    """
    if not folder.is_dir():
        raise ConfigError(f"the head {folder} is no folder: give one with config.json and model.safetensors", param="head")
    return HeadFiles(
        name or folder.resolve().name, folder, read_spec(read_object(folder / "config.json"), str(folder / "config.json"))
    )


class HeldHead(NamedTuple):
    """A head that fits its target. spec: with nothing left open. shapes: of the tensors that are read, by their names in the
    files. prefix: what the layer's names begin with there. paths: the file of each of `shapes`."""

    spec: HeadSpec
    shapes: Shapes
    prefix: str
    paths: dict[str, Path]


def check_head(head: HeadFiles, target: ModelSpec, target_name: str) -> HeldHead:
    """Check that a head fits its target, and that its files hold what they must: shapes, and numbers that are finite. A head
    that can propose every token need not say which.

    :raises ConfigError: why it can't draft.
    """
    found = _tensors_of(head)
    try:
        if head.spec.kind == "mtp":
            check_plain(found)
        held = _held(head.spec, target, found)
        _check_fits(held.spec, target, target_name)
        check_tensors(found, held.shapes, held.spec.vocab_size)
    except ConfigError as error:
        raise ConfigError(f"{head.title} {error}", param="head") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{head.title} can't be read: {head.path}: {error}", param="head") from error
    return held


def _tensors_of(head: HeadFiles) -> dict[str, StoredTensor]:
    """:raises ConfigError: if the files can't be read."""
    path, is_own = head.path / "model.safetensors", head.spec.kind == "mtp"
    try:
        return mtp_tensors(head.path) if is_own else eagle_tensors(head.path)
    except ConfigError as error:
        raise ConfigError(f"{head.title} can't be read: {error}", param="head") from error
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        pickled = not path.exists() and (head.path / "pytorch_model.bin").exists()
        hint = "; pytorch_model.bin is not read: convert it to safetensors" if pickled else ""
        raise ConfigError(
            f"{head.title} can't be read: {head.path if is_own else path}: {error}{hint}", param="head"
        ) from error


def _held(spec: HeadSpec, target: ModelSpec, found: dict[str, StoredTensor]) -> HeldHead:
    """Settle what the head's config.json leaves open: by its target, and by what its files hold."""
    spec = msgspec.structs.replace(
        spec,
        layers=spec.layers or usual_layers(target.num_layers),
        embedding_from_target=EMBEDDING not in found if spec.embedding_from_target is None else spec.embedding_from_target,
        head_from_target=LM_HEAD not in found if spec.head_from_target is None else spec.head_from_target,
    )
    prefixes = (MTP_PREFIX,) if spec.kind == "mtp" else EAGLE_PREFIXES
    prefix = next((prefix for prefix in prefixes if any(name.startswith(prefix) for name in found)), prefixes[0])
    shapes = head_shapes(spec, prefix)
    if TARGET_OFFSETS not in found and spec.draft_vocab_size == spec.vocab_size:
        shapes.pop(TARGET_OFFSETS, None)
    return HeldHead(spec, shapes, prefix, {name: found[name].path for name in shapes if name in found})


def _check_fits(spec: HeadSpec, target: ModelSpec, target_name: str) -> None:
    """:raises ConfigError: if it is for another target."""
    for what, ours, theirs in (
        ("vocabulary", spec.vocab_size, target.vocab_size),
        ("hidden size", spec.hidden_size, target.hidden_size),
    ):
        if ours != theirs:
            raise ConfigError(f"is for a {what} of {ours}, and {target_name} has {theirs}")
    if spec.layers[-1] > target.num_layers:
        raise ConfigError(f"reads hidden states of layer {spec.layers[-1]}, and {target_name} has {target.num_layers} layers")
    if sorted(set(spec.layers)) != list(spec.layers) or spec.layers[0] < 0:
        raise ConfigError(f"does not say which layers it reads, and {target_name} has only {target.num_layers}")
    if spec.hidden_size % _MULTIPLE or spec.num_heads % spec.num_kv_heads or spec.head_dim % 2:
        raise ConfigError(f"has sizes that are not supported: a hidden size that is no multiple of {_MULTIPLE}, or odd heads")
    if spec.draft_vocab_size > spec.vocab_size:
        raise ConfigError(f"has a draft_vocab_size of {spec.draft_vocab_size}, more than its vocabulary of {spec.vocab_size}")
