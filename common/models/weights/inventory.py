"""Count the weights in a model's files, and check that they are complete and of known types, without loading them or torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open

from common.models.config import ModelConfig
from common.models.source import ModelFiles
from common.models.weights.errors import WeightsError
from common.models.weights.gguf_tensors import check_type, map_file, read_tensors

_SAFETENSORS_TYPES = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3"})
_INTEGERS = frozenset({"I64", "I32", "I8", "U8"})
"""What codes of quantised weights are in."""


class Inventory(msgspec.Struct, frozen=True):
    """How many weights are in the embedding (and in an output head of its own), and in everything else."""

    embedding: int
    others: int


def take_inventory(files: ModelFiles, config: ModelConfig) -> Inventory:
    """Count the weights of a model.

    :raises WeightsError, InvalidGguf: if a file is damaged or cut short, or holds a type that can't be computed with."""
    if files.format == "dummy":
        return _of_shape(config)
    shapes = (
        _gguf_shapes(files.path)
        if files.format == "gguf"
        else _safetensors_shapes(
            files.path, _SAFETENSORS_TYPES | (_INTEGERS if config.weight_format == "groups" else frozenset())
        )
    )
    embedding = sum(
        math.prod(shapes.get(name, ())) for name in ("model.embed_tokens.weight", "lm_head.weight") if name in shapes
    )
    if not embedding:
        raise WeightsError(f"{files.path} holds no model.embed_tokens.weight: these are no weights of a language model")
    if config.weight_format == "groups" and files.format == "safetensors":  # several codes are one number of a tensor
        return Inventory(embedding, _of_shape(config).others)
    return Inventory(embedding, sum(map(math.prod, shapes.values())) - embedding)


def _gguf_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    tensors = read_tensors(path, map_file(path))
    for kind in {tensor.kind for tensor in tensors.values()}:
        try:
            check_type(kind)
        except WeightsError as error:
            raise WeightsError(f"{path}: {error}") from error
    return {name: tensor.shape for name, tensor in tensors.items()}


def _safetensors_shapes(folder: Path, types: frozenset[str]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="np") as file:
                opened: Any = file
                for name in opened.keys():  # noqa: SIM118 — a safe_open handle is no mapping
                    view = opened.get_slice(name)
                    if view.get_dtype() in types:
                        shapes[name] = tuple(view.get_shape())
                    else:
                        raise WeightsError(f"{name} in {path} is {view.get_dtype()}; floating-point weights are supported")
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{path} can't be read, it may be cut short: {error}") from error
    return shapes


def _of_shape(config: ModelConfig) -> Inventory:
    """Count the weights that a model of this shape has."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layer = config.hidden_size * (heads + config.num_heads * config.head_dim + 3 * config.intermediate_size)
    tables = 1 if config.tie_embeddings else 2
    return Inventory(tables * config.vocab_size * config.hidden_size, config.num_layers * layer)
