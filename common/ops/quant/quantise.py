"""Numbers as 8-bit floats (e4m3: four bits of exponent, three of mantissa, up to 448) with float32 scales.

Activations get a scale per row each time, weights one per output channel, or per block of 128 × 128, at load. A scale is
max|x| / 448 and never zero (arXiv 2209.05433).
"""

from __future__ import annotations

import torch

from common.ops.backend import on_device
from common.ops.quant.quantise_reference import quantise_blocks_reference, quantise_rows_reference
from common.ops.tensors import Quantised

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_CHUNK_ELEMENTS = 1 << 26
"""Weights are widened this many elements at a time: a vocabulary's matrix as float32 would be gigabytes."""


def quantise_rows(x: torch.Tensor) -> Quantised:
    """x: [rows, size], floating, contiguous. Returns e4m3 [rows, size] and float32 scales [rows].

    :raises ValueError: for other shapes or dtypes.
    """
    if x.ndim != 2 or x.dtype not in _FLOATS:
        raise ValueError(f"quantise_rows takes floating [rows, size], not {x.dtype} {list(x.shape)}")
    if on_device(x):
        from common.ops.quant.quantise_triton import quantise_rows_triton

        return quantise_rows_triton(x.contiguous())
    return quantise_rows_reference(x)


def quantise_weight(weight: torch.Tensor, block: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """weight: [out, in], floating. Returns e4m3 [out, in] and float32 scales, [out], or [⌈out/block⌉, ⌈in/block⌉].

    :raises ValueError: for other shapes or dtypes.
    """
    if block is None:
        return quantise_rows(weight)
    if weight.ndim != 2 or weight.dtype not in _FLOATS:
        raise ValueError(f"quantise_weight takes floating [out, in], not {weight.dtype} {list(weight.shape)}")
    rows = max(block, _CHUNK_ELEMENTS // weight.shape[1] // block * block)
    parts = [quantise_blocks_reference(part, block) for part in weight.split(rows)]
    if len(parts) == 1:
        return parts[0]
    # torch.cat knows no 8-bit floats on some devices
    data = torch.cat([part.view(torch.uint8) for part, _ in parts]).view(torch.float8_e4m3fn)
    return data, torch.cat([scale for _, scale in parts])
