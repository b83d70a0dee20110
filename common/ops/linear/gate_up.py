"""The two linears of SwiGLU and its gate: silu(x Wgᵀ) · (x Wuᵀ) (arXiv 2002.05202)."""

from __future__ import annotations

from typing import Literal, overload

import torch

from common.ops.backend import on_device
from common.ops.linear.linear import linear
from common.ops.linear.silu_mul import silu_mul
from common.ops.linear.weight import LinearWeight, check_activation
from common.ops.quant.quantise import quantise_rows
from common.ops.tensors import Activation, Quantised


@overload
def gate_up(x: Activation, weight: LinearWeight, *, quantise: Literal[False] = False) -> torch.Tensor: ...


@overload
def gate_up(x: Activation, weight: LinearWeight, *, quantise: bool) -> Activation: ...


def gate_up(x: Activation, weight: LinearWeight, *, quantise: bool = False) -> Activation:
    """x: [rows, in_features]. weight: [2 · size, in_features], the gate's rows first.

    Returns [rows, size] in the model's dtype, or quantised for the linear that follows.

    :raises ValueError: if the shape of `x` does not fit.
    """
    check_activation(x, weight)
    if on_device(x.data if isinstance(x, Quantised) else x):
        from common.ops.linear.device import gate_up_device

        return gate_up_device(x, weight, quantise=quantise)
    middle = silu_mul(linear(x, weight))
    return quantise_rows(middle) if quantise else middle
