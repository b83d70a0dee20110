"""What `silu_mul` computes, step by step."""

from __future__ import annotations

import torch


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up: [rows, 2 · size]."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)
