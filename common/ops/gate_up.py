"""The two linears of SwiGLU and its gate: silu(x Wgᵀ) · (x Wuᵀ) (arXiv 2002.05202)."""

from __future__ import annotations

import torch

from common.ops.linear import LinearWeight, linear
from common.ops.silu_mul import silu_mul
from common.ops.tensors import Activation


def gate_up(x: Activation, weight: LinearWeight) -> torch.Tensor:
    """x: [rows, in_features]. weight: [2 · size, in_features], the gate's rows first. Returns [rows, size]."""
    return silu_mul(linear(x, weight))
