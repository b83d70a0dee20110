"""What `qkv_rope` computes, step by step."""

from __future__ import annotations

import torch

from common.ops.kv.forms import HeadForm, KvTarget
from common.ops.kv.hadamard_reference import hadamard
from common.ops.norm.rms_norm_reference import rms_norm_reference


def qkv_rope_reference(
    qkv: torch.Tensor,
    form: HeadForm,
    target: KvTarget,
    layer: int,
    *,
    positions: torch.Tensor,
    rope: torch.Tensor | None,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `qkv_rope`: writes into the pool; returns Q, K and V in `dtype`."""
    pool = target.pool
    _, _, _, block_tokens, kv_heads, head_dim = pool.shape
    total = torch.zeros(qkv.shape[-2:])
    for partial in qkv if qkv.ndim == 3 else qkv[None]:
        total = total + partial.float()
    if bias is not None:
        total = total + bias.float()
    query, key, value = total.view(len(total), -1, head_dim).split((form.num_heads, kv_heads, kv_heads), dim=1)
    if form.q_norm is not None and form.k_norm is not None:
        query = rms_norm_reference(query, form.q_norm, form.eps)
        key = rms_norm_reference(key, form.k_norm, form.eps)
    if rope is not None:
        cos, sin = rope[positions.long()][:, None].chunk(2, dim=-1)
        query, key = (_rotated(x, cos, sin, form) for x in (query, key))
    if form.without_weights:
        query, key = (rms_norm_reference(x, torch.ones(head_dim), form.eps) for x in (query, key))
    if form.temperature is not None:
        steps = torch.floor((positions.float() + form.temperature.shift) / form.temperature.floor)
        query = query * (1 + form.temperature.scale * torch.log1p(steps))[:, None, None]
    if target.k_center is not None:
        key = key - target.k_center[layer]
    if target.mix:
        query, key = (_mixed(x, form.num_rotated(head_dim)) for x in (query, key))
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    for index, entries in enumerate((key, value)):
        stored = entries.float()
        if target.kv_scale is not None:
            stored = stored / target.kv_scale[layer, index][:, None]
        if pool.dtype == torch.float8_e4m3fn:
            stored = stored.clamp(-448.0, 448.0)
        for row, slot in enumerate(target.slots.tolist()):
            if slot >= 0:
                pool[slot // block_tokens, layer, index, slot % block_tokens] = stored[row].to(pool.dtype)
    return query, key, value


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, form: HeadForm) -> torch.Tensor:
    """x: [rows, heads, head_dim]; cos, sin: [rows, 1, rotated / 2]."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    if form.interleaved:
        first, second = x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def _mixed(x: torch.Tensor, rotated: int) -> torch.Tensor:
    """The matrix meets a head with its pairs half a head apart: first those that are rotated, then the others."""
    turned, rest = x[..., :rotated].chunk(2, -1), x[..., rotated:].chunk(2, -1)
    ordered = torch.cat((turned[0], rest[0], turned[1], rest[1]), -1) @ hadamard(x.shape[-1])
    sizes = (turned[0].shape[-1], rest[0].shape[-1], turned[1].shape[-1], rest[1].shape[-1])
    one, two, three, four = ordered.split(sizes, -1)
    return torch.cat((one, three, two, four), -1)
