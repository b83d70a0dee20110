"""Weights in a GGUF file, dequantised while loading.

Two things of llama.cpp's are undone here, so that the decoder sees Hugging Face's tensors: names, and for the `llama`
architecture the order of rows in the Q and K projections (llama.cpp rotates neighbouring pairs, we rotate halves; see
`LlamaModel.permute` in its convert_hf_to_gguf.py). A file without `output.weight` ties it to the embedding.

Dequantised values equal those of the `gguf` package bit for bit; the formats that matter most are done in torch, several
times as fast.
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
from common.models.weights.base import WeightsError
from common.models.weights.gguf_metadata import InvalidGguf

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
        try:
            self._data: np.ndarray[Any, np.dtype[np.uint8]] = np.memmap(path, np.uint8, mode="r")
            tensors = _TensorTable(self._data).read()
        except (OSError, ValueError, struct.error, UnicodeDecodeError) as error:
            raise InvalidGguf(f"{path} can't be read as a GGUF file: {error}") from error
        self._tensors = {hugging_face_name(name): tensor for name, tensor in tensors.items()}
        if embedding := self._tensors.get("model.embed_tokens.weight"):
            self._tensors.setdefault("lm_head.weight", embedding)
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}

    def size_bytes(self, name: str) -> int:
        return self._tensors[name].num_bytes

    def read(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        raw = self._data[tensor.offset : tensor.offset + tensor.num_bytes]
        values = dequantize(raw, tensor.kind, tensor.shape)
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


def dequantize(raw: np.ndarray[Any, np.dtype[np.uint8]], kind: GGMLQuantizationType, shape: tuple[int, ...]) -> torch.Tensor:
    """raw: uint8, the tensor's bytes. Returns float32 (F16 and BF16: as stored) of `shape`.

    :raises WeightsError: for a type that the gguf package can't dequantise.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nobody writes to it
        data = torch.from_numpy(raw)
    match kind:
        case GGMLQuantizationType.F32:
            return data.view(torch.float32).view(shape)
        case GGMLQuantizationType.F16:
            return data.view(torch.float16).view(shape)
        case GGMLQuantizationType.BF16:
            return data.view(torch.bfloat16).view(shape)
        case GGMLQuantizationType.Q8_0:  # 32 weights: fp16 scale, 32 int8
            blocks = data.view(-1, 34)
            return (blocks[:, 2:].view(torch.int8).float() * _half(blocks, 0)).view(shape)
        case GGMLQuantizationType.Q4_0:  # 32 weights: fp16 scale, 16 bytes of two nibbles
            return (_nibbles(data.view(-1, 18)[:, 2:]) - 8).mul_(_half(data.view(-1, 18), 0)).view(shape)
        case GGMLQuantizationType.Q4_1:  # the same, with an fp16 minimum after the scale
            blocks = data.view(-1, 20)
            return _nibbles(blocks[:, 4:]).mul_(_half(blocks, 0)).add_(_half(blocks, 2)).view(shape)
    try:
        rows = raw.reshape(math.prod(shape[:-1]), -1)
        return torch.from_numpy(gguf_dequantize(rows, kind)).view(shape)
    except NotImplementedError as error:
        raise WeightsError(f"GGUF tensors of type {kind.name} can't be dequantised") from error


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The fp16 at byte `at` of each block, as float32 [blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [blocks, 16] → float32 [blocks, 32]: all low halves, then all high ones."""
    values = torch.empty(packed.shape[0], 32)
    values[:, :16] = packed & 15
    values[:, 16:] = packed >> 4
    return values


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
