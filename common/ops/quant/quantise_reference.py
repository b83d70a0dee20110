"""What `quantise_rows` and `quantise_weight` compute, step by step."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from common.ops.tensors import Quantised

E4M3_MAX = 448.0
SMALLEST = 1e-20


def quantise_rows_reference(x: torch.Tensor) -> Quantised:
    """x: [rows, size]."""
    wide = x.float()
    highest = wide.abs().amax(dim=1).clamp(min=SMALLEST)
    data = (wide * (torch.full_like(highest, E4M3_MAX) / highest)[:, None]).clamp(-E4M3_MAX, E4M3_MAX)
    return Quantised(data.to(torch.float8_e4m3fn), highest / E4M3_MAX)


def quantise_blocks_reference(weight: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """weight: [out, in]. Blocks at the edges are smaller."""
    size_out, size_in = weight.shape
    padded = F.pad(weight.float(), (0, -size_in % block, 0, -size_out % block))
    tiles = padded.view(padded.shape[0] // block, block, -1, block)
    highest = tiles.abs().amax(dim=(1, 3)).clamp(min=SMALLEST)
    data = (tiles * (torch.full_like(highest, E4M3_MAX) / highest)[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX)
    return data.reshape(padded.shape)[:size_out, :size_in].to(torch.float8_e4m3fn).contiguous(), highest / E4M3_MAX


def dequantise_weight_reference(data: torch.Tensor, scale: torch.Tensor, block: int = 128) -> torch.Tensor:
    """data: float8_e4m3fn [out, in]; scale: [out] or [⌈out/block⌉, ⌈in/block⌉]. Returns float32 [out, in]."""
    if scale.ndim == 1:
        return data.float() * scale[:, None]
    size_out, size_in = data.shape
    return data.float() * scale.repeat_interleave(block, 0)[:size_out].repeat_interleave(block, 1)[:, :size_in]
