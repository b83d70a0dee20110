"""Look through the scales, indices and descriptions of a quantised checkpoint for what no weight can be made of. Torch-free.

They are some percent of the files, and are read again when the weights are loaded, from memory then.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.models.formats.nf4_state import parse_state
from common.models.weights.errors import WeightsError
from common.models.weights.required import Content

_SCALES = ("scales", "weight_scale", "weight_scale_inv", "weight_global_scale", "weight_scale_2", "absmax", "nested_absmax")
_SCALES += ("k_scale", "v_scale", "kv_scale")
_TABLES = ("quant_map", "nested_quant_map")
_E8M0 = ("_proj_scales", ".weight_scale")
_INDICES = ("g_idx", "weight_g_idx")
_AT_ONCE = 1 << 24

_Raw = NDArray[Any]
_FLOATS: dict[str, tuple[type, int, int]] = {
    "F32": (np.uint32, 0x7FFF_FFFF, 0x7F80_0000),
    "F16": (np.uint16, 0x7FFF, 0x7C00),
    "BF16": (np.uint16, 0x7FFF, 0x7F80),
    "F8_E4M3": (np.uint8, 0x7F, 0x7F),
}
"""By type: its bits, those of its magnitude, and the least magnitude that is infinite or NaN."""


def check_values(path: Path, group: int, contents: Mapping[str, Content]) -> None:
    """Check the file's scales, act-order indices, and what `contents` says of others. group: inputs that share a scale; 0: all.

    contents: by the names that the file has.

    :raises WeightsError: if a scale is NaN, infinite or negative, an index is of no group, or a tensor holds something else.
    """
    data: _Raw = np.memmap(path, np.uint8, mode="r")
    length = int.from_bytes(data[:8].tobytes(), "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + length].tobytes())
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        last = name.rpartition(".")[2]
        if (content := contents.get(name)) is not None:
            _check_content(name, data[begin:end], entry["dtype"], content, header)
        elif last in _INDICES:
            _check_indices(name, data[begin:end], entry["dtype"], group)
        elif entry["dtype"] == "U8" and name.endswith(_E8M0):
            if _any(data[begin:end], lambda bits: bits == 0xFF):
                raise WeightsError(f"{path}: {name} holds a scale that is NaN")
        elif last in (*_SCALES, *_TABLES) and (known := _FLOATS.get(entry["dtype"])):
            kind = known[0]
            bits = np.frombuffer(data, kind, (end - begin) // np.dtype(kind).itemsize, begin)
            _check_floats(f"{path}: {name}", bits, *known[1:], is_scale=last in _SCALES)


def _check_floats(name: str, bits: _Raw, magnitude: int, least: int, *, is_scale: bool) -> None:
    """For magnitude and least see `_FLOATS`."""
    if _any(bits, lambda some: (some & magnitude) >= least):
        raise WeightsError(f"{name} holds a {'scale' if is_scale else 'value'} that is NaN or infinite")
    if is_scale and _any(bits, lambda some: (some > magnitude) & ((some & magnitude) != 0)):
        raise WeightsError(f"{name} holds a negative scale")


def _check_content(name: str, raw: _Raw, dtype: str, content: Content, header: Mapping[str, Any]) -> None:
    match content.kind:
        case "zeros":
            if (raw != 0).any():
                is_bias = name.endswith(".bias")
                what = "the model has no such bias" if is_bias else "INT8 weights with zero points are not supported"
                raise WeightsError(f"{name} is not 0: {what}")
        case "shape":
            found = tuple(np.frombuffer(raw.tobytes(), np.int32 if dtype == "I32" else np.int64).tolist())
            if found != content.shape:
                raise WeightsError(f"{name} is {list(found)}, the configuration asks for {list(content.shape)}")
        case "state":
            block, weight = parse_state(name, raw.tobytes(), content.shape)["blocksize"], name.rpartition(".quant_state")[0]
            size = math.prod(content.shape)
            for other, wanted in ((weight, size // 2), (f"{weight}.absmax", size // block)):
                if other in header and math.prod(header[other]["shape"]) != wanted:
                    raise WeightsError(f"{other} holds {math.prod(header[other]['shape'])} numbers, {wanted} are expected")


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
