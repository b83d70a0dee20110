"""y = x Wᵀ + b, with the weight packed once at load, in the format that suits the device and the precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from common.ops.backend import on_device
from common.ops.linear_cpu import can_pack, linear_onednn, linear_plain, pack
from common.ops.tensors import Activation, Quantised

Format = Literal["plain", "onednn", "int8", "fp8"]


@dataclass(slots=True, frozen=True)
class LinearWeight:
    """`data` by `format`: "plain" [out_features, in_features]; "onednn" its packing; "fp8" float8_e4m3fn [out, in].

    bias: [out_features]. scale of "fp8": float32 [out], or [⌈out/128⌉, ⌈in/128⌉] for weights quantised in blocks of 128.
    """

    data: torch.Tensor
    bias: torch.Tensor | None
    in_features: int
    out_features: int
    format: Format
    scale: torch.Tensor | None = None


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> LinearWeight:
    """weight: [out_features, in_features], floating; bias: [out_features] or None.

    :raises ValueError: for other shapes or dtypes.
    """
    if weight.ndim != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(f"a linear weight is [out, in] with bias [out], not {list(weight.shape)}")
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"linear weights are float32, bfloat16 or float16, not {weight.dtype}")
    out_features, in_features = weight.shape
    if not on_device(weight) and can_pack(weight.dtype):
        return LinearWeight(pack(weight), bias, in_features, out_features, "onednn")
    return LinearWeight(weight.contiguous(), bias, in_features, out_features, "plain")


def linear(x: Activation, weight: LinearWeight, *, split: bool = False) -> torch.Tensor:
    """x: [rows, in_features] in the model's dtype, or quantised for an fp8 weight.

    Returns [rows, out_features] in the model's dtype. With `split` it may return float32 partial sums [splits, rows,
    out_features] instead (bias included), for the next op to add up, first to last. On a CPU rows do not affect each other.

    :raises ValueError: if the shape of `x` does not fit.
    """
    data = x.data if isinstance(x, Quantised) else x
    if data.ndim != 2 or data.shape[1] != weight.in_features:
        raise ValueError(f"linear takes [rows, {weight.in_features}], not {list(data.shape)}")
    if isinstance(x, Quantised):
        raise ValueError(f"a {weight.format} weight takes no quantised activations")
    if weight.format == "onednn":
        return linear_onednn(x, weight.data, weight.bias)
    return linear_plain(x, weight.data, weight.bias)


def takes_quantised(weight: LinearWeight, rows: int) -> bool:
    """Does `linear` of this many rows want quantised activations?"""
    return False
