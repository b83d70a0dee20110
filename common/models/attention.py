"""Attention of one step, from a layer's Q, K and V to what its output projection takes.

A runner makes one of these per step (on a GPU: per captured graph) and every layer calls it. What differs between a CPU and
a GPU is here: on a CPU the pieces are torch calls, on a GPU everything before attention is one kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from common.models.blocks.attention import AttentionBlock
from common.models.spec import QueryTemperature, RopeSpec
from common.ops.attention.form import FormKind
from common.ops.attention.paged_attention import AttentionPlan, DevicePlan, paged_attention
from common.ops.kv.forms import KvTarget
from common.ops.kv.paged_kv import SlotMapping, write_kv
from common.ops.kv.qkv_rope import QueryKeyValue, qkv_rope
from common.ops.kv.rope import apply_rope
from common.ops.norm.rms_norm import rms_norm

Rotations = Mapping[RopeSpec, tuple[torch.Tensor, torch.Tensor]]


@dataclass(slots=True)
class CpuAttention:
    """pool: see `ops.kv.paged_kv`. positions: int64 [tokens]. rotations: of each variant, cos and sin [tokens, 1, rotated
    dimensions], rows of a `RopeTable`."""

    pool: torch.Tensor
    plan: AttentionPlan
    slots: SlotMapping
    positions: torch.Tensor
    rotations: Rotations

    def __call__(self, qkv: torch.Tensor, block: AttentionBlock, layer: int) -> torch.Tensor:
        query, key, value, _ = queries_and_keys(qkv, block, self.rotations, self.positions)
        write_kv(self.pool, layer, key, value, self.slots)
        return paged_attention(query, self.pool, layer, self.plan, block.form).flatten(1)


def queries_and_keys(
    qkv: torch.Tensor, block: AttentionBlock, rotations: Rotations, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """qkv: [tokens, (heads + 2 · kv_heads) · head_dim]. positions: int64 [tokens].

    Returns Q [tokens, heads, head_dim], K and V [tokens, kv_heads, head_dim], and K before its rotation.
    """
    spec, eps = block.spec, block.heads.eps
    end = spec.num_heads + spec.num_kv_heads
    if block.q_norm is not None and block.k_norm is not None and spec.qk_norm == "projection":
        query, key, value = qkv.split((spec.query_size, spec.kv_size, spec.kv_size), -1)
        qkv = torch.cat((rms_norm(query, block.q_norm, eps), rms_norm(key, block.k_norm, eps), value), -1)
    qkv = qkv.view(len(qkv), -1, spec.head_dim)
    query, key, value = qkv[:, : spec.num_heads], qkv[:, spec.num_heads : end], qkv[:, end:]
    if block.q_norm is not None and block.k_norm is not None and spec.qk_norm == "head":
        query, unrotated = rms_norm(query, block.q_norm, eps), rms_norm(key, block.k_norm, eps)
        query, key = _rotated(query, spec.rope, rotations), _rotated(unrotated, spec.rope, rotations)
    else:
        unrotated, both = key, _rotated(qkv[:, :end], spec.rope, rotations)
        query, key = both[:, : spec.num_heads], both[:, spec.num_heads :]
    if spec.qk_norm == "l2":
        query, key = (F.rms_norm(x, (spec.head_dim,), eps=eps) for x in (query, key))
    if spec.temperature is not None:
        query = query * _temperatures(spec.temperature, positions).to(query.dtype)
    return query, key, value, unrotated


def _rotated(x: torch.Tensor, rope: RopeSpec | None, rotations: Rotations) -> torch.Tensor:
    """x: [tokens, heads, head_dim]. Interleaved pairs are brought into halves, in Q and K alike, and stay there."""
    if rope is None:
        return x
    cos, sin = rotations[rope]
    turned = x[..., : rope.dims] if rope.dims else x
    if rope.interleaved:
        turned = turned.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    turned = apply_rope(turned, cos, sin)
    return torch.cat((turned, x[..., rope.dims :]), -1) if rope.dims else turned


def _temperatures(temperature: QueryTemperature, positions: torch.Tensor) -> torch.Tensor:
    """float32 [tokens, 1, 1]."""
    steps = torch.floor((positions.float() + temperature.shift) / temperature.floor)
    return (torch.log1p(steps) * temperature.scale + 1.0)[:, None, None]


@dataclass(slots=True)
class DeviceAttention:
    """Of layers that keep KV in one pool; `layer` is a layer's place there.

    target: the pool, and the step's slots. plans: of each kind of form among the layers. positions: int64 [tokens]. ropes: of
    each variant, float32 [max_positions, rotated dimensions], cosines then sines. dtype: the model's.
    """

    target: KvTarget
    plans: Mapping[FormKind, DevicePlan]
    positions: torch.Tensor
    ropes: Mapping[RopeSpec, torch.Tensor]
    dtype: torch.dtype

    def __call__(self, qkv: torch.Tensor, block: AttentionBlock, layer: int) -> torch.Tensor:
        plan, rope = self.plans[block.form.kind], block.spec.rope
        if block.spec.qk_norm == "projection":
            qkv = self._normed(qkv, block)
        made = qkv_rope(
            qkv,
            block.heads,
            self.target,
            layer,
            positions=self.positions,
            rope=None if rope is None else self.ropes[rope],
            dtype=self.dtype,
            need_kv=plan.takes_kv,
        )
        query, key, value = made if isinstance(made, QueryKeyValue) else (made, None, None)
        attended = paged_attention(
            query, self.target.pool, layer, plan, block.form, key=key, value=value, kv_scale=self.target.kv_scale
        )
        return attended.flatten(1)

    def _normed(self, qkv: torch.Tensor, block: AttentionBlock) -> torch.Tensor:
        """Norms over the whole of Q and K."""
        assert block.q_norm is not None and block.k_norm is not None
        spec, eps = block.spec, block.heads.eps
        query, key, value = qkv.split((spec.query_size, spec.kv_size, spec.kv_size), -1)
        return torch.cat((rms_norm(query, block.q_norm, eps), rms_norm(key, block.k_norm, eps), value), -1)
