"""y = x Wᵀ + b, with a packed weight (`weight.py`)."""

from __future__ import annotations

import torch

from common.ops.backend import on_device
from common.ops.linear.linear_cpu import linear_tiles
from common.ops.linear.reference import linear_fp8_reference, linear_grouped_reference, linear_reference
from common.ops.linear.weight import LinearWeight, check_activation
from common.ops.tensors import Activation, Quantised


def linear(x: Activation, weight: LinearWeight, *, split: bool = False, wide: bool = False) -> torch.Tensor:
    """x: [rows, in_features] in the model's dtype, or quantised for an fp8 weight.

    Returns [rows, out_features] in the model's dtype, or, with `wide`, in float32: sums as they were accumulated, rounded to
    nothing narrower (products of a model's head). With `split` it may return float32 partial sums [splits, rows,
    out_features] instead (bias included), for the next op to add up, first to last. Rows do not affect each other on a CPU,
    and on a GPU if batch_invariant.

    :raises ValueError: if the shape of `x` does not fit, it is quantised and the weight is not fp8, the weight is int8, or both
        `split` and `wide` are asked for.
    """
    if split and wide:
        raise ValueError("partial sums are float32 already")
    check_activation(x, weight)
    data = x.data if isinstance(x, Quantised) else x
    if on_device(data) and weight.format in ("plain", "fp8", "grouped"):
        from common.ops.linear.device import linear_device

        return linear_device(x, weight, split=split, wide=wide)
    dtype = torch.float32 if wide else weight.dtype
    if weight.format == "fp8":
        return linear_fp8_reference(x, weight.data, weight.scale, weight.bias, dtype)
    assert not isinstance(x, Quantised)
    if weight.grouped is not None:
        return linear_grouped_reference(x, weight.grouped, weight.bias, dtype)
    if weight.format == "tiles":
        return linear_tiles(x, weight.data, weight.bias, weight.out_features, torch.float32 if wide else x.dtype)
    return linear_reference(x, weight.data, weight.bias, torch.float32 if wide else x.dtype)


def add_linear(residual: torch.Tensor, x: Activation, weight: LinearWeight) -> bool:
    """residual += x Wᵀ + b in one pass, rounded once, where a GPU has one for these shapes; else change nothing.

    residual: contiguous [rows, out_features] in the model's dtype. x: as `linear`. Returns whether it was added.

    :raises ValueError: as `linear`.
    """
    check_activation(x, weight)
    if isinstance(x, Quantised) or not on_device(x) or weight.format != "plain":
        return False
    from common.ops.linear.device import add_linear_device

    return add_linear_device(residual, x, weight)


def takes_quantised(weight: LinearWeight, rows: int) -> bool:
    """Does `linear`, or `gate_up`, of this many rows want quantised activations? Either kind is computed with what it gets."""
    if weight.format != "fp8" or not on_device(weight.data):
        return False
    from common.ops.linear.device import wants_quantised

    return wants_quantised(weight, rows)
