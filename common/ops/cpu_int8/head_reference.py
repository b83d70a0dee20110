"""What `head_numba` computes, in plain torch and without a cache: all pairs of one text at once."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F


class HeadWeightsReference(NamedTuple):
    """float32; see `common.models.head_weights.HeadTensors`."""

    fc: torch.Tensor
    embedding_norm: torch.Tensor
    feature_norm: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    norm: torch.Tensor
    lm_head: torch.Tensor


def head_reference(
    weights: HeadWeightsReference,
    states: torch.Tensor,
    features: torch.Tensor,
    embedded: torch.Tensor,
    *,
    head_dim: int,
    num_kv_heads: int,
    rope_theta: float,
    eps: float,
    first: int = 0,
    norm_before_residual: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """states: [known, 3 · hidden], the target's, of the first pairs; features: [pairs - known, hidden], of those behind them.
    embedded: [pairs, hidden]. first: the position of the first pair.

    Returns x' [pairs, hidden] and logits [pairs, draft_vocab].
    """
    size = (weights.fc.shape[0],)
    x = torch.cat((F.linear(states, weights.fc), features))
    both = (F.rms_norm(embedded, size, weights.embedding_norm, eps), F.rms_norm(x, size, weights.feature_norm, eps))
    x = both[1] if norm_before_residual else x
    qkv = F.linear(torch.cat(both, -1), weights.qkv).unflatten(-1, (-1, head_dim)).transpose(0, 1)
    query, key, value = qkv.split((len(qkv) - 2 * num_kv_heads, num_kv_heads, num_kv_heads))
    query, key = (_rotated(heads, rope_theta, first) for heads in (query, key))
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    x = x + F.linear(attended.transpose(0, 1).flatten(1), weights.output)
    gate, up = F.linear(F.rms_norm(x, size, weights.mlp_norm, eps), weights.gate_up).chunk(2, -1)
    x = x + F.linear(F.silu(gate) * up, weights.down)
    return x, F.linear(F.rms_norm(x, size, weights.norm, eps), weights.lm_head)


def _rotated(heads: torch.Tensor, theta: float, first: int) -> torch.Tensor:
    """heads: [heads, pairs, size], rotated half against half."""
    size = heads.shape[-1]
    positions = torch.arange(first, first + heads.shape[1], dtype=torch.float64)
    angles = torch.outer(positions, theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size))
    cos, sin = angles.cos().float(), angles.sin().float()
    low, high = heads.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
