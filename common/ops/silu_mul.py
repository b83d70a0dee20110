"""The SwiGLU gate: silu(gate) · up (arXiv 2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up: [rows, 2 · size], the gate first. Returns [rows, size].

    :raises ValueError: if the last dimension has no halves.
    """
    if gate_up.ndim != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"silu_mul takes [rows, 2 * size], not {list(gate_up.shape)}")
    size = gate_up.shape[1] // 2
    return F.silu(gate_up[:, :size]).mul_(gate_up[:, size:])
