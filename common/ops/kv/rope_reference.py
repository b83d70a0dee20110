"""What `apply_rope` computes, as the papers write it (arXiv 2104.09864; halves as in GPT-NeoX)."""

from __future__ import annotations

import torch


def apply_rope_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [tokens, heads, head_dim]; cos, sin: as for `apply_rope`."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    c, s = cos[..., half:], sin[..., half:]
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1)
