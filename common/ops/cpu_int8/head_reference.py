"""What `head_numba` computes, in plain torch and without a cache: all pairs of one text at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from common.ops.drafting.head_layer_tensors import HeadLayerTensors


class HeadWeightsReference(NamedTuple):
    """float32; see `common.models.head_weights.HeadTensors`."""

    fc: torch.Tensor
    embedding_norm: torch.Tensor
    feature_norm: torch.Tensor
    layers: Sequence[HeadLayerTensors]
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
    is_mtp: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """states: [known, layers · hidden], the target's, of the first pairs; features: [pairs - known, hidden], of those behind
    them. embedded: [pairs, hidden]. first: the position of the first pair. is_mtp: a layer for multi-token prediction, not
    EAGLE-3's.

    Returns the features behind the pairs [pairs, hidden] and logits [pairs, draft_vocab].
    """
    size = (weights.fc.shape[0],)

    def normed(x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        return F.rms_norm(x, size, norm, eps)

    if is_mtp:
        halves = normed(torch.cat((states, features)), weights.feature_norm), normed(embedded, weights.embedding_norm)
        x = F.linear(torch.cat(halves, -1), weights.fc)
        inputs = normed(x, weights.layers[0].input_norm)
    else:
        x = torch.cat((F.linear(states, weights.fc), features))
        halves = normed(embedded, weights.embedding_norm), normed(x, weights.feature_norm)
        x = halves[1] if norm_before_residual else x
        inputs = torch.cat(halves, -1)
    for number, layer in enumerate(weights.layers):
        if number:
            inputs = normed(x, layer.input_norm)
        qkv = F.linear(inputs, layer.qkv, layer.qkv_bias).unflatten(-1, (-1, head_dim)).transpose(0, 1)
        query, key, value = qkv.split((len(qkv) - 2 * num_kv_heads, num_kv_heads, num_kv_heads))
        query, key = (_rotated(heads, rope_theta, first) for heads in (query, key))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + F.linear(attended.transpose(0, 1).flatten(1), layer.output)
        gate, up = F.linear(normed(x, layer.mlp_norm), layer.gate_up).chunk(2, -1)
        x = x + F.linear(F.silu(gate) * up, layer.down)
    last = normed(x, weights.norm)
    return last if is_mtp else x, F.linear(last, weights.lm_head)


def _rotated(heads: torch.Tensor, theta: float, first: int) -> torch.Tensor:
    """heads: [heads, pairs, size], rotated half against half."""
    size = heads.shape[-1]
    positions = torch.arange(first, first + heads.shape[1], dtype=torch.float64)
    angles = torch.outer(positions, theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size))
    cos, sin = angles.cos().float(), angles.sin().float()
    low, high = heads.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)
