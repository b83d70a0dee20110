"""Weights in a GGUF file, dequantised while loading.

Two things of llama.cpp's are undone here, so that the decoder sees Hugging Face's tensors: names, and for the `llama`
architecture the order of rows in the Q and K projections (llama.cpp rotates neighbouring pairs, we rotate halves; see
`LlamaModel.permute` in its convert_hf_to_gguf.py). A file without `output.weight` ties it to the embedding.

On a GPU the file's bytes are copied and dequantised there; the types that matter most are done in torch (`gguf_blocks`), the
rest by the `gguf` package on the CPU.
"""

from __future__ import annotations

import math
import re
import struct
import warnings
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize

from common.models.config import ModelConfig
from common.models.weights.gguf_blocks import can_dequantise, dequantise_blocks
from common.models.weights.gguf_metadata import InvalidGguf
from common.models.weights.source import WeightsError
from common.models.weights.upload import Upload

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
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_FLOATS = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
_DEFAULT_ALIGNMENT = 32


class _Tensor(msgspec.Struct, frozen=True):
    """An entry of the tensor table. `shape` is row-major (GGUF stores it reversed); `offset` is from the file's start."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int


class GgufWeights:
    """A `WeightSource` over a mapped file.

    :raises InvalidGguf: if the file is damaged. :raises WeightsError: if it holds a tensor type that can't be dequantised.
    """

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self._config = config
        self.holds_fp8 = False
        try:
            data = np.memmap(path, np.uint8, mode="r")
            tensors = _TensorTable(data).read()
        except (OSError, ValueError, struct.error, UnicodeDecodeError) as error:
            raise InvalidGguf(f"{path} can't be read as a GGUF file: {error}") from error
        with warnings.catch_warnings():  # here, not in `read`: it is for the whole process and all its threads
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nobody writes to it
            self._data = torch.from_numpy(data)
        self._tensors = {hugging_face_name(name): tensor for name, tensor in tensors.items()}
        if embedding := self._tensors.get("model.embed_tokens.weight"):
            self._tensors.setdefault("lm_head.weight", embedding)
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}

    def size_bytes(self, name: str) -> int:
        return self._tensors[name].num_bytes

    def read(self, name: str, upload: Upload) -> torch.Tensor:
        tensor = self._tensors[name]
        raw = self._data[tensor.offset : tensor.offset + tensor.num_bytes]
        values = dequantize(raw, tensor.kind, tensor.shape, upload)
        if self._config.architecture == "llama" and ".q_proj." in name:
            return _unpermute(values, self._config.num_heads)
        if self._config.architecture == "llama" and ".k_proj." in name:
            return _unpermute(values, self._config.num_kv_heads)
        return values


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`; an unknown name stays as it is."""
    if name in _NAMES:
        return _NAMES[name]
    match = _LAYER_NAME.fullmatch(name)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    return name


def dequantize(data: torch.Tensor, kind: GGMLQuantizationType, shape: tuple[int, ...], upload: Upload) -> torch.Tensor:
    """data: uint8, the tensor's bytes. Returns [*shape] on `upload.device`: in `upload.dtype`, or as stored if that is
    F32, F16 or BF16.

    :raises WeightsError: for a type that the gguf package can't dequantise.
    """
    if dtype := _FLOATS.get(kind):
        return upload(data.view(dtype)).view(shape)
    if can_dequantise(kind):
        return dequantise_blocks(upload(data), kind, upload.dtype).view(shape)
    try:
        rows = data.view(math.prod(shape[:-1]), -1).numpy()
        return upload(torch.from_numpy(gguf_dequantize(rows, kind)).to(upload.dtype)).view(shape)
    except NotImplementedError as error:
        raise WeightsError(f"GGUF tensors of type {kind.name} can't be dequantised") from error


def _unpermute(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of neighbouring pairs → rows of halves, per head."""
    pairs = rows.view(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


class _TensorTable:
    """Walks over the metadata (see `gguf_metadata`) to the tensor table behind it."""

    def __init__(self, data: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self._data: memoryview = data.data
        self._at = 0

    def read(self) -> dict[str, _Tensor]:
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

    def _tensor(self, name: str, dims: tuple[int, ...], kind: int, offset: int) -> _Tensor:
        try:
            known = GGMLQuantizationType(kind)
        except ValueError as error:
            raise WeightsError(f"{name} has the unknown GGUF type {kind}: the gguf package may be too old") from error
        block_size, block_bytes = GGML_QUANT_SIZES[known]
        num_bytes = math.prod(dims) // block_size * block_bytes
        if dims[0] % block_size or offset + num_bytes > len(self._data):
            raise ValueError(f"{name} does not fit into the file")
        return _Tensor(shape=tuple(reversed(dims)), kind=known, offset=offset, num_bytes=num_bytes)

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
