"""Rotary positions over whole heads, first half rotated against second (`rotate_half`)."""

from __future__ import annotations

import torch


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [tokens, heads, head_dim]. cos, sin: [tokens, 1, head_dim] in x's dtype, rows of a `RopeTable`: the sine of the
    first half is negated there, so that rotating is two products and one sum. Returns a new tensor like `x`.

    :raises ValueError: if the shapes don't fit.
    """
    if x.ndim != 3 or cos.shape != (x.shape[0], 1, x.shape[2]) or sin.shape != cos.shape:
        raise ValueError(
            f"rope takes x [tokens, heads, dim] and cos, sin [tokens, 1, dim], not {list(x.shape)}, {list(cos.shape)}"
        )
    rotated = torch.roll(x, x.shape[2] // 2, dims=-1)
    return (x * cos).add_(rotated.mul_(sin))
