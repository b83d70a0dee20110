"""Which tensors a GGUF file holds, of which type and where: its tensor table, read without torch and without the tensors."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from common.models.gguf_parts import gguf_parts
from common.models.weights.errors import WeightsError
from common.models.weights.gguf_metadata import InvalidGguf

_Bytes = TypeVar("_Bytes", bound=Any)
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_EXPERT_NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_STACKED = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.(weight|bias)")
_EXPERT = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)\.(\d+)\.weight")
"""As files of 2023 have each expert by itself."""
_ITEM_BYTES = {GGMLQuantizationType.F32: 4, GGMLQuantizationType.F16: 2, GGMLQuantizationType.BF16: 2}
"""Of types that are read where they lie. A file's own alignment may be any."""
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_DEFAULT_ALIGNMENT = 32


class GgufTensor(msgspec.Struct, frozen=True):
    """An entry of the tensor table. `shape` is row-major (GGUF stores it reversed); `offset` is from the file's start. `part`:
    which of the model's files it is in."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int
    part: int = 0


Mapped = np.ndarray[Any, np.dtype[np.uint8]]
"""A whole file."""


def map_files(path: Path) -> list[Mapped]:
    """Map the files of the model whose first file is `path`.

    :raises InvalidGguf: if one can't be read. :raises UnknownModel: if one is not there.
    """
    return [_map_file(part) for part in gguf_parts(path)]


def _map_file(path: Path) -> Mapped:
    try:
        return np.memmap(path, np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise InvalidGguf(f"{path} can't be read as a GGUF file: {error}") from error


def bytes_of(tensor: GgufTensor, files: Sequence[_Bytes]) -> _Bytes:
    """Return a tensor's bytes. files: the mapped ones, as arrays or tensors of uint8."""
    return files[tensor.part][tensor.offset : tensor.offset + tensor.num_bytes]


def read_tensors(path: Path, files: Sequence[Mapped]) -> dict[str, GgufTensor]:
    """Every tensor of the model whose first file is `path`, by its Hugging Face name. files: see `map_files`.

    :raises InvalidGguf: if a file is damaged or cut short, or two have a tensor of the same name. :raises WeightsError: if a
        tensor's type is unknown.
    """
    tensors: dict[str, GgufTensor] = {}
    for part, (where, data) in enumerate(zip(gguf_parts(path), files, strict=True)):
        try:
            found = _TensorTable(data).read()
        except (OSError, ValueError, struct.error, UnicodeDecodeError) as error:
            raise InvalidGguf(f"{where} can't be read as a GGUF file: {error}") from error
        if twice := tensors.keys() & found.keys():
            raise InvalidGguf(f"{where} holds {min(twice)}, which a part before it has, too")
        tensors |= {name: msgspec.structs.replace(tensor, part=part) for name, tensor in found.items()}
    named: dict[str, GgufTensor] = {}
    for name, tensor in tensors.items():
        if match := _STACKED.fullmatch(name):
            named |= _experts(match[1], _EXPERT_NAMES[match[2]], match[3], tensor)
        else:
            named[hugging_face_name(name)] = _without_rows_of_one(tensor)
    return named


def without_layers(tensors: Mapping[str, GgufTensor], layers: range) -> dict[str, GgufTensor]:
    """Return the tensors but those of these layers."""
    prefixes = tuple(prefix for layer in layers for prefix in (f"model.layers.{layer}.", f"blk.{layer}."))
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(prefixes)}


def read_types(path: Path) -> dict[str, str]:
    """The name of each tensor's type, by the tensor's Hugging Face name.

    :raises InvalidGguf, WeightsError: see `read_tensors`.
    """
    return {name: tensor.kind.name for name, tensor in read_tensors(path, map_files(path)).items()}


def read_floats(path: Path, names: Collection[str]) -> dict[str, list[float]]:
    """The values of those of `names` that the file has, which must be few and F32.

    :raises InvalidGguf: if the file is damaged, or one is of another type.
    """
    files = map_files(path)
    found: dict[str, list[float]] = {}
    for name, tensor in read_tensors(path, files).items():
        if name not in names:
            continue
        if tensor.kind is not GGMLQuantizationType.F32:
            raise InvalidGguf(f"{path}: {name} is {tensor.kind.name}; F32 was expected")
        found[name] = np.frombuffer(bytes_of(tensor, files).tobytes(), np.float32).tolist()
    return found


def _without_rows_of_one(tensor: GgufTensor) -> GgufTensor:
    """A matrix of one row is a vector, as it is in files that llama.cpp itself wrote; converters keep the row."""
    if len(tensor.shape) != 2 or tensor.shape[0] != 1:
        return tensor
    return msgspec.structs.replace(tensor, shape=tensor.shape[1:])


def _experts(layer: str, name: str, last: str, tensor: GgufTensor) -> dict[str, GgufTensor]:
    """Each expert of a stacked tensor [experts, …] by itself."""
    count = tensor.shape[0]
    size = tensor.num_bytes // count
    return {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}.{last}": msgspec.structs.replace(
            tensor, shape=tensor.shape[1:], offset=tensor.offset + expert * size, num_bytes=size
        )
        for expert in range(count)
    }


def check_type(kind: GGMLQuantizationType) -> None:
    """:raises WeightsError: for a type that the gguf package can't dequantise."""
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError as error:
        raise WeightsError(f"GGUF tensors of type {kind.name} can't be dequantised") from error


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`; `blk.3.other.weight` → `model.layers.3.other.weight`;
    an unknown name stays as it is."""
    if name in _NAMES:
        return _NAMES[name]
    if expert := _EXPERT.fullmatch(name):
        return f"model.layers.{expert[1]}.mlp.experts.{expert[3]}.{_EXPERT_NAMES[expert[2]]}.weight"
    match = _LAYER_NAME.fullmatch(name)
    if match:
        return f"model.layers.{match[1]}.{_LAYER_NAMES.get(match[2], match[2])}.{match[3]}"
    return name


class _TensorTable:
    """Walks over the metadata (see `gguf_metadata`) to the tensor table behind it."""

    def __init__(self, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self._data: memoryview = data.data
        self._at = 0

    def read(self) -> dict[str, GgufTensor]:
        magic, version, num_tensors, num_keys = self._unpack("<4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError("not GGUF of version 2 or 3, little-endian")
        alignment = _DEFAULT_ALIGNMENT
        for _ in range(num_keys):
            key = self._string()
            (kind,) = self._unpack("<I")
            if key == b"general.alignment":
                (alignment,) = self._unpack("<I")
            else:
                self._skip(kind)
        entries = [self._entry() for _ in range(num_tensors)]
        begin = -(-self._at // max(1, alignment)) * max(1, alignment)
        return {name: self._tensor(name, dims, kind, begin + offset) for name, dims, kind, offset in entries}

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string().decode()
        (num_dims,) = self._unpack("<I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise ValueError(f"{name} has {num_dims} dimensions")
        dims = self._unpack(f"<{num_dims}Q")
        kind, offset = self._unpack("<IQ")
        return name, dims, kind, offset

    def _tensor(self, name: str, dims: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        try:
            known = GGMLQuantizationType(kind)
        except ValueError as error:
            raise WeightsError(f"{name} has the unknown GGUF type {kind}: the gguf package may be too old") from error
        block_size, block_bytes = GGML_QUANT_SIZES[known]
        num_bytes = math.prod(dims) // block_size * block_bytes
        if 0 in dims:
            raise ValueError(f"{name} is empty")
        if dims[0] % block_size or offset + num_bytes > len(self._data):
            raise ValueError(f"{name} does not fit into the file")
        if offset % _ITEM_BYTES.get(known, 1):
            raise ValueError(f"{name} begins within a number, at byte {offset}")
        return GgufTensor(shape=tuple(reversed(dims)), kind=known, offset=offset, num_bytes=num_bytes)

    def _unpack(self, format: str) -> tuple[Any, ...]:
        values = struct.unpack_from(format, self._data, self._at)
        self._at += struct.calcsize(format)
        return values

    def _string(self) -> bytes:
        (length,) = self._unpack("<Q")
        begin = self._at
        self._at += length
        return bytes(self._data[begin : self._at])

    def _skip(self, kind: int) -> None:
        if kind == _STRING:
            self._string()
        elif kind == _ARRAY:
            element, count = self._unpack("<IQ")
            if element in _SCALAR_BYTES:
                self._at += count * _SCALAR_BYTES[element]
            else:
                for _ in range(count):
                    self._skip(element)
        elif kind in _SCALAR_BYTES:
            self._at += _SCALAR_BYTES[kind]
        else:
            raise ValueError(f"metadata of unknown type {kind}")
