"""What `gate_up` computes, step by step."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def gate_up_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x: [rows, in]; weight: [2 · size, in], the gate's rows first; bias: [2 · size] or None. Returns [rows, size]."""
    gate, up = F.linear(x, weight, bias).chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up
