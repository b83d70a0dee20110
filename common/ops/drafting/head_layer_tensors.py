"""The tensors of one layer of a head that drafts from its target's hidden states."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True, frozen=True)
class HeadLayerTensors:
    """float32. qkv: [(heads + 2 · kv_heads) · head_dim, inputs]; qkv_bias: [its rows], or None.
    output: [hidden, heads · head_dim]. gate_up: [2 · intermediate, hidden], the gate first. down: [hidden, intermediate].
    Norms: [hidden]; input_norm, before attention, is None in an EAGLE-3 head's first layer."""

    qkv: torch.Tensor
    output: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    input_norm: torch.Tensor | None = None
    qkv_bias: torch.Tensor | None = None
