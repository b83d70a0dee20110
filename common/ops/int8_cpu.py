"""Linears with 8-bit weights on a CPU, and the norm and the gate that hand them their activations; see `int8_numba`.

Activations travel as `Quantised`: int16 data of 14 bits, one float32 scale per row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from common.ops.tensors import Quantised

LARGEST = 8191
"""The largest activation; so small that 2048 products with weights of up to 127 fit into 32 bits."""

LANES = 16
"""Outputs that are computed together."""


def pack_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight: floating [outputs, inputs]. Returns it in tiles, int8 [⌈outputs / 16⌉, ⌈inputs / 2⌉, 16, 2], and the scales of
    its outputs, float32 [outputs]: weight ≈ integer · scale, rounded to nearest."""
    outputs, inputs = weight.shape
    weight = weight.float()
    scale = weight.abs().amax(1).clamp_min(1e-30) / 127
    padded = torch.zeros(-(-outputs // LANES) * LANES, -(-inputs // 2) * 2, dtype=torch.int8)
    padded[:outputs, :inputs] = (weight / scale[:, None]).round_().to(torch.int8)
    tiles = padded.view(-1, LANES, padded.shape[1] // 2, 2).transpose(1, 2).contiguous()
    return tiles, scale


def unpack_int8(tiles: torch.Tensor, scale: torch.Tensor, inputs: int) -> torch.Tensor:
    """float32 [outputs, inputs], the weight as it is multiplied."""
    rows = tiles.transpose(1, 2).reshape(-1, 2 * tiles.shape[1])
    return rows[: len(scale), :inputs].float() * scale[:, None]


def quantise_int(x: torch.Tensor) -> Quantised:
    """x: float32 [rows, size]."""
    from common.ops import int8_numba

    made = _room(x.shape[0], x.shape[1])
    int8_numba.quantise(x.contiguous().numpy(), made.data.numpy(), made.scale.numpy())
    return made


class Int8Arrays(NamedTuple):
    """A packed weight as numpy sees it: tiles and scale as of `pack_int8`, bias float32 [outputs] or [0]."""

    tiles: NDArray[np.int8]
    scale: NDArray[np.float32]
    bias: NDArray[np.float32]

    @classmethod
    def of(cls, tiles: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> Int8Arrays:
        return cls(tiles.numpy(), scale.numpy(), (_NOTHING if bias is None else bias).numpy())


def linear_int8(x: torch.Tensor | Quantised, weight: Int8Arrays) -> torch.Tensor:
    """x: float32 [rows, inputs], or quantised by one of these. Returns float32 [rows, outputs]."""
    from common.ops import int8_numba

    quantised = x if isinstance(x, Quantised) else quantise_int(x)
    data = quantised.data.numpy()
    out = np.empty((data.shape[0], len(weight.scale)), np.float32)
    int8_numba.multiply(data, quantised.scale.numpy(), weight.tiles, weight.scale, weight.bias, out)
    return torch.from_numpy(out)


def add_rms_norm_int8(residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> Quantised:
    """As `add_rms_norm`, in float32, with its result quantised for `linear_int8`."""
    from common.ops import int8_numba

    made = _room(*residual.shape)
    added = _NOTHING.view(0, 0) if delta is None else delta
    int8_numba.add_norm_quantise(residual.numpy(), added.numpy(), weight.numpy(), eps, made.data.numpy(), made.scale.numpy())
    return made


def gate_int8(both: torch.Tensor) -> Quantised:
    """both: float32 [rows, 2 · size], gate and up. Returns silu(gate) · up, quantised for `linear_int8`."""
    from common.ops import int8_numba

    made = _room(both.shape[0], both.shape[1] // 2)
    int8_numba.gate_quantise(both.numpy(), made.data.numpy(), made.scale.numpy())
    return made


_NOTHING = torch.empty(0)


def _room(rows: int, size: int) -> Quantised:
    return Quantised(torch.empty(rows, size + size % 2, dtype=torch.int16), torch.empty(rows))
