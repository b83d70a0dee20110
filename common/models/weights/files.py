"""Which *.safetensors files of a folder hold a model's weights. Torch-free."""

from __future__ import annotations

import json
import re
from pathlib import Path

from common.models.weights.errors import WeightsError

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
MTP_LAYERS = "model.mtp_layers."
"""How tensors of layers for multi-token prediction are named. No decoder takes them; `common.models.head_tensors` does."""
_LAYER = re.compile(r"model\.layers\.([0-9]{1,6})\.")
_OTHERS = ("consolidated", "adapter_model")
"""How files begin that hold the weights in another form, or an adapter."""


def read_index(folder: Path) -> dict[str, str]:
    """Return each tensor's file; empty when the weights are not sharded.

    :raises WeightsError: if the index is damaged.
    """
    path = folder / INDEX
    if not path.is_file():
        return {}
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        return {str(name): Path(file).name for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{path} is damaged: {error!r}"[:300]) from error


def weight_files(folder: Path) -> list[Path]:
    """Return the shards that the index names; without one all *.safetensors files, model.safetensors first, but for those that
    hold something else where there are others.

    :raises WeightsError: if the index is damaged.
    """
    if index := read_index(folder):
        return [folder / name for name in sorted(set(index.values()))]
    files = (path for path in folder.glob("*.safetensors") if path.is_file())
    found = sorted(files, key=lambda path: (path.name != WHOLE, path.name))
    return [path for path in found if not path.name.startswith(_OTHERS)] or found


def is_mtp(name: str, behind: range = range(0)) -> bool:
    """Return whether a tensor is of a layer that only drafts. behind: numbers of those that are named as a decoder's are."""
    found = _LAYER.match(name) if behind else None
    return name.startswith(MTP_LAYERS) or (found is not None and int(found[1]) in behind)


def is_first(name: str, path: Path, before: Path | None) -> bool:
    """Return whether the tensor `name` counts as the file `path` has it. before: the file that it was found in before, if any.
    What model.safetensors has counts, as in transformers, which looks at no other file then.

    :raises WeightsError: if it is in two files of other names.
    """
    if before is not None and before.name != WHOLE:
        raise WeightsError(f"{name} is in {before.name} and in {path.name} of {path.parent}, and no {INDEX} says which counts")
    return before is None
