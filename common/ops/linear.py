"""y = x Wᵀ + b, with the weight packed once at load.

On a CPU, oneDNN with a packed weight is twice as fast as torch's default, and adds up each output in an order that does not
depend on the number of rows or threads. One row alone takes another kernel when the weight is deep, so it is computed as
two: see docs/decisions/0003-batch-invariance.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from common.ops.linear_reference import linear_reference

_MIN_ROWS = 2
_PLAIN_ROWS = 4  # torch's own kernel treats each row alike from here on, if rows come in fours
_PACK_HINT = 16


@dataclass(slots=True, frozen=True)
class LinearWeight:
    """`data` is [out_features, in_features], or oneDNN's packing of it (`packed`). `bias` is [out_features]."""

    data: torch.Tensor
    bias: torch.Tensor | None
    in_features: int
    out_features: int
    packed: bool


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearWeight:
    """weight: [out_features, in_features], float32 or bfloat16; bias: [out_features] or None.

    :raises ValueError: for other shapes or dtypes.
    """
    if weight.ndim != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(f"a linear weight is [out, in] with bias [out], not {list(weight.shape)}")
    if weight.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"linear weights are float32 or bfloat16, not {weight.dtype}")
    out_features, in_features = weight.shape
    packed = weight.device.type == "cpu" and _can_pack(weight.dtype)
    data = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_HINT) if packed else weight.contiguous()
    return LinearWeight(data, bias, in_features, out_features, packed)


def linear(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    """x: [rows, in_features] in the weight's dtype. Returns [rows, out_features]; each row depends on that row alone.

    :raises ValueError: if the shape of `x` does not fit.
    """
    if x.ndim != 2 or x.shape[1] != weight.in_features:
        raise ValueError(f"linear takes [rows, {weight.in_features}], not {list(x.shape)}")
    rows = x.shape[0]
    if weight.packed:
        padded = x if rows >= _MIN_ROWS else F.pad(x, (0, 0, 0, _MIN_ROWS - rows))
        y = torch.ops.mkldnn._linear_pointwise(padded, weight.data, weight.bias, "none", [], "")
        return y if padded is x else y[:rows]
    padding = -rows % _PLAIN_ROWS
    if not padding:
        return linear_reference(x, weight.data, weight.bias)
    return linear_reference(F.pad(x, (0, 0, 0, padding)), weight.data, weight.bias)[:rows]


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
