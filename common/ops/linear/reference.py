"""What `linear` computes."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from common.ops.quant.grouped import GroupedWeight, dequantise_grouped
from common.ops.quant.quantise_reference import dequantise_weight_reference
from common.ops.tensors import Activation, Quantised


def linear_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """x: [rows, in]; weight: [out, in]; bias: [out] or None. Returns [rows, out] in `dtype`; None: that of `x`."""
    if dtype in (None, x.dtype):
        return F.linear(x, weight, bias)
    return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def linear_fp8_reference(
    x: Activation, data: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """x: [rows, in]; data: float8_e4m3fn [out, in]; scale: [out] or [⌈out/128⌉, ⌈in/128⌉]. Returns [rows, out] in `dtype`."""
    assert scale is not None
    wide = x.data.float() * x.scale[:, None] if isinstance(x, Quantised) else x.float()
    weight = dequantise_weight_reference(data, scale)
    return F.linear(wide, weight, None if bias is None else bias.float()).to(dtype)


def linear_grouped_reference(
    x: torch.Tensor, weight: GroupedWeight, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """x: [rows, in], columns in the order of the inputs. Returns [rows, out] in `dtype`."""
    return F.linear(x.float(), dequantise_grouped(weight), None if bias is None else bias.float()).to(dtype)
