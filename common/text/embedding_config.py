"""What a model's files say of its embeddings: their size, how hidden states are pooled, and whether a vector may be cut.

A sentence-transformers folder tells the pooling (`1_Pooling/config.json`), and GGUF metadata do
(`pooling_type`, as in llama.cpp). A decoder whose files say nothing is pooled by its last token, the only one that has seen the
whole text. Torch-free.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from common.models.json_files import read_object_if_any
from common.models.source import ModelFiles
from common.models.weights.gguf_metadata import read_metadata

_GGUF_MEAN = 1


class EmbeddingConfig(msgspec.Struct, frozen=True):
    """`size`: numbers of a vector, 0 if the files don't tell. `may_be_cut`: the first numbers of a vector are one by themselves
    (Matryoshka representations, arXiv 2205.13147); `sizes`: to which sizes, empty for any."""

    size: int = 0
    pooling: Literal["mean", "last"] = "last"
    may_be_cut: bool = False
    sizes: tuple[int, ...] = ()


def load_embedding_config(files: ModelFiles) -> EmbeddingConfig:
    """:raises ConfigError: if there are files that can't be read."""
    if files.format == "gguf":
        if not files.path.is_file():
            return EmbeddingConfig()
        metadata = read_metadata(files.path)
        architecture = metadata.get("general.architecture")
        pooling = "mean" if metadata.get(f"{architecture}.pooling_type") == _GGUF_MEAN else "last"
        return EmbeddingConfig(_size(metadata.get(f"{architecture}.embedding_length")), pooling)
    config = read_object_if_any(files.path / "config.json")
    pooling = "mean" if read_object_if_any(files.path / "1_Pooling/config.json").get("pooling_mode_mean_tokens") else "last"
    listed = config.get("matryoshka_dimensions")
    sizes = tuple(_size(size) for size in listed) if isinstance(listed, list) else ()
    may_be_cut = bool(config.get("is_matryoshka") or sizes)
    return EmbeddingConfig(_size(config.get("hidden_size")), pooling, may_be_cut, sizes)


def _size(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
