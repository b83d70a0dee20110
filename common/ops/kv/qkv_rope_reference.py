"""What `qkv_rope` computes, step by step."""

from __future__ import annotations

import torch

from common.ops.kv.hadamard_reference import hadamard
from common.ops.norm.rms_norm_reference import rms_norm_reference


def qkv_rope_reference(
    qkv: torch.Tensor,
    *,
    num_heads: int,
    positions: torch.Tensor,
    rope: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    bias: torch.Tensor | None,
    pool: torch.Tensor,
    layer: int,
    slots: torch.Tensor,
    dtype: torch.dtype,
    kv_scale: torch.Tensor | None = None,
    k_center: torch.Tensor | None = None,
    mix: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `qkv_rope`: writes into the pool; returns Q, K and V in `dtype`."""
    _, _, _, block_tokens, kv_heads, head_dim = pool.shape
    total = torch.zeros(qkv.shape[-2:])
    for partial in qkv if qkv.ndim == 3 else qkv[None]:
        total = total + partial.float()
    if bias is not None:
        total = total + bias.float()
    query, key, value = total.view(len(total), -1, head_dim).split((num_heads, kv_heads, kv_heads), dim=1)
    if q_norm is not None and k_norm is not None:
        query, key = rms_norm_reference(query, q_norm, eps), rms_norm_reference(key, k_norm, eps)
    half = head_dim // 2
    cos, sin = rope[positions.long()][:, None].split(half, dim=-1)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        first, second = x[..., :half], x[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    query, key = rotated(query), rotated(key)
    if k_center is not None:
        key = key - k_center[layer]
    if mix:
        query, key = query @ hadamard(head_dim), key @ hadamard(head_dim)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    for index, entries in enumerate((key, value)):
        stored = entries.float()
        if kv_scale is not None:
            stored = stored / kv_scale[layer, index][:, None]
        if pool.dtype == torch.float8_e4m3fn:
            stored = stored.clamp(-448.0, 448.0)
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                pool[slot // block_tokens, layer, index, slot % block_tokens] = stored[row].to(pool.dtype)
    return query, key, value
