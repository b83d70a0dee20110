"""GGUF's block types as codes and scales for groups: those that a kernel multiplies as they are stored.

    Q4_0   32 values: d, nibbles              code · d - 8·d
    Q4_1   32 values: d, m, nibbles           code · d + m
    Q4_K   256 values: 8 groups of 32         code · scale - minimum
    Q8_0   32 values: d, int8                 code · d
    MXFP4  32 values: e, nibbles              E2M1 · 2^(e - 127)
    Q6_K   256 values: 16 groups of 16        (code - 32) · scale, as 8 bits

Layouts: ggml's `ggml-common.h`; other types are dequantised (`weights/gguf_blocks.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from common.models.formats.groups import Groups
from common.models.weights.gguf_blocks import e8m0, half, k_nibbles, k_scales, nibbles, q6_k_values
from common.ops.quant.group_layout import Code

_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Codes [blocks, values], scales and offsets [blocks, groups]."""


def can_group_blocks(kind: GGMLQuantizationType) -> bool:
    """Whether weights of this type stay as they are on a GPU."""
    return kind in _KINDS


def groups_of_blocks(raw: torch.Tensor, kind: GGMLQuantizationType, shape: tuple[int, ...]) -> Groups:
    """raw: uint8 [bytes] of a weight of `shape` [out, in], on any device."""
    outputs, inputs = shape
    _, num_bytes = GGML_QUANT_SIZES[kind]
    parts, group = _KINDS[kind]
    codes, scales, offsets = parts(raw.view(-1, num_bytes))
    code: Code = "fp4" if kind is GGMLQuantizationType.MXFP4 else "int8" if codes.dtype == torch.int8 else "int4"
    return Groups(
        codes.reshape(outputs, inputs),
        scales.reshape(outputs, inputs // group),
        None if offsets is None else offsets.reshape(outputs, inputs // group),
        code,
        group,
    )


def _q4_0(blocks: torch.Tensor) -> _Parts:
    return nibbles(blocks[:, 2:]).view(torch.uint8), half(blocks, 0), None


def _q4_1(blocks: torch.Tensor) -> _Parts:
    scale = half(blocks, 0)
    return nibbles(blocks[:, 4:]).view(torch.uint8), scale, half(blocks, 2) + 8 * scale


def _q4_k(blocks: torch.Tensor) -> _Parts:
    scale, minimum = (part[:, :, 0] for part in k_scales(blocks))
    return k_nibbles(blocks[:, 16:]).reshape(-1, 256), scale, 8 * scale - minimum


def _q8_0(blocks: torch.Tensor) -> _Parts:
    return blocks[:, 2:].contiguous().view(torch.int8), half(blocks, 0), None


def _mxfp4(blocks: torch.Tensor) -> _Parts:
    return nibbles(blocks[:, 1:]).view(torch.uint8), e8m0(blocks[:, :1]), None


def _q6_k(blocks: torch.Tensor) -> _Parts:
    return q6_k_values(blocks), half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float(), None


_KINDS: dict[GGMLQuantizationType, tuple[Callable[[torch.Tensor], _Parts], int]] = {
    GGMLQuantizationType.Q4_0: (_q4_0, 32),
    GGMLQuantizationType.Q4_1: (_q4_1, 32),
    GGMLQuantizationType.Q4_K: (_q4_k, 32),
    GGMLQuantizationType.Q8_0: (_q8_0, 32),
    GGMLQuantizationType.Q6_K: (_q6_k, 16),
    GGMLQuantizationType.MXFP4: (_mxfp4, 32),
}
