"""The two linears of a gated feed-forward and its gate: activation(x Wgᵀ) · (x Wuᵀ) (arXiv 2002.05202)."""

from __future__ import annotations

from typing import Literal, overload

import torch
import torch.nn.functional as F

from common.ops.backend import on_device
from common.ops.linear.linear import linear
from common.ops.linear.silu_mul import silu_mul
from common.ops.linear.weight import GateActivation, LinearWeight, check_activation
from common.ops.quant.quantise import quantise_rows
from common.ops.tensors import Activation, Quantised


@overload
def gate_up(
    x: Activation, weight: LinearWeight, *, activation: GateActivation = "silu", quantise: Literal[False] = False
) -> torch.Tensor: ...


@overload
def gate_up(x: Activation, weight: LinearWeight, *, activation: GateActivation = "silu", quantise: bool) -> Activation: ...


def gate_up(x: Activation, weight: LinearWeight, *, activation: GateActivation = "silu", quantise: bool = False) -> Activation:
    """x: [rows, in_features]. weight: [2 · size, in_features], the gate's rows first.

    Returns [rows, size] in the model's dtype, or quantised for the linear that follows.

    :raises ValueError: if the shape of `x` does not fit.
    """
    check_activation(x, weight)
    if on_device(x.data if isinstance(x, Quantised) else x):
        from common.ops.linear.device import gate_up_device

        return gate_up_device(x, weight, activation=activation, quantise=quantise)
    products = linear(x, weight)
    if activation == "silu":
        middle = silu_mul(products)
    else:
        gate, up = products.chunk(2, -1)
        # rounded from float64, as in silu_mul: a row's bits must not depend on its place among others
        middle = F.gelu(gate.double(), approximate="tanh").to(gate.dtype).mul_(up)
    return quantise_rows(middle) if quantise else middle
