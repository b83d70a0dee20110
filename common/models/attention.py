"""Attention of one step, from a layer's Q, K and V to what its output projection takes.

A runner makes one of these per step (on a GPU: per captured graph) and every layer calls it. What differs between a CPU and
a GPU is here: on a CPU the pieces are torch calls, on a GPU everything before attention is one kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from common.models.config import ModelConfig
from common.ops.attention.form import AttentionForm
from common.ops.attention.paged_attention import AttentionPlan, DevicePlan, paged_attention
from common.ops.kv.paged_kv import SlotMapping, write_kv
from common.ops.kv.qkv_rope import QueryKeyValue, qkv_rope
from common.ops.kv.rope import apply_rope
from common.ops.norm.rms_norm import rms_norm


class HeadNorms(Protocol):
    """Weights of the norms over Q's and K's heads (Qwen3): [head_dim] each, or None."""

    @property
    def q_norm(self) -> torch.Tensor | None: ...
    @property
    def k_norm(self) -> torch.Tensor | None: ...


class Attention(Protocol):
    def __call__(self, qkv: torch.Tensor, norms: HeadNorms, layer: int) -> torch.Tensor:
        """qkv: [tokens, (heads + 2 · kv_heads) · head_dim], or float32 partial sums of it [splits, …].

        Writes K and V into the pool. Returns [tokens, heads · head_dim].
        """
        ...


@dataclass(slots=True)
class CpuAttention:
    """pool: see `ops.kv.paged_kv`. cos, sin: [tokens, 1, head_dim], rows of a `RopeTable`."""

    config: ModelConfig
    pool: torch.Tensor
    plan: AttentionPlan
    slots: SlotMapping
    cos: torch.Tensor
    sin: torch.Tensor

    def __call__(self, qkv: torch.Tensor, norms: HeadNorms, layer: int) -> torch.Tensor:
        heads, eps = self.config.num_heads, self.config.rms_eps
        end = heads + self.config.num_kv_heads
        qkv = qkv.view(len(qkv), -1, self.config.head_dim)
        if norms.q_norm is None or norms.k_norm is None:
            rotated = apply_rope(qkv[:, :end], self.cos, self.sin)
            query, key = rotated[:, :heads], rotated[:, heads:]
        else:
            query = apply_rope(rms_norm(qkv[:, :heads], norms.q_norm, eps), self.cos, self.sin)
            key = apply_rope(rms_norm(qkv[:, heads:end], norms.k_norm, eps), self.cos, self.sin)
        write_kv(self.pool, layer, key, qkv[:, end:], self.slots)
        return paged_attention(query, self.pool, layer, self.plan, AttentionForm(self.config.head_dim**-0.5)).flatten(1)


@dataclass(slots=True)
class DeviceAttention:
    """positions: int64 [tokens]. slots: int64 [tokens], the pool's entry block · block_tokens + offset; -1 for padding.

    rope: float32 [max_positions, head_dim], cosines then sines. kv_scale: float32 [layers, 2, kv_heads] of a float8 pool, or
    None. dtype: the model's. k_center, mix: see `ops.kv.qkv_rope`; None and False but for a float8 pool.
    """

    config: ModelConfig
    pool: torch.Tensor
    plan: DevicePlan
    slots: torch.Tensor
    positions: torch.Tensor
    rope: torch.Tensor
    kv_scale: torch.Tensor | None
    dtype: torch.dtype
    k_center: torch.Tensor | None
    mix: bool

    def __call__(self, qkv: torch.Tensor, norms: HeadNorms, layer: int) -> torch.Tensor:
        made = qkv_rope(
            qkv,
            num_heads=self.config.num_heads,
            positions=self.positions,
            rope=self.rope,
            q_norm=norms.q_norm,
            k_norm=norms.k_norm,
            eps=self.config.rms_eps,
            bias=None,
            pool=self.pool,
            layer=layer,
            slots=self.slots,
            dtype=self.dtype,
            kv_scale=self.kv_scale,
            k_center=self.k_center,
            mix=self.mix,
            need_kv=self.plan.takes_kv,
        )
        query, key, value = made if isinstance(made, QueryKeyValue) else (made, None, None)
        form = AttentionForm(self.config.head_dim**-0.5)
        attended = paged_attention(query, self.pool, layer, self.plan, form, key=key, value=value, kv_scale=self.kv_scale)
        return attended.flatten(1)
