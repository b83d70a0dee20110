"""From a layer's Q, K and V projection to what attention reads: QK norm, rotation and the write into the pool, in one pass.

What comes out may be moved so that K takes 8 bits better, while attention stays the same: a vector that all keys of a head lose
adds one number to all scores of a query, which a softmax does not see, and Q and K times one orthonormal matrix have the same
products. Keys that meet in a softmax must have been written the same way, whether they are read from a pool or as they are.

For GPUs, where every pass over small tensors costs a launch. On a CPU the pieces are calls of their own (`rms_norm`,
`apply_rope`, `write_kv`).
"""

from __future__ import annotations

from typing import Literal, NamedTuple, overload

import torch

from common.ops.backend import on_device

_POOL_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


class QueryKeyValue(NamedTuple):
    """query: [rows, heads, head_dim]; key, value: [rows, kv_heads, head_dim]; contiguous, in the model's dtype."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


@overload
def qkv_rope(
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
    dtype: torch.dtype | None = None,
    kv_scale: torch.Tensor | None = None,
    k_center: torch.Tensor | None = None,
    mix: bool = False,
    need_kv: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def qkv_rope(
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
    dtype: torch.dtype | None = None,
    kv_scale: torch.Tensor | None = None,
    k_center: torch.Tensor | None = None,
    mix: bool = False,
    need_kv: Literal[True],
) -> QueryKeyValue: ...
def qkv_rope(
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
    dtype: torch.dtype | None = None,
    kv_scale: torch.Tensor | None = None,
    k_center: torch.Tensor | None = None,
    mix: bool = False,
    need_kv: bool = False,
) -> torch.Tensor | QueryKeyValue:
    """qkv: [rows, (heads + 2 · kv_heads) · head_dim] in the model's dtype, or float32 partial sums of it [splits, rows, …],
    added up first to last. bias: what is still to be added, [(heads + 2 · kv_heads) · head_dim], or None.
    positions: int32 or int64 [rows]. rope: float32 [max_positions, head_dim], contiguous; the first half of a row are cosines,
    the second sines. q_norm, k_norm: RMSNorm weights over a head [head_dim], or None (both).
    pool: see `ops.kv.paged_kv`, block_tokens a power of two; float8_e4m3fn holds value / kv_scale, saturated at ±448.
    kv_scale: float32 [layers, 2, kv_heads], contiguous; None is 1. slots: int64 [rows], block · block_tokens + offset; -1:
    nothing is written. k_center: float32 [layers, kv_heads, head_dim], contiguous, subtracted from the rotated K, or None.
    mix: Q and K, centred, are multiplied by `hadamard_reference.hadamard`. dtype: the model's; needed when `qkv` is partial
    sums and the pool is float8.

    Returns Q [rows, heads, head_dim] in the model's dtype, rotated and perhaps mixed, with `need_kv` also K, as the pool has
    it, and V. Computed in float32 and rounded once; K and V are rounded to the model's dtype before they are to float8.

    :raises ValueError: if shapes or dtypes don't fit, or on a CPU.
    """
    _, layers, _, block_tokens, kv_heads, head_dim = pool.shape
    size, rows = (num_heads + 2 * kv_heads) * head_dim, qkv.shape[-2]
    if qkv.ndim not in (2, 3) or qkv.shape[-1] != size or qkv.stride(-1) != 1:
        raise ValueError(f"qkv_rope takes [rows, {size}] or partials of it, not {list(qkv.shape)}")
    if qkv.ndim == 3 and qkv.dtype != torch.float32:
        raise ValueError(f"partial sums are float32, not {qkv.dtype}")
    if positions.shape != (rows,) or slots.shape != (rows,) or slots.dtype != torch.int64:
        raise ValueError(f"qkv_rope takes a position and an int64 slot for each of {rows} rows")
    if positions.dtype not in (torch.int32, torch.int64) or not positions.is_contiguous() or not slots.is_contiguous():
        raise ValueError("positions are int32 or int64; they and the slots are contiguous")
    if rope.ndim != 2 or rope.shape[1] != head_dim or rope.dtype != torch.float32 or not rope.is_contiguous():
        raise ValueError(f"the table of sines is float32 [positions, {head_dim}], not {rope.dtype} {list(rope.shape)}")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("Q and K are normalised both or neither")
    for name, weight, length in (("q_norm", q_norm, head_dim), ("k_norm", k_norm, head_dim), ("bias", bias, size)):
        if weight is not None and (weight.shape != (length,) or not weight.is_contiguous()):
            raise ValueError(f"{name} is [{length}], not {list(weight.shape)}")
    if pool.dtype not in _POOL_DTYPES or not pool.is_contiguous() or block_tokens & (block_tokens - 1):
        raise ValueError(f"qkv_rope writes no pool of {pool.dtype} {list(pool.shape)}")
    if not 0 <= layer < layers or head_dim % 2:
        raise ValueError(f"the pool has layers below {layers}, heads of an even size: not {layer}, {head_dim}")
    if kv_scale is not None and (kv_scale.shape != (layers, 2, kv_heads) or kv_scale.dtype != torch.float32):
        raise ValueError(f"kv_scale is float32 [{layers}, 2, {kv_heads}], not {kv_scale.dtype} {list(kv_scale.shape)}")
    if k_center is not None:
        fits = k_center.shape == (layers, kv_heads, head_dim) and k_center.dtype == torch.float32
        if not fits or not k_center.is_contiguous():
            shape = f"[{layers}, {kv_heads}, {head_dim}]"
            raise ValueError(f"k_center is float32 {shape}, contiguous, not {k_center.dtype} {list(k_center.shape)}")
    if not on_device(qkv):
        raise ValueError("qkv_rope runs on GPUs; on a CPU use rms_norm, apply_rope and write_kv")
    if dtype is None:
        dtype = qkv.dtype if qkv.ndim == 2 else pool.dtype
    if dtype not in _POOL_DTYPES[:3]:
        raise ValueError("with partial sums and a float8 pool the model's dtype must be named")
    from common.ops.kv.qkv_rope_triton import qkv_rope_triton

    query, key, value = qkv_rope_triton(
        qkv,
        num_heads=num_heads,
        positions=positions,
        rope=rope,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=eps,
        bias=bias,
        pool=pool,
        layer=layer,
        slots=slots,
        dtype=dtype,
        kv_scale=kv_scale,
        k_center=k_center,
        mix=mix,
        need_kv=need_kv,
    )
    return query if key is None or value is None else QueryKeyValue(query, key, value)
