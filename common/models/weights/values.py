"""Look through the scales and indices of a quantised checkpoint for what no weight can be made of. Torch-free.

They are some percent of the files, and are read again when the weights are loaded, from memory then.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.models.weights.errors import WeightsError

_SCALES = ("scales", "weight_scale", "weight_scale_inv", "weight_global_scale", "weight_scale_2", "absmax", "nested_absmax")
_E8M0 = ("_proj_scales", ".weight_scale")
_INDICES = ("g_idx", "weight_g_idx")
_AT_ONCE = 1 << 24

_Raw = NDArray[Any]
_NOT_FINITE: dict[str, tuple[type, Callable[[_Raw], _Raw]]] = {
    "F32": (np.uint32, lambda bits: (bits & 0x7FFF_FFFF) >= 0x7F80_0000),
    "F16": (np.uint16, lambda bits: (bits & 0x7FFF) >= 0x7C00),
    "BF16": (np.uint16, lambda bits: (bits & 0x7FFF) >= 0x7F80),
    "F8_E4M3": (np.uint8, lambda bits: (bits & 0x7F) == 0x7F),
}


def check_values(path: Path, group: int) -> None:
    """Check the file's scales and act-order indices. group: inputs that share a scale; 0: all.

    :raises WeightsError: if a scale is NaN or infinite, or an index is of no group.
    """
    data: _Raw = np.memmap(path, np.uint8, mode="r")
    length = int.from_bytes(data[:8].tobytes(), "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + length].tobytes())
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        last = name.rpartition(".")[2]
        if last in _INDICES:
            _check_indices(name, data[begin:end], entry["dtype"], group)
        elif entry["dtype"] == "U8" and name.endswith(_E8M0):
            if _any(data[begin:end], lambda bits: bits == 0xFF):
                raise WeightsError(f"{path}: {name} holds a scale that is NaN")
        elif last in _SCALES and (known := _NOT_FINITE.get(entry["dtype"])):
            kind, not_finite = known
            if _any(np.frombuffer(data, kind, (end - begin) // np.dtype(kind).itemsize, begin), not_finite):
                raise WeightsError(f"{path}: {name} holds a scale that is NaN or infinite")


def _check_indices(name: str, raw: _Raw, dtype: str, group: int) -> None:
    if dtype not in ("I32", "I64") or not group:
        return
    indices = np.frombuffer(raw.tobytes(), np.int32 if dtype == "I32" else np.int64)
    if (indices < 0).any():  # compressed-tensors: no order
        return
    counts = np.bincount(indices, minlength=-(-len(indices) // group)) if indices.max(initial=0) < len(indices) else None
    if counts is None or len(counts) > -(-len(indices) // group) or (counts > group).any():
        raise WeightsError(f"{name} does not divide {len(indices)} inputs into groups of {group}")


def _any(bits: _Raw, wrong: Callable[[_Raw], _Raw]) -> bool:
    return any(bool(wrong(bits[start : start + _AT_ONCE]).any()) for start in range(0, len(bits), _AT_ONCE))
