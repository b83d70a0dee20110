"""`experts` in plain torch, from whole weights, every expert for every token."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from common.ops.moe.form import ExpertActivation, Routing


def activate_reference(middle: torch.Tensor, activation: ExpertActivation) -> torch.Tensor:
    """middle: [rows, 2 * intermediate], gate before up. Returns [rows, intermediate].

    Activations are rounded from float64: torch computes the last few numbers of a thread's share with another function than the
    others, and the two differ in float32.
    """
    gate, up = middle.chunk(2, dim=-1)
    if activation.kind == "clamped_swiglu":
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
        return (up + 1) * gate * torch.sigmoid((activation.alpha * gate).double()).to(gate.dtype)
    wide = gate.double()
    return (F.silu(wide) if activation.kind == "silu" else F.gelu(wide, approximate="tanh")).to(gate.dtype) * up


def experts_reference(
    x: torch.Tensor,
    routing: Routing,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: ExpertActivation,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    weigh_inputs: bool = False,
) -> torch.Tensor:
    """x: [rows, hidden]. gate_up: [experts, 2 * intermediate, hidden]; down: [experts, hidden, intermediate]; biases: [experts,
    …]. Returns [rows, hidden]. See `experts`."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for rank in range(routing.ids.shape[1]):
        chosen, weight = routing.ids[:, rank].long(), routing.weights[:, rank, None]
        given = x.float() * weight if weigh_inputs else x.float()
        middle = torch.einsum("rh,rih->ri", given, gate_up[chosen].float())
        if gate_up_bias is not None:
            middle = middle + gate_up_bias[chosen].float()
        y = torch.einsum("ri,rhi->rh", activate_reference(middle, activation), down[chosen].float())
        if down_bias is not None:
            y = y + down_bias[chosen].float()
        total += y if weigh_inputs else y * weight
    return total.to(x.dtype)
