"""What happens to a layer's Q and K before attention, and where its K and V are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class Temperature(NamedTuple):
    """A query at position p is multiplied by 1 + scale · ln(1 + ⌊(p + shift) / floor⌋) (arXiv 2501.19399)."""

    scale: float
    floor: float
    shift: float


@dataclass(frozen=True, slots=True)
class HeadForm:
    """Norms and rotation of a layer's Q and K. Norms come first, each over one head.

    num_heads: of queries. eps: of the norms.
    q_norm, k_norm: RMSNorm weights [head_dim], or None (both).
    without_weights: Q and K have an RMSNorm without weights instead. It commutes with the rotation.
    rotated: leading dimensions of a head that are rotated; None for all, 0 for no positions.
    interleaved: neighbouring dimensions turn against each other, instead of the halves of what is rotated. They leave as
        halves, in Q and K alike, which no score sees.
    temperature: factor of the queries, or None.
    """

    num_heads: int
    eps: float
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    without_weights: bool = False
    rotated: int | None = None
    interleaved: bool = False
    temperature: Temperature | None = None

    def num_rotated(self, head_dim: int) -> int:
        """Return how many dimensions of a head are rotated."""
        return head_dim if self.rotated is None else self.rotated

    def check(self, head_dim: int) -> None:
        """:raises ValueError: if this does not fit heads of `head_dim`."""
        if (self.q_norm is None) != (self.k_norm is None) or (self.without_weights and self.q_norm is not None):
            raise ValueError("Q and K are normalised both or neither, with weights or without")
        for name, weight in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if weight is not None and (weight.shape != (head_dim,) or not weight.is_contiguous()):
                raise ValueError(f"{name} is [{head_dim}], not {list(weight.shape)}")
        rotated = self.num_rotated(head_dim)
        if head_dim % 2 or not 0 <= rotated <= head_dim or rotated % 2:
            raise ValueError(f"an even part of an even head is rotated, not {rotated} of {head_dim} dimensions")
        if self.interleaved and not rotated:
            raise ValueError("interleaved dimensions are rotated")


@dataclass(frozen=True, slots=True)
class KvTarget:
    """A pool, and how a step's K and V are written there.

    pool: see `ops.kv.paged_kv`, block_tokens a power of two; float8_e4m3fn holds value / kv_scale, saturated at ±448.
    slots: int64 [rows], block · block_tokens + offset; -1: nothing is written.
    kv_scale: float32 [layers, 2, kv_heads], contiguous; None is 1.
    k_center: float32 [layers, kv_heads, head_dim], contiguous, subtracted from the rotated K; None for nothing.
    mix: Q and K, centred, are multiplied by `hadamard_reference.hadamard`.
    batch_invariant: whether a row is computed in the same way whatever rows come with it, at a cost.
    """

    pool: torch.Tensor
    slots: torch.Tensor
    kv_scale: torch.Tensor | None = None
    k_center: torch.Tensor | None = None
    mix: bool = False
    batch_invariant: bool = False

    def check(self, rows: int, layer: int) -> None:
        """:raises ValueError: if the tensors don't fit each other, a step of `rows` tokens, or the layer."""
        pool, slots, kv_scale, k_center = self.pool, self.slots, self.kv_scale, self.k_center
        _, layers, _, block_tokens, kv_heads, head_dim = pool.shape
        if slots.shape != (rows,) or slots.dtype != torch.int64 or not slots.is_contiguous():
            raise ValueError(f"each of {rows} rows has an int64 slot, contiguous")
        if pool.dtype not in POOL_DTYPES or not pool.is_contiguous() or block_tokens & (block_tokens - 1):
            raise ValueError(f"qkv_rope writes no pool of {pool.dtype} {list(pool.shape)}")
        if not 0 <= layer < layers:
            raise ValueError(f"the pool has layers below {layers}, not {layer}")
        if kv_scale is not None and (kv_scale.shape != (layers, 2, kv_heads) or kv_scale.dtype != torch.float32):
            raise ValueError(f"kv_scale is float32 [{layers}, 2, {kv_heads}], not {kv_scale.dtype} {list(kv_scale.shape)}")
        if k_center is not None:
            fits = k_center.shape == (layers, kv_heads, head_dim) and k_center.dtype == torch.float32
            if not fits or not k_center.is_contiguous():
                shape = f"[{layers}, {kv_heads}, {head_dim}]"
                raise ValueError(f"k_center is float32 {shape}, contiguous, not {k_center.dtype} {list(k_center.shape)}")


POOL_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
