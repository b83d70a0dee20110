"""GGUF's quantised tensors to floating point, in torch: on a GPU as well as on a CPU.

Every type stores blocks of weights with their scales in between. Each function takes uint8 [blocks, block_bytes] and gives
float32 [blocks, block_size], equal to the `gguf` package's values bit for bit. Layouts: ggml's `ggml-common.h` and
`dequantize_row_*`. `d` is a block's scale and `m` its minimum, both fp16.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from common.ops.quant.grouped import FP4

_CPU_VALUES = 1 << 20  # as many at once as stay in a core's cache
_DEVICE_VALUES = 1 << 25


def can_dequantise(kind: GGMLQuantizationType) -> bool:
    return kind in _BLOCKS


def dequantise_blocks(raw: torch.Tensor, kind: GGMLQuantizationType, dtype: torch.dtype) -> torch.Tensor:
    """raw: uint8 [bytes], whole blocks. Returns [values] in `dtype`, on the same device."""
    size, num_bytes = GGML_QUANT_SIZES[kind]
    blocks = raw.view(-1, num_bytes)
    values = torch.empty(len(blocks), size, dtype=dtype, device=raw.device)
    at_once = (_CPU_VALUES if raw.device.type == "cpu" else _DEVICE_VALUES) // size
    for start in range(0, len(blocks), at_once):
        values[start : start + at_once] = _BLOCKS[kind](blocks[start : start + at_once])
    return values.view(-1)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """32 values: d, 32 int8."""
    return blocks[:, 2:].view(torch.int8).float() * half(blocks, 0)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    """32 values: d, 16 bytes of two nibbles."""
    return (nibbles(blocks[:, 2:]) - 8).float() * half(blocks, 0)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    """32 values: d, m, 16 bytes of two nibbles."""
    return (nibbles(blocks[:, 4:]).float() * half(blocks, 0)).add_(half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    """32 values: d, 32 fifth bits, 16 bytes of two nibbles."""
    return (_five_bits(blocks, 2) - 16).float() * half(blocks, 0)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    """32 values: d, m, 32 fifth bits, 16 bytes of two nibbles."""
    return (_five_bits(blocks, 4).float() * half(blocks, 0)).add_(half(blocks, 2))


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    """256 values, 8 groups: d, m, 12 bytes of 6-bit scales and minima, 4 × 32 bytes of two nibbles."""
    scale, minimum = k_scales(blocks)
    values = k_nibbles(blocks[:, 16:])
    return (values.float() * scale - minimum).view(-1, 256)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    """256 values, 8 groups: d, m, 12 bytes of scales and minima, 32 bytes of a fifth bit for each group, nibbles."""
    scale, minimum = k_scales(blocks)
    fifth = (blocks[:, None, 16:48] >> _shifts(blocks, range(8))) & 1
    values = k_nibbles(blocks[:, 48:]) | (fifth << 4)
    return (values.float() * scale - minimum).view(-1, 256)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """256 values, 16 groups: 2 × 64 bytes of low nibbles, 2 × 32 bytes of four upper bit pairs, 16 int8 scales, d."""
    scale = half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    return (q6_k_values(blocks).view(-1, 16, 16).float() * scale[:, :, None]).view(-1, 256)


def q6_k_values(blocks: torch.Tensor) -> torch.Tensor:
    """Q6_K's integers, int8 [blocks, 256]."""
    low = blocks[:, :128].view(-1, 2, 1, 64)
    low = torch.cat([low & 15, low >> 4], 2).view(-1, 8, 32)
    high = (blocks[:, 128:192].view(-1, 2, 1, 32) >> _shifts(blocks, (0, 2, 4, 6))[None]) & 3
    return ((low | (high.view(-1, 8, 32) << 4)).to(torch.int8) - 32).view(-1, 256)


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    """32 values: an exponent, 16 bytes of two E2M1 numbers."""
    table = torch.tensor(FP4, device=blocks.device)
    return table[nibbles(blocks[:, 1:]).int()] * e8m0(blocks[:, :1])


_BLOCKS: dict[GGMLQuantizationType, Callable[[torch.Tensor], torch.Tensor]] = {
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q5_0: _q5_0,
    GGMLQuantizationType.Q5_1: _q5_1,
    GGMLQuantizationType.Q4_K: _q4_k,
    GGMLQuantizationType.Q5_K: _q5_k,
    GGMLQuantizationType.Q6_K: _q6_k,
    GGMLQuantizationType.MXFP4: _mxfp4,
}


def e8m0(exponents: torch.Tensor) -> torch.Tensor:
    """uint8 → float32, powers of two."""
    return torch.ldexp(torch.ones(exponents.shape, device=exponents.device), exponents.int() - 127)


def half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The fp16 at byte `at` of each block, as float32 [blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [blocks, 16] → int8 [blocks, 32]: all low halves, then all high ones."""
    return torch.cat([packed & 15, packed >> 4], 1).view(torch.int8)


def _five_bits(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Nibbles after the four bytes at `at`, which hold the fifth bit of each, lowest first. int8 [blocks, 32]."""
    fifth = (blocks[:, at : at + 4, None] >> _shifts(blocks, range(8)).view(1, 1, 8)) & 1
    return nibbles(blocks[:, at + 4 :]) | (fifth.view(-1, 32) << 4).view(torch.int8)


def k_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [blocks, 128] → [blocks, 8, 32]: of every 32 bytes the low halves, then the high ones."""
    quarters = packed.reshape(-1, 4, 1, 32)
    return torch.cat([quarters & 15, quarters >> 4], 2).view(-1, 8, 32)


def k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and minimum of each of a block's 8 groups, float32 [blocks, 8, 1]: two fp16, then 6-bit factors of both."""
    first, second, upper = blocks[:, 4:16].reshape(-1, 3, 4).unbind(1)
    scale = torch.cat([first & 63, (upper & 15) | ((first >> 2) & 48)], 1)
    minimum = torch.cat([second & 63, (upper >> 4) | ((second >> 2) & 48)], 1)
    return (half(blocks, 0) * scale.float())[:, :, None], (half(blocks, 2) * minimum.float())[:, :, None]


def _shifts(blocks: torch.Tensor, bits: range | tuple[int, ...]) -> torch.Tensor:
    """uint8 [1, len(bits), 1]"""
    return torch.tensor(list(bits), dtype=torch.uint8, device=blocks.device).view(1, -1, 1)
