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
from common.ops.kv.forms import POOL_DTYPES, HeadForm, KvTarget


class QueryKeyValue(NamedTuple):
    """query: [rows, heads, head_dim]; key, value: [rows, kv_heads, head_dim]; contiguous, in the model's dtype."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


@overload
def qkv_rope(
    qkv: torch.Tensor,
    form: HeadForm,
    target: KvTarget,
    layer: int,
    *,
    positions: torch.Tensor,
    rope: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    need_kv: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def qkv_rope(
    qkv: torch.Tensor,
    form: HeadForm,
    target: KvTarget,
    layer: int,
    *,
    positions: torch.Tensor,
    rope: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    need_kv: Literal[True],
) -> QueryKeyValue: ...
def qkv_rope(
    qkv: torch.Tensor,
    form: HeadForm,
    target: KvTarget,
    layer: int,
    *,
    positions: torch.Tensor,
    rope: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    need_kv: bool = False,
) -> torch.Tensor | QueryKeyValue:
    """qkv: [rows, (heads + 2 · kv_heads) · head_dim] in the model's dtype, or float32 partial sums of it [splits, rows, …],
    added up first to last. layer: in the target's pool.
    positions: int32 or int64 [rows]. rope: float32 [max_positions, rotated], contiguous; the first half of a row are cosines,
    the second sines; None where nothing is rotated.
    bias: what is still to be added, [(heads + 2 · kv_heads) · head_dim], or None.
    dtype: the model's; needed when `qkv` is partial sums and the pool is float8.

    Returns Q [rows, heads, head_dim] in the model's dtype, rotated and perhaps mixed, with `need_kv` also K, as the pool has
    it, and V. Computed in float32 and rounded once; K and V are rounded to the model's dtype before they are to float8.

    :raises ValueError: if shapes or dtypes don't fit, or on a CPU.
    """
    pool = target.pool
    kv_heads, head_dim = pool.shape[4:]
    size, rows = (form.num_heads + 2 * kv_heads) * head_dim, qkv.shape[-2]
    if qkv.ndim not in (2, 3) or qkv.shape[-1] != size or qkv.stride(-1) != 1:
        raise ValueError(f"qkv_rope takes [rows, {size}] or partials of it, not {list(qkv.shape)}")
    if qkv.ndim == 3 and qkv.dtype != torch.float32:
        raise ValueError(f"partial sums are float32, not {qkv.dtype}")
    target.check(rows, layer)
    form.check(head_dim)
    if positions.shape != (rows,) or positions.dtype not in (torch.int32, torch.int64) or not positions.is_contiguous():
        raise ValueError(f"positions are int32 or int64 [{rows}], contiguous")
    rotated = form.num_rotated(head_dim)
    if (rope is None) != (rotated == 0):
        raise ValueError(f"{rotated} dimensions are rotated by {'no' if rope is None else 'a'} table of sines")
    if rope is not None and (rope.shape[1:] != (rotated,) or rope.dtype != torch.float32 or not rope.is_contiguous()):
        raise ValueError(f"the table of sines is float32 [positions, {rotated}], not {rope.dtype} {list(rope.shape)}")
    if bias is not None and (bias.shape != (size,) or not bias.is_contiguous()):
        raise ValueError(f"bias is [{size}], not {list(bias.shape)}")
    if not on_device(qkv):
        raise ValueError("qkv_rope runs on GPUs; on a CPU use rms_norm, apply_rope and write_kv")
    if dtype is None:
        dtype = qkv.dtype if qkv.ndim == 2 else pool.dtype
    if dtype not in POOL_DTYPES[:3]:
        raise ValueError("with partial sums and a float8 pool the model's dtype must be named")
    from common.ops.kv.qkv_rope_triton import qkv_rope_triton

    query, key, value = qkv_rope_triton(
        qkv, form, target, layer, positions=positions, rope=rope, bias=bias, dtype=dtype, need_kv=need_kv
    )
    return query if key is None or value is None else QueryKeyValue(query, key, value)
