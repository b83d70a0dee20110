"""Draft models that leave tensors to their target, and those that are shipped: what a folder lacks is taken from the target's
files, once on each machine.

config.json says `embedding_from_target`, `head_from_target` (rows `i + d2t[i]` of the target's head, or of its embedding where
that is the head), and which `target` the draft model was trained for. Such a folder has no tokenizer either: its ids are the
target's. So a few megabytes of layers are a draft model. A draft worker writes the whole folder
(`services.draft.complete_draft`), which is loaded like any other.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from common.models.config import load_config
from common.models.json_files import read_object, read_object_if_any
from common.models.shipped import index_for, trained_for
from common.models.source import ModelFiles, resolve
from common.models.weights.expected import decoder_shapes
from common.models.weights.inventory import Inventory, take_inventory
from common.protocol.errors import ConfigError

SHIPPED = Path(__file__).parent / "drafts"
"""A folder for each draft model that comes with the package."""


def draft_spec(setting: str, target: str, *, made_up: bool = False) -> str:
    """Return the draft model that `--draft-model` means, as `resolve` takes it: with `auto`, the folder of the one that is
    shipped for the target.

    target: as in `--model`. made_up: whether its weights are random ones (`--load-format dummy`).

    :raises UnknownModel: if the target is not on this machine, so that nobody knows which one is its own.
    :raises ConfigError: if none is shipped for it.
    """
    if setting != "auto":
        return setting
    instead = "name one with --draft-model, or leave that out for n-grams"
    if made_up:
        raise ConfigError(f"no draft model is shipped for random weights: {instead}", param="draft_model")
    files = resolve(target)
    paths = sorted(SHIPPED.glob("*/config.json"))
    targets = [trained_for(read_object(path).get("target")) for path in paths]
    if (index := index_for(files, targets)) is not None:
        return str(paths[index].parent)
    only = f", only for {', '.join(f'{one.name} ({one.revision})' for one in targets)}" if targets else ""
    raise ConfigError(f"no draft model is shipped for {files.name} ({files.revision}){only}: {instead}", param="draft_model")


class Lacking(NamedTuple):
    """Which tensors a draft model's folder leaves to the target."""

    embedding: bool
    head: bool


def lacking(files: ModelFiles) -> Lacking:
    """Return what a draft model leaves to its target. :raises ConfigError: if its config.json can't be read."""
    if files.format != "safetensors":
        return Lacking(embedding=False, head=False)
    config = read_object_if_any(files.path / "config.json")
    return Lacking(config.get("embedding_from_target") is True, config.get("head_from_target") is True)


def check_fits(draft: ModelFiles, target: ModelFiles) -> None:
    """Check that a target has what a draft model leaves to it.

    :raises ConfigError: if its vocabulary or hidden size is another.
    """
    ours, theirs = load_config(draft), load_config(target)
    if (ours.vocab_size, ours.hidden_size) != (theirs.vocab_size, theirs.hidden_size):
        raise ConfigError(
            f"the draft model {draft.name} takes tensors from its target, of a vocabulary of {ours.vocab_size} and a hidden "
            f"size of {ours.hidden_size}, and {target.name} has {theirs.vocab_size} and {theirs.hidden_size}",
            param="draft_model",
        )


def check_whole(draft: ModelFiles) -> Inventory:
    """Check that a draft model's files hold everything that it does not leave to its target. Return its weights, those of the
    target among them.

    :raises ConfigError: if a file is damaged, or a tensor is missing or of another shape or type.
    """
    wanted, ours = lacking(draft), load_config(draft)
    left = {f"{name}.weight" for name, is_left in zip((ours.names.embedding, ours.names.head), wanted, strict=True) if is_left}
    return take_inventory(draft, ours, {name: shape for name, shape in decoder_shapes(ours).items() if name in left})
