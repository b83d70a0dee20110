"""What ops hand to each other besides plain tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Quantised(NamedTuple):
    """x ≈ data · scale. data: float8_e4m3fn [rows, size], contiguous; scale: float32 [rows]."""

    data: torch.Tensor
    scale: torch.Tensor


Activation = torch.Tensor | Quantised
"""[rows, size] in the model's dtype, or quantised row by row."""


class Feed(NamedTuple):
    """Token i is sampled[places[i]] where places[i] >= 0. places: int64 [tokens]; sampled: int64, of the step before."""

    places: torch.Tensor
    sampled: torch.Tensor
