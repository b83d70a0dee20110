"""The weight of a linear, packed once at load, in the format that suits the device and the precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from common.ops.backend import on_device
from common.ops.cpu_int8.weights import Int8Weight, pack_int8
from common.ops.linear.linear_cpu import pack_tiles
from common.ops.quant.grouped import GroupedWeight
from common.ops.quant.quantise import quantise_weight
from common.ops.tensors import Activation, Quantised

Format = Literal["plain", "tiles", "int8", "fp8", "grouped"]
PackFormat = Literal["plain", "int8", "fp8"]
Role = Literal["qkv", "output", "gate_up", "down", "head", "router"]
"""What a linear is in a decoder."""

GateActivation = Literal["silu", "gelu_tanh"]
"""Of a gated feed-forward; gelu in its tanh form."""

FP8_BLOCK = 128

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(slots=True, frozen=True)
class LinearWeight:
    """`data` by `format`: "plain" [out_features, in_features]; "tiles" [blocks, in_features, 16], on a CPU; "fp8" float8_e4m3fn
    [out, in]; "int8" the tiles of `int8`, which is multiplied by `forward_numba` alone; "grouped" the codes of `grouped`,
    which also has the scales.

    bias: [out_features]. scale of "fp8": float32 [out], or [⌈out/128⌉, ⌈in/128⌉] for weights quantised in blocks of 128;
    of "grouped" float32 [out]. dtype: the model's, which "fp8" and "grouped" give results in.
    batch_invariant: whether a GPU computes a row in the same way whatever rows come with it, at a cost; a CPU always does.
    """

    data: torch.Tensor
    bias: torch.Tensor | None
    in_features: int
    out_features: int
    format: Format
    scale: torch.Tensor | None = None
    dtype: torch.dtype = torch.bfloat16
    int8: Int8Weight | None = None
    grouped: GroupedWeight | None = None
    batch_invariant: bool = False

    @property
    def parameters(self) -> int:
        return self.in_features * self.out_features


def pack_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    format: PackFormat = "plain",
    batch_invariant: bool = False,
) -> LinearWeight:
    """weight: [out_features, in_features], floating; bias: [out_features] or None.

    format: "fp8" quantises per output channel, for a GPU; "int8" as well, for a CPU, in float32 otherwise. batch_invariant: see
    `LinearWeight`.

    :raises ValueError: for other shapes or dtypes, or a format that the device has no kernel for.
    """
    if weight.ndim != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(f"a linear weight is [out, in] with bias [out], not {list(weight.shape)}")
    if weight.dtype not in _FLOATS:
        raise ValueError(f"linear weights are float32, bfloat16 or float16, not {weight.dtype}")
    out_features, in_features = weight.shape
    if format == "int8":
        packed = pack_int8(weight, bias)
        return LinearWeight(packed.tiles, bias, in_features, out_features, "int8", packed.scale, torch.float32, packed)
    if format == "fp8":
        data, scale = quantise_weight(weight)
        return LinearWeight(data, bias, in_features, out_features, "fp8", scale, weight.dtype, batch_invariant=batch_invariant)
    if on_device(weight):
        data = weight.contiguous()
        return LinearWeight(data, bias, in_features, out_features, "plain", dtype=weight.dtype, batch_invariant=batch_invariant)
    return LinearWeight(pack_tiles(weight), bias, in_features, out_features, "tiles", dtype=weight.dtype)


def linear_from_fp8(
    data: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    batch_invariant: bool = False,
) -> LinearWeight:
    """A published FP8 weight. data: float8_e4m3fn [out, in]; weight = data · scale.

    scale: one number (weight_scale per tensor), [out] or [out, 1] (per channel), or [⌈out/128⌉, ⌈in/128⌉]
    (weight_scale_inv); any floating dtype. dtype: the model's. batch_invariant: see `LinearWeight`.

    :raises ValueError: for other shapes or dtypes.
    """
    if data.ndim != 2 or data.dtype != torch.float8_e4m3fn or (bias is not None and bias.shape != data.shape[:1]):
        raise ValueError(f"an FP8 weight is float8_e4m3fn [out, in] with bias [out], not {data.dtype} {list(data.shape)}")
    out_features, in_features = data.shape
    scale = scale.float()
    blocks = (-(-out_features // FP8_BLOCK), -(-in_features // FP8_BLOCK))
    if scale.numel() == 1:
        scale = scale.reshape(1).expand(out_features).contiguous()
    elif scale.numel() == out_features and scale.shape[0] == out_features:
        scale = scale.reshape(out_features).contiguous()
    elif scale.shape == blocks:
        scale = scale.contiguous()
    else:
        raise ValueError(f"scales of {list(scale.shape)} do not fit an FP8 weight of {list(data.shape)}")
    return LinearWeight(
        data.contiguous(), bias, in_features, out_features, "fp8", scale, dtype, batch_invariant=batch_invariant
    )


def linear_from_grouped(
    grouped: GroupedWeight,
    bias: torch.Tensor | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    batch_invariant: bool = False,
) -> LinearWeight:
    """A weight in groups (`quant/grouped.py`). bias: [out]; dtype: the model's; batch_invariant: see `LinearWeight`.

    :raises ValueError: for a bias of another shape.
    """
    if bias is not None and bias.shape != (grouped.out_features,):
        raise ValueError(f"a weight of {grouped.out_features} outputs has a bias of as many, not {list(bias.shape)}")
    return LinearWeight(
        data=grouped.data,
        bias=bias,
        in_features=grouped.in_features,
        out_features=grouped.out_features,
        format="grouped",
        scale=grouped.channel,
        dtype=dtype,
        grouped=grouped,
        batch_invariant=batch_invariant,
    )


def check_activation(x: Activation, weight: LinearWeight) -> None:
    """:raises ValueError: if `x` does not fit `weight`."""
    data = x.data if isinstance(x, Quantised) else x
    if weight.format == "int8":
        raise ValueError("an int8 weight is multiplied within a compiled step only")
    if data.ndim != 2 or data.shape[1] != weight.in_features:
        raise ValueError(f"linear takes [rows, {weight.in_features}], not {list(data.shape)}")
    if isinstance(x, Quantised) and weight.format != "fp8":
        raise ValueError(f"a {weight.format} weight takes no quantised activations")
