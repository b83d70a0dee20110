"""Count the weights in a model's files, and check that they are complete and of known types, without loading them or torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from safetensors import SafetensorError, safe_open

from common.models.config import ModelConfig
from common.models.families.wrappers import text_names
from common.models.gguf_parts import gguf_parts
from common.models.lfs import pointer_hint
from common.models.source import ModelFiles
from common.models.weights.errors import WeightsError
from common.models.weights.expected import TARGET_OFFSETS, decoder_shapes
from common.models.weights.files import is_first, is_mtp, read_index, weight_files
from common.models.weights.gguf_metadata import read_metadata
from common.models.weights.gguf_tensors import check_type, map_files, read_tensors, without_layers
from common.models.weights.gguf_values import check_gguf_values
from common.models.weights.offsets import check_offsets
from common.models.weights.required import FLOATS, FP8, check_tensors
from common.models.weights.values import check_values

_INTEGERS = frozenset({"I64", "I32", "I8", "U8"})
"""What codes of quantised weights are in."""


class Inventory(msgspec.Struct, frozen=True):
    """How many weights are in the embedding (and in an output head of its own), and in everything else."""

    embedding: int
    others: int


def take_inventory(
    files: ModelFiles, config: ModelConfig, given: Mapping[str, tuple[int, ...]] = MappingProxyType({})
) -> Inventory:
    """Count the weights of a model.

    given: tensors of a folder's model that are not in its files, and come from elsewhere.

    :raises WeightsError, InvalidGguf: if a file is damaged or cut short, a tensor is missing or has another shape or a type
        that can't be computed with, or a scale is NaN or infinite.
    """
    if files.format == "dummy":
        return _counted(decoder_shapes(config), config, files.path)
    if files.format == "gguf":
        shapes = _gguf_shapes(files.path, config.drafting)
        embedding = shapes.get(f"{config.names.embedding}.weight")
        counted = _counted(shapes, config, files.path)
        check_tensors(({f"{config.names.head}.weight": embedding} if embedding else {}) | shapes, config, {})
        check_gguf_values(files.path)
        return counted
    in_groups = config.weight_format == "groups"
    table = _Table(files.path, FLOATS | {FP8} | (_INTEGERS if in_groups else frozenset()), config.drafting)
    shapes = {**table.shapes, **given}
    # where several codes are one number of a tensor, the shapes of the files say less than those of the model
    counted = _counted(decoder_shapes(config) if in_groups else shapes, config, files.path)
    contents = {table.stored[name]: content for name, content in check_tensors(shapes, config, table.types).items()}
    if config.draft_vocab_size:
        _check_offsets(files.path, config)
    if config.quantization.name != "plain":
        for path in weight_files(files.path):
            check_values(path, config.quantization.group, contents)
    return counted


def _check_offsets(folder: Path, config: ModelConfig) -> None:
    """:raises WeightsError: if a reduced vocabulary's tokens are none of the target's."""
    for path in weight_files(folder):
        with safe_open(path, framework="np") as file:
            opened: Any = file
            if TARGET_OFFSETS in opened.keys():  # noqa: SIM118 — a safe_open handle is no mapping
                check_offsets(opened.get_tensor(TARGET_OFFSETS), config.vocab_size)


def _counted(shapes: Mapping[str, tuple[int, ...]], config: ModelConfig, path: Path) -> Inventory:
    embedding, head = f"{config.names.embedding}.weight", f"{config.names.head}.weight"
    if embedding not in shapes:
        raise WeightsError(f"{path} holds no {embedding}: these are no weights of a language model")
    tables = sum(math.prod(shapes[name]) for name in (embedding, head) if name in shapes)
    return Inventory(tables, sum(map(math.prod, shapes.values())) - tables)


def _gguf_shapes(path: Path, drafting: range) -> dict[str, tuple[int, ...]]:
    """drafting: layers that are passed over."""
    _check_parts(gguf_parts(path))
    tensors = read_tensors(path, map_files(path))
    for kind in {tensor.kind for tensor in tensors.values()}:
        try:
            check_type(kind)
        except WeightsError as error:
            raise WeightsError(f"{path}: {error}") from error
    return {name: tensor.shape for name, tensor in without_layers(tensors, drafting).items()}


def _check_parts(paths: Sequence[Path]) -> None:
    """:raises WeightsError: if one says that it is another part than its name says."""
    for number, path in enumerate(paths):
        metadata = read_metadata(path)
        found = metadata.get("split.no", 0), metadata.get("split.count", 0) or 1
        if found != (number, len(paths)):
            where = f"part {found[0] + 1} of {found[1]}"
            raise WeightsError(f"{path} is {where} by its metadata: parts are named …-00001-of-{found[1]:05}.gguf and so on")


class _Table:
    """The tensors of a folder's *.safetensors files that a decoder takes, by the names of a model of text alone: their shapes,
    types, and the names that the files have."""

    def __init__(self, folder: Path, allowed: frozenset[str], drafting: range) -> None:
        """drafting: see `SafetensorsWeights`.

        :raises WeightsError: if a file is damaged or cut short, or holds a type that is not allowed."""
        index = read_index(folder)
        entries: dict[str, tuple[tuple[int, ...], str]] = {}
        places: dict[str, Path] = {}
        for path in weight_files(folder):
            try:
                with safe_open(path, framework="np") as file:
                    opened: Any = file
                    for name in opened.keys():  # noqa: SIM118 — a safe_open handle is no mapping
                        if is_mtp(name, drafting) or (index and index.get(name) != path.name):
                            continue
                        view = opened.get_slice(name)
                        kind = view.get_dtype()
                        if kind not in allowed and not (name == TARGET_OFFSETS and kind == "I64"):
                            raise WeightsError(f"{name} in {path} is {kind}; floating-point weights are supported")
                        if not is_first(name, path, places.get(name)):
                            continue
                        entries[name], places[name] = (tuple(view.get_shape()), kind), path
            except (OSError, SafetensorError) as error:
                raise WeightsError(f"{path} can't be read, it may be cut short: {error}{pointer_hint(path)}") from error
        self.stored = text_names(entries)
        self.shapes = {name: entries[stored][0] for name, stored in self.stored.items()}
        self.types = {name: entries[stored][1] for name, stored in self.stored.items()}
