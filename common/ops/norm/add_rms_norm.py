"""The residual stream takes a layer's output, and is normalised for the next one."""

from __future__ import annotations

import torch

from common.ops.backend import on_device
from common.ops.norm.rms_norm import rms_norm
from common.ops.quant.quantise import quantise_rows
from common.ops.tensors import Activation


def add_rms_norm(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    *,
    behind: torch.Tensor | None = None,
    quantise: bool = False,
) -> Activation:
    """residual: [rows, size], contiguous, changed in place: residual + Σ delta, rounded once. weight: [size], same dtype.
    delta: None, [rows, size] in that dtype, or float32 partial sums [splits, rows, size], added up first to last.
    behind: [size], same dtype, or None: what is added is RMSNorm(Σ delta) · behind, its parts rounded to the dtype.

    Returns RMSNorm(residual) · weight [rows, size] in that dtype, or `residual` itself where weight is None; with `quantise` in
    float8_e4m3fn, a row's scale being its largest magnitude / 448 (of the values before they are rounded to the dtype), and
    never zero. A row's bits don't depend on the other rows.

    :raises ValueError: if the shapes or dtypes don't fit.
    """
    if residual.ndim != 2 or not residual.is_contiguous():
        raise ValueError(f"add_rms_norm takes contiguous [rows, size], not {list(residual.shape)}")
    for norm in (weight, behind):
        if norm is not None and norm.shape != residual.shape[1:]:
            raise ValueError(f"add_rms_norm over {list(norm.shape)} can't take {list(residual.shape)}")
        if norm is not None and norm.dtype != residual.dtype:
            raise ValueError(f"add_rms_norm takes one dtype, not {residual.dtype} and weights of {norm.dtype}")
    if delta is not None:
        partial = delta.ndim == 3 and delta.shape[0] > 0 and delta.dtype == torch.float32
        if not partial and (delta.ndim != 2 or delta.dtype != residual.dtype):
            raise ValueError(f"add_rms_norm adds [rows, size] or float32 partials, not {delta.dtype} {list(delta.shape)}")
        if delta.shape[-2:] != residual.shape:
            raise ValueError(f"add_rms_norm can't add {list(delta.shape)} to {list(residual.shape)}")
    if on_device(residual):
        from common.ops.norm.add_rms_norm_triton import add_rms_norm_triton

        return add_rms_norm_triton(residual, delta, weight, eps, behind=behind, quantise=quantise)
    if delta is not None and behind is not None:
        residual.add_(rms_norm((delta if delta.ndim == 2 else _total(delta)).to(residual.dtype), behind, eps))
    elif delta is not None:
        residual.add_(delta if delta.ndim == 2 else _total(delta))
    if weight is None:
        return quantise_rows(residual) if quantise else residual
    if quantise:
        return quantise_rows(rms_norm(residual.float(), weight.float(), eps))
    return rms_norm(residual, weight, eps)


def _total(partials: torch.Tensor) -> torch.Tensor:
    total = partials[0].clone()
    for partial in partials[1:]:
        total.add_(partial)
    return total
