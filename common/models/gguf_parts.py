"""The files of a GGUF model: one, or the parts that llama.cpp's `llama-gguf-split` makes of a large one. No file is opened."""

from __future__ import annotations

from pathlib import Path

from common.models.naming import GGUF_PART
from common.protocol.errors import UnknownModel


def gguf_parts(path: Path) -> list[Path]:
    """Return the files of the model whose first file is `path`: that one first, which has the metadata.

    :raises UnknownModel: if `path` is named as another part than the first, or a part is not beside it.
    """
    match = GGUF_PART.fullmatch(path.stem)
    if match is None:
        return [path]
    number, count = int(match["number"]), int(match["count"])
    parts = [path.with_name(f"{match['stem']}-{one:05}-of-{count:05}{path.suffix}") for one in range(1, count + 1)]
    if number != 1:
        raise UnknownModel(f"{path} is part {number} of {count}: name the first one, {match['stem']}-00001-of-…", param="model")
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise UnknownModel(f"{path} lacks {', '.join(missing[:3])} ({len(missing)} of {count} parts)", param="model")
    return parts
