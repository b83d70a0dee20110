"""`linear` on a CPU: oneDNN with a packed weight, twice as fast as torch's default.

It adds up each output in an order that does not depend on the number of rows or threads. One row alone takes another kernel
when the weight is deep, so it is computed as two: see docs/decisions/0003-batch-invariance.md.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from common.ops.linear_reference import linear_reference

_MIN_ROWS = 2
_PLAIN_ROWS = 4  # torch's own kernel treats each row alike from here on, if rows come in fours
_PACK_HINT = 16


def can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(weight: torch.Tensor) -> torch.Tensor:
    """weight: [out_features, in_features]. Returns oneDNN's packing of it."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_HINT)


def linear_onednn(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    rows = x.shape[0]
    padded = x if rows >= _MIN_ROWS else F.pad(x, (0, 0, 0, _MIN_ROWS - rows))
    y = torch.ops.mkldnn._linear_pointwise(padded, packed, bias, "none", [], "")
    return y if padded is x else y[:rows]


def linear_plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    padding = -x.shape[0] % _PLAIN_ROWS
    if not padding:
        return linear_reference(x, weight, bias)
    return linear_reference(F.pad(x, (0, 0, 0, padding)), weight, bias)[: x.shape[0]]
