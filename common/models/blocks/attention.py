"""The mixer of grouped-query attention: full, windowed or chunked, with or without positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from common.models.blocks.border import Border, Norms
from common.models.blocks.loading import take_fused, take_norm, take_norms
from common.models.blocks.shards import ShardRule
from common.models.spec import AttentionSpec, ModelSpec
from common.models.weights.base import WeightLoader
from common.ops.attention.form import AttentionForm
from common.ops.kv.forms import HeadForm, Temperature
from common.ops.linear.linear import linear
from common.ops.linear.weight import LinearWeight


@dataclass(slots=True, frozen=True)
class AttentionBlock:
    """qkv: the fused projections. q_norm, k_norm: [head_dim], or of the whole projection; None for none. heads: what happens
    to Q and K of each head; its norms are over single heads only.

    Its cache component: K and V of `spec.num_kv_heads` heads of `spec.head_dim` numbers each, kept as `spec.retention` says.
    """

    spec: AttentionSpec
    form: AttentionForm
    heads: HeadForm
    norms: Norms
    qkv: LinearWeight
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: LinearWeight

    def forward(self, border: Border, attention: Attention, layer: int, samples: torch.Tensor | None) -> Border:
        """Writes K and V of layer `layer`. samples: int64, the tokens that go on; None for all."""
        x = border.read(self.norms, self.qkv)
        partial = self.spec.qk_norm != "projection"  # which is over sums of all parts
        attended = attention(linear(x, self.qkv, split=partial), self, layer)
        if samples is not None:
            border = border.select(samples)
            if not len(samples):  # the middle of a prompt: only its K and V were wanted
                return border
            attended = attended.index_select(0, samples)
        else:
            border = Border(border.residual)
        return border.leave_linear(attended, self.output, self.norms)


class Attention(Protocol):
    """Attention of a step; `common.models.attention` has one for CPUs and one for GPUs."""

    def __call__(self, qkv: torch.Tensor, block: AttentionBlock, layer: int) -> torch.Tensor:
        """qkv: [tokens, (heads + 2 · kv_heads) · head_dim], or float32 partial sums of it [splits, …].

        Writes K and V into the pool. Returns [tokens, heads · head_dim].
        """
        ...


def shards(spec: AttentionSpec) -> dict[str, ShardRule]:
    """Return how each weight is cut. So is a norm over the whole projection, whose mean square is that of all ranks' heads."""
    norm: ShardRule = "heads" if spec.qk_norm == "projection" else "replicated"
    return {"norms": "replicated", "qkv": "heads", "q_norm": norm, "k_norm": norm, "sinks": "heads", "output": "inputs"}


def load_attention(loader: WeightLoader, model: ModelSpec, layer: int) -> AttentionBlock:
    """:raises WeightsError: if the weights don't fit."""
    spec, names, prefix = model.layers[layer].mixer, model.names.layer, f"{model.names.layers}.{layer}"
    per_head = spec.qk_norm == "head"
    q_norm = k_norm = sinks = None
    norms = take_norms(loader, model, prefix, names.mixer_norms)
    sizes = (spec.query_size, spec.kv_size, spec.kv_size)
    qkv = take_fused(loader, prefix, names.qkv, sizes, model.hidden_size, spec.qkv_bias)
    if spec.qk_norm in ("head", "projection"):
        q_norm = take_norm(loader, model, f"{prefix}.{names.q_norm}", spec.head_dim if per_head else spec.query_size)
        k_norm = take_norm(loader, model, f"{prefix}.{names.k_norm}", spec.head_dim if per_head else spec.kv_size)
    if spec.sinks:
        sinks = loader.take(f"{prefix}.{names.sinks}", spec.num_heads, dtype=torch.float32)
    return AttentionBlock(
        spec=spec,
        heads=_head_form(spec, model.rms_eps, q_norm if per_head else None, k_norm if per_head else None),
        form=AttentionForm(spec.scale, window=spec.window, chunk=spec.chunk, soft_cap=spec.soft_cap, sinks=sinks),
        norms=norms,
        qkv=qkv,
        q_norm=q_norm,
        k_norm=k_norm,
        output=take_fused(loader, prefix, (names.output,), (model.hidden_size,), spec.query_size, spec.output_bias),
    )


def _head_form(spec: AttentionSpec, eps: float, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None) -> HeadForm:
    temperature = spec.temperature
    return HeadForm(
        num_heads=spec.num_heads,
        eps=eps,
        q_norm=q_norm,
        k_norm=k_norm,
        without_weights=spec.qk_norm == "l2",
        rotated=0 if spec.rope is None else spec.rope.dims or None,
        interleaved=spec.rope is not None and spec.rope.interleaved,
        temperature=None if temperature is None else Temperature(temperature.scale, temperature.floor, temperature.shift),
    )
