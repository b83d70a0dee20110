"""The residual stream takes a layer's output, and is normalised for the next one."""

from __future__ import annotations

import torch

from common.ops.rms_norm import rms_norm
from common.ops.tensors import Activation


def add_rms_norm(
    residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, *, quantise: bool = False
) -> Activation:
    """residual: [rows, size], changed in place: residual + delta. delta: the same shape, or None. weight: [size].

    Returns RMSNorm(residual) · weight.
    """
    if delta is not None:
        residual.add_(delta)
    return rms_norm(residual, weight, eps)
