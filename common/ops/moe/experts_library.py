"""A mixture of experts by the library's grouped products: for many tokens, whose multiplications are what takes the time.

Tokens are sorted by expert and copied, so that each expert's are rows side by side. As in the kernels of `grouped_triton.py`
nothing is read by the host and there are no atomics. What differs: gate and up are rounded to the activations' dtype before
the activation, and an expert's answer before it is weighed, as the library writes them.
"""

from __future__ import annotations

import torch

from common.ops.moe.form import ExpertActivation, Routing
from common.ops.moe.packed_weight import PackedWeight
from common.ops.moe.sort_triton import sorted_pairs
from common.ops.moe.sorted_triton import activate, returned, scattered

_ONE_TILE = 1 << 30
"""Pairs of a tile: all that an expert has, so that tile i is expert i."""
_grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm  # pyright: ignore[reportPrivateImportUsage]


def experts_library(
    x: torch.Tensor,
    routing: Routing,
    gate_up: PackedWeight,
    down: PackedWeight,
    activation: ExpertActivation,
    *,
    weigh_inputs: bool = False,
) -> torch.Tensor:
    """See `experts`. x: bfloat16 [rows, hidden], contiguous; weights: plain bfloat16, in rows of a
    multiple of 16 bytes."""
    found = sorted_pairs(routing.ids, gate_up.experts, _ONE_TILE, with_places=True)
    ends = found.tiles[: gate_up.experts, 3].contiguous()
    # nested, so that each result is freed as soon as the next one is there
    middle = activate(
        _multiplied(scattered(x, found, routing.ids.shape[1]), gate_up, ends),
        gate_up.bias,
        routing,
        found,
        activation,
        weigh_inputs=weigh_inputs,
    )
    return returned(_multiplied(middle, down, ends), down.bias, routing, found, weigh=not weigh_inputs)


def _multiplied(x: torch.Tensor, weight: PackedWeight, ends: torch.Tensor) -> torch.Tensor:
    """x: [pairs, k] in the order of experts, whose last pairs `ends`, int32 [experts], are behind. Returns [pairs, n]."""
    return _grouped_mm(x, weight.values.transpose(1, 2), offs=ends)
