"""Sums, bias, QK norm, rotation, centring, mixing and the write into the pool: one program per row and group of heads.

A head is two tiles, because rotation pairs elements: those half a head apart, or as `_pairs` finds them. Groups hold heads of
one kind, Q, K or V, so that what a program does is one branch.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from common.ops import backend
from common.ops.kv.forms import HeadForm, KvTarget
from common.ops.kv.hadamard_triton import hadamard_mixed
from common.ops.loads_triton import AT_ONCE, held, loads_begun
from common.ops.sizes import cdiv, next_power_of_2

FEW_ROWS_WARPS = 1
"""Warps of a program: many small ones, so that one row still uses a dozen multiprocessors."""
MANY_ROWS_WARPS = 4
"""Fewer programs where there are enough."""
MANY_ROWS = 256
MIXED_WARPS = 2
"""As many, where channels are mixed, which takes registers."""
CANDIDATES = (1, 2, 4, 8)


def choose(rows: int, *, mix: bool, batch_invariant: bool) -> int:
    """Return the warps of a program."""
    if rows < MANY_ROWS or batch_invariant:
        return FEW_ROWS_WARPS
    return MIXED_WARPS if mix else MANY_ROWS_WARPS


@triton.jit
def _summed(places, apart, split_stride, mask, bias_first, bias_second, SPLITS: tl.constexpr, PDL: tl.constexpr):
    """Both tiles, `apart` in memory, added up first to last; a few splits are read at once."""
    first, second = 0.0, 0.0
    for begin in tl.static_range(0, SPLITS, AT_ONCE):
        firsts, seconds = (), ()
        for split in tl.static_range(begin, min(begin + AT_ONCE, SPLITS)):
            place = places + tl.full((), split, tl.int64) * split_stride
            firsts += (tl.load(place, mask=mask, other=0.0).to(tl.float32),)
            seconds += (tl.load(place + apart, mask=mask, other=0.0).to(tl.float32),)
        zero = loads_begun(PDL and SPLITS > 1)
        part_first = held(firsts[0], zero, PDL and SPLITS > 1)
        part_second = held(seconds[0], zero, PDL and SPLITS > 1)
        first = part_first if begin == 0 else first + part_first
        second = part_second if begin == 0 else second + part_second
        for split in tl.static_range(1, min(AT_ONCE, SPLITS - begin)):
            first += firsts[split]
            second += seconds[split]
    if bias_first is not None:
        first += bias_first
        second += bias_second
    return first, second


@triton.jit
def _pairs(columns, HEAD_DIM: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, IS_TARGET: tl.constexpr):
    """The element of a head that each column of the first tile holds, and how far on the second tile's is.

    Behind what is rotated lie pairs that are not. Interleaved pairs are read as such and written as halves (IS_TARGET).
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    PAIRS: tl.constexpr = ROTATED // 2
    place, apart = columns, PAIRS if ROTATED > 0 else HALF
    if INTERLEAVED and not IS_TARGET:
        place, apart = columns * 2, 1
    if ROTATED > 0 and ROTATED < HEAD_DIM:
        turned = columns < PAIRS
        place, apart = tl.where(turned, place, columns + PAIRS), tl.where(turned, apart, HALF - PAIRS)
    return place, apart


@triton.jit
def _normed(first, second, gain_first, gain_second, eps, HEAD_DIM: tl.constexpr):
    """RMSNorm over heads; tiles [heads, half]."""
    squares = tl.sum(first * first + second * second, axis=1)
    inverse = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
    first *= inverse
    second *= inverse
    if gain_first is not None:
        first *= gain_first
        second *= gain_second
    return first, second


@triton.jit
def _for_pool(tile, inverse_scale, DTYPE: tl.constexpr, held: tl.constexpr):
    """The tile, rounded to the model's dtype, in the dtype that the pool holds."""
    tile = tile.to(DTYPE).to(tl.float32)
    if inverse_scale is not None:
        tile = tile * inverse_scale
    return tile.to(held)  # to float8 it saturates, and NaN stays NaN


@triton.jit(do_not_specialize=["layer"])
def qkv_rope_kernel(
    qkv,  # [SPLITS, rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM]
    positions,  # [rows]
    rope,  # float32 [max_positions, ROTATED] or None
    q_norm,  # [HEAD_DIM] or None
    k_norm,
    bias,  # [(HEADS + 2 * KV_HEADS) * HEAD_DIM] or None
    pool,  # [num_blocks, LAYERS, 2, BLOCK_TOKENS, KV_HEADS, HEAD_DIM]
    slots,  # int64 [rows]
    kv_scale,  # float32 [LAYERS, 2, KV_HEADS] or None
    k_center,  # float32 [LAYERS, KV_HEADS, HEAD_DIM] or None
    query,  # [rows, HEADS, HEAD_DIM]
    key,  # [rows, KV_HEADS, HEAD_DIM] if NEED_KV
    value,
    split_stride,
    row_stride,
    eps,
    layer,
    temperature_scale,
    temperature_floor,
    temperature_shift,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LAYERS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    GROUP: tl.constexpr,  # heads per program
    HALF_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    DTYPE: tl.constexpr,
    ROTATED: tl.constexpr,  # dimensions
    INTERLEAVED: tl.constexpr,
    NORMED: tl.constexpr,
    TEMPERED: tl.constexpr,
    MIX: tl.constexpr,
    NEED_KV: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    HALF: tl.constexpr = HEAD_DIM // 2
    Q_GROUPS: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    KV_GROUPS: tl.constexpr = (KV_HEADS + GROUP - 1) // GROUP
    row = (tl.program_id(0) // (Q_GROUPS + 2 * KV_GROUPS)).to(tl.int64)
    group = tl.program_id(0) % (Q_GROUPS + 2 * KV_GROUPS)
    is_query = group < Q_GROUPS
    is_value = group >= Q_GROUPS + KV_GROUPS
    # heads of Q from 0, of K from HEADS, of V from HEADS + KV_HEADS, as they lie in qkv
    base = tl.where(is_query, 0, tl.where(is_value, HEADS + KV_HEADS, HEADS))
    local_group = tl.where(is_query, group, tl.where(is_value, group - Q_GROUPS - KV_GROUPS, group - Q_GROUPS))
    heads = local_group * GROUP + tl.arange(0, GROUP)
    columns = heads[:, None] * 0 + tl.arange(0, HALF_BLOCK)[None, :]  # whole tiles: one layout for all loads
    mask = (heads < tl.where(is_query, HEADS, KV_HEADS))[:, None] & (columns < HALF)
    source, source_apart = _pairs(columns, HEAD_DIM, ROTATED, INTERLEAVED, IS_TARGET=False)
    target, apart = _pairs(columns, HEAD_DIM, ROTATED, INTERLEAVED, IS_TARGET=True)
    if INTERLEAVED:  # V is as it is
        source, source_apart = tl.where(is_value, target, source), tl.where(is_value, apart, source_apart)
    inside = heads[:, None] * HEAD_DIM + target
    offsets = (base + heads[:, None]) * HEAD_DIM + source

    # what no earlier kernel writes
    gain_first, gain_second, bias_first, bias_second, inverse_scale = None, None, None, None, None
    if bias is not None:
        bias_first = tl.load(bias + offsets, mask=mask, other=0.0).to(tl.float32)
        bias_second = tl.load(bias + offsets + source_apart, mask=mask, other=0.0).to(tl.float32)
    if q_norm is not None:
        norm = tl.where(is_query, q_norm, k_norm) + source
        gain_first = tl.load(norm, mask=mask, other=0.0).to(tl.float32)
        gain_second = tl.load(norm + source_apart, mask=mask, other=0.0).to(tl.float32)
    if kv_scale is not None:
        scales = kv_scale + (layer * 2 + is_value.to(tl.int32)) * KV_HEADS + heads[:, None]
        inverse_scale = 1.0 / tl.load(scales, mask=(heads < KV_HEADS)[:, None] & (group >= Q_GROUPS), other=1.0)
    center_first, center_second = None, None
    if k_center is not None:
        of_key = mask & (group >= Q_GROUPS) & (group < Q_GROUPS + KV_GROUPS)
        centers = k_center + layer * (KV_HEADS * HEAD_DIM) + inside
        center_first = tl.load(centers, mask=of_key, other=0.0)
        center_second = tl.load(centers + apart, mask=of_key, other=0.0)
    # like attention's work list, a step's positions and slots are older than the kernel before this one
    position = tl.load(positions + row).to(tl.int64)
    slot = tl.load(slots + row)
    cos, sin = None, None
    if ROTATED > 0:
        angles = rope + position * ROTATED + columns
        turned = mask & (group < Q_GROUPS + KV_GROUPS) & (columns < ROTATED // 2)
        cos = tl.load(angles, mask=turned, other=0.0 if ROTATED == HEAD_DIM else 1.0)
        sin = tl.load(angles + ROTATED // 2, mask=turned, other=0.0)
    if PDL:
        gdc_wait()

    places = qkv + row * row_stride + offsets
    first, second = _summed(places, source_apart, split_stride, mask, bias_first, bias_second, SPLITS, PDL)
    if group < Q_GROUPS + KV_GROUPS:
        if NORMED:
            first, second = _normed(first, second, gain_first, gain_second, eps, HEAD_DIM)
        if ROTATED > 0:
            first, second = first * cos - second * sin, second * cos + first * sin
        if TEMPERED:
            steps = tl.floor((position.to(tl.float32) + temperature_shift) / temperature_floor)
            factor = tl.where(is_query, 1.0 + temperature_scale * tl.log(1.0 + steps), 1.0)
            first *= factor
            second *= factor
        if center_first is not None:  # of Q it is zero
            first -= center_first
            second -= center_second
        if MIX:
            first, second = hadamard_mixed(first, second, GROUP, HALF_BLOCK, HALF)
    if is_query:
        targets = query + row * (HEADS * HEAD_DIM) + inside
        tl.store(targets, first.to(DTYPE), mask=mask)
        tl.store(targets + apart, second.to(DTYPE), mask=mask)
    else:
        ENTRY: tl.constexpr = KV_HEADS * HEAD_DIM
        POOL_DTYPE: tl.constexpr = pool.dtype.element_ty
        entry = (slot // BLOCK_TOKENS) * (LAYERS * 2 * BLOCK_TOKENS) + slot % BLOCK_TOKENS
        entry += (layer * 2 + is_value.to(tl.int32)) * BLOCK_TOKENS
        stored = pool + entry * ENTRY + inside
        written = mask & (slot >= 0)
        tl.store(stored, _for_pool(first, inverse_scale, DTYPE, POOL_DTYPE), mask=written)
        tl.store(stored + apart, _for_pool(second, inverse_scale, DTYPE, POOL_DTYPE), mask=written)
        if NEED_KV:
            copies = tl.where(is_value, value, key) + row * ENTRY + inside
            tl.store(copies, first.to(DTYPE), mask=mask)
            tl.store(copies + apart, second.to(DTYPE), mask=mask)


def heads_per_program(half: int, num_warps: int) -> int:
    """Every thread has 16 bytes of bfloat16 of each half. half: elements of half a head, padded to a power of two."""
    return max(1, num_warps * 256 // half)


_TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def qkv_rope_triton(
    qkv: torch.Tensor,
    form: HeadForm,
    target: KvTarget,
    layer: int,
    *,
    positions: torch.Tensor,
    rope: torch.Tensor | None,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    need_kv: bool,
    num_warps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """As `qkv_rope`, shapes checked by it."""
    pool, mix, num_heads = target.pool, target.mix, form.num_heads
    _, layers, _, block_tokens, kv_heads, head_dim = pool.shape
    rows = qkv.shape[-2]
    temperature = form.temperature
    query = torch.empty(rows, num_heads, head_dim, dtype=dtype, device=qkv.device)
    key = torch.empty(rows, kv_heads, head_dim, dtype=dtype, device=qkv.device) if need_kv else None
    value = torch.empty(rows, kv_heads, head_dim, dtype=dtype, device=qkv.device) if need_kv else None
    if not rows:
        return query, key, value
    num_warps = num_warps or choose(rows, mix=mix, batch_invariant=target.batch_invariant)
    half = max(16, next_power_of_2(head_dim // 2))
    group = min(heads_per_program(half, num_warps), next_power_of_2(max(num_heads, kv_heads)))
    pdl = backend.pdl(qkv)
    qkv_rope_kernel[(rows * (cdiv(num_heads, group) + 2 * cdiv(kv_heads, group)),)](
        qkv=qkv,
        positions=positions,
        rope=rope,
        q_norm=form.q_norm,
        k_norm=form.k_norm,
        bias=bias,
        pool=pool,
        slots=target.slots,
        kv_scale=target.kv_scale,
        k_center=target.k_center,
        query=query,
        key=key,
        value=value,
        split_stride=qkv.stride(0) if qkv.ndim == 3 else 0,
        row_stride=qkv.stride(-2),
        eps=form.eps,
        layer=layer,
        temperature_scale=0.0 if temperature is None else temperature.scale,
        temperature_floor=1.0 if temperature is None else temperature.floor,
        temperature_shift=0.0 if temperature is None else float(temperature.shift),
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        LAYERS=layers,
        BLOCK_TOKENS=block_tokens,
        GROUP=group,
        HALF_BLOCK=half,
        SPLITS=qkv.shape[0] if qkv.ndim == 3 else 1,
        DTYPE=_TRITON_DTYPES[dtype],
        ROTATED=form.num_rotated(head_dim),
        INTERLEAVED=form.interleaved,
        NORMED=form.without_weights or form.q_norm is not None,
        TEMPERED=temperature is not None,
        MIX=mix,
        NEED_KV=need_kv,
        PDL=pdl,
        num_warps=num_warps,
        launch_pdl=pdl,
        enable_fp_fusion=False,  # a row has the same bits whether its sums came whole or in parts
    )
    return query, key, value
