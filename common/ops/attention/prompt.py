"""Causal attention of prompts whose keys are tensors, whatever their lengths and prefixes, in one launch on a Hopper GPU.

It does there what cuDNN and FlashAttention-2 do elsewhere (`prefill`, `parts`): prompts are neither padded nor computed one by
one, one that goes on after a prefix needs no merging, and windows and sinks are part of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from common.ops.attention.form import AttentionForm, FormKind
from common.ops.backend import num_sms

TILE_QUERIES = 128
TILE_KEYS = 128
HALF_QUERIES = 64
STAGES = 2
"""Key tiles and value tiles in shared memory; a third of each is no faster (docs/performance/kernels.md)."""
_LOG2_E = math.log2(math.e)


class Prompt(NamedTuple):
    """Queries of `length` tokens from token `first`, after `start` keys; the keys, its own last, begin at row `first_key`."""

    first: int
    length: int
    start: int
    first_key: int


class PromptTiles(NamedTuple):
    """table: int32 [tiles, 4] on the device, as `prompt_gluon.prompt_kernel` reads it. prompts: what it was made of."""

    table: torch.Tensor
    prompts: Sequence[Prompt]


def takes_prompts(head_dim: int, dtype: torch.dtype, kind: FormKind) -> bool:
    """Does the kernel take such heads, with queries in `dtype`, of layers of this kind?"""
    fits = head_dim in (64, 128) and dtype in (torch.bfloat16, torch.float16)
    return fits and not kind.reach.chunk and not kind.is_capped


def cut_prompts(prompts: Iterable[Prompt]) -> list[tuple[int, int, int, int]]:
    """Return tiles of up to 128 queries: first token, queries, row of the first key, keys before the first query; those with
    the most keys first, so that no program begins a long one when others end."""
    tiles = [
        (first + begun, min(TILE_QUERIES, length - begun), first_key, start + begun)
        for first, length, start, first_key in prompts
        for begun in range(0, length, TILE_QUERIES)
    ]
    return sorted(tiles, key=lambda tile: -tile[3] - tile[1])


def tile_prompts(prompts: Sequence[Prompt], device: torch.device) -> PromptTiles:
    """Return the tiles of `prompts` on `device`, made once a step and used by each layer."""
    table = torch.tensor(cut_prompts(prompts), dtype=torch.int32)
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    return PromptTiles(table, prompts)


def attend_prompts(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tiles: PromptTiles,
    form: AttentionForm,
    output: torch.Tensor,
) -> None:
    """Write the prompts' rows of `output`, and no other.

    query, output: [tokens, heads, head_dim]; key, value: [keys, kv_heads, head_dim]; see `takes_prompts`. Keys behind a
    prompt's own, up to the next multiple of 128, must be finite: they are weighted by zero.
    """
    if not query.is_cuda:  # Triton's interpreter does not run Gluon
        attend_prompts_reference(query, key, value, tiles, form, output)
        return
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from common.ops.attention.prompt_gluon import prompt_kernel

    heads, head_dim = query.shape[1:]
    for tensor in (query, key, value, output):
        if tensor.stride()[1:] != (head_dim, 1):
            raise ValueError(f"heads are contiguous, not {list(tensor.shape)} with strides {tensor.stride()}")
    element = gl.bfloat16 if query.dtype == torch.bfloat16 else gl.float16

    def descriptor(tensor: torch.Tensor, rows: int) -> TensorDescriptor:
        layout: Any = gl.NVMMASharedLayout.get_default_for([rows, head_dim], element)
        shape = [tensor.shape[0], tensor.shape[1] * head_dim]
        return TensorDescriptor(tensor, shape, [tensor.stride(0), 1], [rows, head_dim], layout)

    num_items = len(tiles.table) * heads
    prompt_kernel[(min(num_sms(query.get_device()), num_items),)](
        descriptor(query, HALF_QUERIES),
        descriptor(key, TILE_KEYS),
        descriptor(value, TILE_KEYS),
        output,
        tiles.table,
        form.sinks,
        num_items,
        form.window,
        form.scale * _LOG2_E,
        output.stride(0),
        HEADS=heads,
        GROUP=heads // key.shape[1],
        WINDOWED=form.window > 0,
        SINKS=form.sinks is not None,
        N=TILE_KEYS,
        D=head_dim,
        STAGES=STAGES,
        num_warps=4,
    )


def attend_prompts_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tiles: PromptTiles,
    form: AttentionForm,
    output: torch.Tensor,
) -> None:
    """As `attend_prompts`."""
    group = query.shape[1] // key.shape[1]
    for first, length, start, first_key in tiles.prompts:
        own, keys = slice(first, first + length), slice(first_key, first_key + start + length)
        k, v = (x[keys].float().repeat_interleave(group, 1).transpose(0, 1) for x in (key, value))
        scores = query[own].float().transpose(0, 1) @ k.mT * form.scale
        places = torch.arange(start + length, device=query.device)
        queries = places[start:, None]
        seen = places <= queries
        if form.window:
            seen &= places > queries - form.window
        scores = scores.masked_fill(~seen, -torch.inf)
        if form.sinks is not None:
            scores = torch.cat((scores, form.sinks[:, None, None].expand(-1, length, 1)), -1)
        weights = scores.softmax(-1)[..., : start + length]
        output[own] = (weights @ v).transpose(0, 1).to(output.dtype)


def prompts_are_right(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, form: AttentionForm
) -> bool:
    """Does `attend_prompts` compute what its reference does, for a prompt behind other tokens and one that goes on?

    :raises RuntimeError: if the kernel cannot run.
    """
    prompts = [Prompt(9, 70, 0, 0), Prompt(79, 197, 300, 70)]
    tiles = tile_prompts(prompts, device)
    generator = torch.Generator(device).manual_seed(1)
    query, key, value = (
        torch.randn(567, n, head_dim, device=device, generator=generator).to(dtype) for n in (heads, kv_heads, kv_heads)
    )
    found, expected = torch.full_like(query, torch.nan), torch.full_like(query, torch.nan)
    attend_prompts(query, key, value, tiles, form, found)
    attend_prompts_reference(query, key, value, tiles, form, expected)
    return bool(torch.allclose(found.float(), expected.float(), atol=0.02, rtol=0.02, equal_nan=True))
