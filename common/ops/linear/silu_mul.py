"""The SwiGLU gate: silu(gate) · up (arXiv 2002.05202)."""

from __future__ import annotations

import torch


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up: [rows, 2 · size], the gate first. Returns [rows, size].

    The exponential is rounded from float64: torch computes the last few numbers of a thread's share with another function
    than the others, and the two differ in float32.

    :raises ValueError: if the last dimension has no halves.
    """
    if gate_up.ndim != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"silu_mul takes [rows, 2 * size], not {list(gate_up.shape)}")
    size = gate_up.shape[1] // 2
    gate = gate_up[:, :size]
    gated = gate.float() / gate.double().neg_().exp_().add_(1).float()
    return gated.to(gate_up.dtype).mul_(gate_up[:, size:])
