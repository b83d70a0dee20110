"""8-bit weights of linears on a CPU: how they are packed, and how `int8_numba` finds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

LARGEST = 8191
"""The largest activation, 14 bits; so small that 2048 products with weights of up to 127 fit into 32 bits."""

LANES = 16
"""Outputs that are computed together."""

PAIRS = 8
"""A weight's inputs come in as many pairs, or a multiple."""

Linears = NDArray[np.void]
"""Records of `LINEAR`."""

LINEAR = np.dtype([(name, np.int64) for name in ("tiles", "scale", "bias", "bias_step", "blocks", "pairs")])
"""Addresses of an `Int8Weight`'s arrays; how many blocks of `LANES` outputs and how many pairs of inputs it has. bias_step: 1,
or 0 where every block adds the same zeros."""


class Int8Weight(NamedTuple):
    """tiles: int8 [⌈outputs / 16⌉, pairs, 16, 2], inputs padded to a multiple of 2 · `PAIRS`. scale: float32 [outputs, padded
    to 16]: weight ≈ integer · scale. bias: float32 [outputs, padded], or None."""

    tiles: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None


def pack_int8(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Int8Weight:
    """weight: floating [outputs, inputs], rounded to the nearest of 255 steps; bias: [outputs]."""
    outputs, inputs = weight.shape
    weight = weight.float()
    scale = weight.abs().amax(1).clamp_min(1e-30) / 127
    padded = torch.zeros(outputs + -outputs % LANES, inputs + -inputs % (2 * PAIRS), dtype=torch.int8)
    padded[:outputs, :inputs] = (weight / scale[:, None]).round_().to(torch.int8)
    tiles = padded.view(-1, LANES, padded.shape[1] // 2, 2).transpose(1, 2).contiguous()
    return Int8Weight(tiles, _padded(scale), None if bias is None else _padded(bias.float()))


def unpack_int8(weight: Int8Weight, outputs: int, inputs: int) -> torch.Tensor:
    """float32 [outputs, inputs], the weight as it is multiplied."""
    rows = weight.tiles.transpose(1, 2).reshape(-1, 2 * weight.tiles.shape[1])
    return rows[:outputs, :inputs].float() * weight.scale[:outputs, None]


def linears_of(weights: Sequence[Int8Weight]) -> Linears:
    """Where they lie. The caller keeps them alive."""
    table = np.zeros(len(weights), LINEAR)
    for record, weight in zip(table, weights, strict=True):
        bias = _NO_BIAS if weight.bias is None else weight.bias
        record["tiles"], record["scale"], record["bias"] = weight.tiles.data_ptr(), weight.scale.data_ptr(), bias.data_ptr()
        record["bias_step"], record["blocks"], record["pairs"] = int(weight.bias is not None), *weight.tiles.shape[:2]
    return table


_NO_BIAS = torch.zeros(LANES)


def _padded(values: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, -len(values) % LANES))
