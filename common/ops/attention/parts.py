"""Attention of a long piece of a prompt after a long prefix, in parts that cuDNN computes and that are merged.

    keys      0 ────────────── pieces of 1024 · 2^n ───────────────┊─ rest ─┊─ the prompt's own ─
    queries   all of them see each piece whole: no mask             a causal square with the rest

cuDNN multiplies half as fast again as the kernel that reads pages (docs/performance/kernels.md), but plans every shape that
is new to it: pieces come in few sizes. What is before the prompt's own tokens is copied out of the pool, which takes little
beside that.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import torch
import torch.nn.functional as F

from common.ops.attention.configs import part_length
from common.ops.attention.prefix_kv import StepKv, gather_prefix
from common.ops.attention.settings import AttentionSettings
from common.ops.attention.work_list import DeviceRow
from common.ops.backend import on_device

Part = tuple[torch.Tensor, torch.Tensor]
"""Attention over some keys [tokens, heads, head_dim], and the log of the sum of their weights, float32 [heads, tokens]."""


def attend_chunk(query: torch.Tensor, kv: StepKv, run: DeviceRow, scale: float, settings: AttentionSettings) -> torch.Tensor:
    """query: [tokens, heads, head_dim], of the step. Returns [run.length, heads, head_dim]."""
    own = slice(run.first, run.first + run.length)
    sizes = list(piece_sizes(run.start, settings))
    whole = sum(sizes)
    rest = run.start - whole
    padding = part_length(rest + run.length, settings.min_piece) - rest - run.length  # later keys: no real query sees them
    queries, keys, values = query[own], kv.key[own], kv.value[own]
    if rest:
        before = gather_prefix(kv, run.first_block, whole, run.start, query.dtype)
        keys, values = (torch.cat(pair) for pair in zip(before, (keys, values), strict=True))
    if padding:
        keys, values = (F.pad(x, (0, 0, 0, 0, 0, padding)) for x in (keys, values))
    square = F.pad(queries, (0, 0, 0, 0, rest, padding)) if rest or padding else queries
    attended, sums = attend_part(square, keys, values, scale, causal=True)
    merged, sums = attended[rest : rest + run.length], sums[:, rest : rest + run.length]
    padding = part_length(run.length, settings.min_piece) - run.length
    padded = F.pad(queries, (0, 0, 0, 0, 0, padding)) if padding else queries
    for size, end in zip(sizes, accumulate(sizes), strict=True):
        before = gather_prefix(kv, run.first_block, end - size, end, query.dtype)
        attended, part_sums = attend_part(padded, *before, scale, causal=False)
        dtype = query.dtype if end == whole else torch.float32
        merged, sums = merge_pair((merged, sums), (attended[: run.length], part_sums[:, : run.length]), dtype)
    return merged


def piece_sizes(prefix: int, settings: AttentionSettings) -> Iterator[int]:
    """Yield max_piece to min_piece by powers of two, the largest first; what is left of `prefix` is less than min_piece."""
    size = settings.max_piece
    while size >= settings.min_piece:
        if prefix >= size:
            yield size
            prefix -= size
        else:
            size //= 2


def planned_parts(tokens: int, max_context: int, settings: AttentionSettings) -> Iterator[tuple[int, int, bool]]:
    """Yield queries, keys and whether causal, of what cuDNN gets for `tokens` at once: what a thread should run before the
    first."""
    if settings.prefill_backend != "cudnn" or settings.batch_invariant or tokens < settings.long_prompt_min:
        return
    queries = part_length(tokens, settings.min_piece)
    longest = part_length(tokens + settings.min_piece - 1, settings.min_piece)
    length = queries
    while length <= longest:
        yield length, length, True
        length = part_length(length + 1, settings.min_piece)
    size = settings.min_piece
    while size <= min(settings.max_piece, max_context):
        yield queries, size, False
        size *= 2


def attend_part(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, causal: bool) -> Part:
    """query: [tokens, heads, head_dim]; key, value: [keys, kv_heads, head_dim]; causal: a square."""
    q, k, v = (x[None].transpose(1, 2) for x in (query, key, value))
    if query.is_cuda:
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
        return found[0][0].transpose(0, 1), found[1].view(query.shape[1], -1)
    return attend_part_reference(query, key, value, scale, causal=causal)


def attend_part_reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, causal: bool) -> Part:
    """As `attend_part`."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.float().repeat_interleave(group, 1).transpose(0, 1) for x in (key, value))
    scores = query.float().transpose(0, 1) @ key.mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool, device=key.device).triu(1), -torch.inf)
    attended = (scores.softmax(-1) @ value).transpose(0, 1).to(query.dtype)
    return attended.contiguous(), scores.logsumexp(-1)


def merge_pair(first: Part, second: Part, dtype: torch.dtype) -> Part:
    """Attention over the keys of both, in `dtype`, contiguous. Heads of a token are contiguous in both."""
    if on_device(first[0]):
        from common.ops.attention.merge_pair_triton import merge_pair_triton

        return merge_pair_triton(*first, *second, dtype)
    return merge_pair_reference(first, second, dtype)


def merge_pair_reference(first: Part, second: Part, dtype: torch.dtype) -> Part:
    """As `merge_pair`."""
    sums = torch.logaddexp(first[1], second[1])
    merged = sum(x.float() * (part - sums).exp().T[..., None] for x, part in (first, second))
    assert isinstance(merged, torch.Tensor)
    return merged.to(dtype), sums
