"""Root-mean-square normalisation (arXiv 1910.07467)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: [..., size]; weight: [size], same dtype. Returns x / rms(x) · weight in that dtype, computed in float32.

    :raises ValueError: if the last dimension of `x` is not the weight's.
    """
    if weight.ndim != 1 or x.shape[-1:] != weight.shape:
        raise ValueError(f"rms_norm over {list(weight.shape)} can't take {list(x.shape)}")
    return F.rms_norm(x, (weight.shape[0],), weight, eps)
