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
