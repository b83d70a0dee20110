"""What `add_rms_norm` computes, step by step, out of place."""

from __future__ import annotations

import torch

from common.ops.tensors import Quantised

_HIGHEST = 448.0  # of float8_e4m3fn


def add_rms_norm_reference(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    behind: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `add_rms_norm`. Returns the new residual, and its norm in float32, or the residual itself without a weight, for the
    caller to round or quantise."""
    if delta is not None:
        total = torch.zeros(residual.shape)
        for partial in delta if delta.ndim == 3 else delta[None]:
            total = total + partial.float()
        if behind is not None:
            total = _normed(total.to(residual.dtype).float(), behind, eps).to(residual.dtype).float()
        residual = (residual.float() + total).to(residual.dtype)
    return residual, residual.float() if weight is None else _normed(residual.float(), weight, eps)


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


def quantise_reference(x: torch.Tensor) -> Quantised:
    """x: float32 [rows, size]."""
    scale = x.abs().amax(-1).clamp(min=1e-20) / _HIGHEST
    return Quantised((x / scale[:, None]).clamp(-_HIGHEST, _HIGHEST).to(torch.float8_e4m3fn), scale)
