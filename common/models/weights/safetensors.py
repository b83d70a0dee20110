"""Weights in a folder of *.safetensors files: one file, or shards named by `model.safetensors.index.json`."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors import SafetensorError, safe_open

from common.models.families.wrappers import text_names
from common.models.formats.groups import Groups
from common.models.lfs import pointer_hint
from common.models.weights.expected import TARGET_OFFSETS
from common.models.weights.files import INDEX, is_first, is_mtp, read_index, weight_files
from common.models.weights.source import WeightsError
from common.models.weights.upload import Upload

log = structlog.get_logger()

_FP8 = "F8_E4M3"
_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, _FP8: 1, "I64": 8, "I32": 4, "I8": 1, "U8": 1}
_INTEGERS = ("I64", "I32", "I8", "U8")


class SafetensorsWeights:
    """A `WeightSource` over mapped files. integers: whether they may hold codes of quantised weights. drafting: the numbers of
    layers behind the decoder's, which are passed over.

    :raises WeightsError: if a file is missing, damaged, or the index names tensors that are in no shard.
    """

    def __init__(self, folder: Path, *, integers: bool = False, drafting: range = range(0)) -> None:
        self._integers = integers
        self._drafting = drafting
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Any] = {}
        self._paths: dict[str, Path] = {}
        self._bytes: dict[str, int] = {}
        self.holds_fp8 = False
        index, paths = read_index(folder), weight_files(folder)
        if not paths:
            raise WeightsError(f"{folder} holds no .safetensors file")
        for path in paths:
            self._open(path, index)
        if missing := sorted(name for name in index.keys() - self.shapes.keys() if not is_mtp(name, drafting)):
            raise WeightsError(f"{INDEX} names {missing[0]} ({len(missing)} tensors) that no shard holds")
        self._stored = text_names(self.shapes)
        skipped = self._bytes.keys() - self._stored.values()
        if skipped:
            log.info("image_weights_skipped", tensors=len(skipped), mib=sum(self._bytes[name] for name in skipped) >> 20)
        self.shapes = {name: self.shapes[stored] for name, stored in self._stored.items()}

    def _open(self, path: Path, index: dict[str, str]) -> None:
        try:
            file: Any = safe_open(path, framework="pt")
            for name in file.keys():  # noqa: SIM118 — a safe_open handle is no mapping
                if is_mtp(name, self._drafting) or (index and index.get(name) != path.name):
                    continue
                if not is_first(name, path, self._paths.get(name)):
                    continue
                self._paths[name] = path
                view = file.get_slice(name)
                dtype = view.get_dtype()
                if dtype not in _ITEM_BYTES or (dtype in _INTEGERS and not self._integers and name != TARGET_OFFSETS):
                    raise WeightsError(f"{name} in {path.name} is {dtype}; floating-point weights are supported")
                self.shapes[name] = tuple(view.get_shape())
                self._bytes[name] = math.prod(self.shapes[name]) * _ITEM_BYTES[dtype]
                self.holds_fp8 |= dtype == _FP8
                self._files[name] = file
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{path} can't be read: {error}{pointer_hint(path)}") from error

    groups: Collection[str] = ()

    def read_groups(self, name: str, upload: Upload) -> Groups:
        raise WeightsError(f"{name} is stored in another way")

    def size_bytes(self, name: str) -> int:
        return self._bytes[self._stored[name]]

    def read(self, name: str, upload: Upload) -> torch.Tensor:
        try:
            stored = self._stored[name]
            return upload(self._files[stored].get_tensor(stored))
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{name} can't be read: {error}") from error
