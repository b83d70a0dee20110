"""Count the weights in a model's files, and check that they are complete and of known types, without loading them or torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open

from common.models.config import ModelConfig
from common.models.families.wrappers import text_names
from common.models.source import ModelFiles
from common.models.weights.errors import WeightsError
from common.models.weights.expected import TARGET_OFFSETS, decoder_shapes
from common.models.weights.gguf_tensors import check_type, map_file, read_tensors
from common.models.weights.gguf_values import check_gguf_values
from common.models.weights.required import check_shapes
from common.models.weights.values import check_values

_SAFETENSORS_TYPES = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3"})
_INTEGERS = frozenset({"I64", "I32", "I8", "U8"})
"""What codes of quantised weights are in."""


class Inventory(msgspec.Struct, frozen=True):
    """How many weights are in the embedding (and in an output head of its own), and in everything else."""

    embedding: int
    others: int


def take_inventory(files: ModelFiles, config: ModelConfig) -> Inventory:
    """Count the weights of a model.

    :raises WeightsError, InvalidGguf: if a file is damaged or cut short, a tensor is missing or has another shape or a type
        that can't be computed with, or a scale is NaN or infinite.
    """
    if files.format == "dummy":
        return _counted(decoder_shapes(config), config, files.path)
    if files.format == "gguf":
        shapes = _gguf_shapes(files.path)
        embedding = shapes.get(f"{config.names.embedding}.weight")
        counted = _counted(shapes, config, files.path)
        check_shapes(({f"{config.names.head}.weight": embedding} if embedding else {}) | shapes, config)
        check_gguf_values(files.path)
        return counted
    in_groups = config.weight_format == "groups"
    shapes, fp8 = _safetensors_shapes(files.path, _SAFETENSORS_TYPES | (_INTEGERS if in_groups else frozenset()))
    # where several codes are one number of a tensor, the shapes of the files say less than those of the model
    counted = _counted(decoder_shapes(config) if in_groups else shapes, config, files.path)
    check_shapes(shapes, config, fp8=fp8)
    if config.quantization.name != "plain":
        for path in sorted(files.path.glob("*.safetensors")):
            check_values(path, config.quantization.group)
    return counted


def _counted(shapes: Mapping[str, tuple[int, ...]], config: ModelConfig, path: Path) -> Inventory:
    embedding, head = f"{config.names.embedding}.weight", f"{config.names.head}.weight"
    if embedding not in shapes:
        raise WeightsError(f"{path} holds no {embedding}: these are no weights of a language model")
    tables = sum(math.prod(shapes[name]) for name in (embedding, head) if name in shapes)
    return Inventory(tables, sum(map(math.prod, shapes.values())) - tables)


def _gguf_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    tensors = read_tensors(path, map_file(path))
    for kind in {tensor.kind for tensor in tensors.values()}:
        try:
            check_type(kind)
        except WeightsError as error:
            raise WeightsError(f"{path}: {error}") from error
    return {name: tensor.shape for name, tensor in tensors.items()}


def _safetensors_shapes(folder: Path, types: frozenset[str]) -> tuple[dict[str, tuple[int, ...]], frozenset[str]]:
    """Return the shapes of the tensors, and which of them are float8."""
    fp8: set[str] = set()
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="np") as file:
                opened: Any = file
                for name in opened.keys():  # noqa: SIM118 — a safe_open handle is no mapping
                    view = opened.get_slice(name)
                    if view.get_dtype() in types or (name == TARGET_OFFSETS and view.get_dtype() == "I64"):
                        if view.get_dtype() == "F8_E4M3":
                            fp8.add(name)
                        shapes[name] = tuple(view.get_shape())
                    else:
                        raise WeightsError(f"{name} in {path} is {view.get_dtype()}; floating-point weights are supported")
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{path} can't be read, it may be cut short: {error}") from error
    names = text_names(shapes)
    return {name: shapes[stored] for name, stored in names.items()}, frozenset(
        name for name, stored in names.items() if stored in fp8
    )
