"""Whether files hold a head of their own for a model whose head is the embedding, says its configuration. Torch-free.

transformers 5 reads such a head and warns: quantisers, fine-tuning tools and transformers itself have left the flag behind.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from common.models.families.wrappers import text_names
from common.models.lfs import pointer_hint
from common.models.spec import WeightNames
from common.models.weights.errors import WeightsError
from common.models.weights.files import read_index, weight_files

_NUM_PIECES, _PIECE_BYTES = 256, 1 << 12


class _Place(NamedTuple):
    """Where a tensor lies: its bytes begin at `offset` of the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def holds_another_head(folder: Path, names: WeightNames) -> bool:
    """Return whether a folder's files hold a head that is no copy of the embedding. Of large tensors, pieces are compared.

    :raises WeightsError: if a file can't be read.
    """
    index, places = read_index(folder), dict[str, _Place]()
    for path in weight_files(folder):
        found = {name: place for name, place in _places(path).items() if not index or index.get(name) == path.name}
        places = found | places  # the first counts
    named = {name: places[stored] for name, stored in text_names(places).items()}
    heads = [place for name, place in named.items() if name.startswith(f"{names.head}.")]
    if not heads:
        return False
    head, embedding = named.get(f"{names.head}.weight"), named.get(f"{names.embedding}.weight")
    if head is None or embedding is None or len(heads) > 1 or (head.dtype, head.shape) != (embedding.dtype, embedding.shape):
        return True
    return _differ(head, embedding)


def _places(path: Path) -> dict[str, _Place]:
    """The tensors of a file."""
    try:
        with safe_open(path, framework="numpy"):  # checks the header
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header: dict[str, Any] = json.loads(file.read(length))
    except (OSError, ValueError, SafetensorError) as error:
        raise WeightsError(f"{path} can't be read, it may be cut short: {error}{pointer_hint(path)}") from error
    header.pop("__metadata__", None)
    places: dict[str, _Place] = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        places[name] = _Place(path, entry["dtype"], tuple(entry["shape"]), 8 + length + begin, end - begin)
    return places


def _differ(one: _Place, other: _Place) -> bool:
    """Both have as many bytes."""
    size = one.num_bytes
    starts = range(0, size, max(_PIECE_BYTES, size // _NUM_PIECES))
    with one.path.open("rb") as first, other.path.open("rb") as second:
        for start in starts:
            length = min(_PIECE_BYTES, size - start)
            pieces = (os.pread(file.fileno(), length, at + start) for file, at in ((first, one.offset), (second, other.offset)))
            if next(pieces) != next(pieces):
                return True
    return False
