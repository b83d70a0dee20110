"""`linear` on a CPU for weights in a float format: how they are packed, and the call of the kernel (`linear_numba`)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from common.ops.cpu_int8.weights import LANES


def pack_tiles(weight: torch.Tensor) -> torch.Tensor:
    """weight: [out_features, in_features]. Returns tiles [blocks, in_features, 16] in bfloat16, or float32 for other dtypes.

    Zeros follow the last output: the kernel takes several tiles at once."""
    from common.ops.linear.linear_numba import TILES_AT_ONCE

    out_features, in_features = weight.shape
    kept = weight if weight.dtype == torch.bfloat16 else weight.float()
    padded = F.pad(kept, (0, 0, 0, -out_features % (LANES * TILES_AT_ONCE)))
    return padded.view(-1, LANES, in_features).transpose(1, 2).contiguous()


def linear_tiles(
    x: torch.Tensor, tiles: torch.Tensor, bias: torch.Tensor | None, out_features: int, dtype: torch.dtype
) -> torch.Tensor:
    """x: [rows, in_features]. Returns [rows, out_features] in `dtype`, on as many threads as torch would take."""
    from common.ops.linear.linear_numba import multiply

    out = torch.zeros(len(x), tiles.shape[0] * LANES)
    if bias is not None:
        out[:, :out_features] = bias
    weights = tiles.view(torch.uint16) if tiles.dtype == torch.bfloat16 else tiles
    multiply(x.float().contiguous().numpy(), weights.numpy(), out.numpy(), torch.get_num_threads())
    return out[:, :out_features].to(dtype).contiguous()
