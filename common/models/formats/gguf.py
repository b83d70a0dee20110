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
from common.models.formats.stored import BLOCK_FORMS
from common.models.weights.gguf_blocks import e8m0, half, k_nibbles, k_scales, nibbles, q6_k_values

_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Codes [blocks, values], scales and offsets [blocks, groups]."""


def can_group_blocks(kind: GGMLQuantizationType) -> bool:
    """Whether weights of this type stay as they are on a GPU."""
    return kind.name in BLOCK_FORMS


def groups_of_blocks(raw: torch.Tensor, kind: GGMLQuantizationType, shape: tuple[int, ...]) -> Groups:
    """raw: uint8 [bytes] of a weight of `shape` [out, in], on any device."""
    outputs, inputs = shape
    _, num_bytes = GGML_QUANT_SIZES[kind]
    form = BLOCK_FORMS[kind.name]
    codes, scales, offsets = _PARTS[kind](raw.view(-1, num_bytes))
    return Groups(
        codes.reshape(outputs, inputs),
        scales.reshape(outputs, inputs // form.group),
        None if offsets is None else offsets.reshape(outputs, inputs // form.group),
        form.code,
        form.group,
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


_PARTS: dict[GGMLQuantizationType, Callable[[torch.Tensor], _Parts]] = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q4_K: _q4_k,
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.MXFP4: _mxfp4,
    GGMLQuantizationType.Q6_K: _q6_k,
}
