"""Attention of prompts with no cached prefix, through torch's SDPA: nothing is paged there, and cuDNN is hard to beat."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.ops.attention.configs import planned_length
from common.ops.attention.parts import attend_part_reference
from common.ops.attention.settings import AttentionSettings
from common.ops.attention.work import FreshRun, RaggedRun

_REST = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # for dtypes and head sizes that the fast ones refuse
_BACKENDS: dict[str, list[SDPBackend]] = {
    "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, *_REST],
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, *_REST],
}


def attend_run(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, run: FreshRun, settings: AttentionSettings, scale: float
) -> torch.Tensor:
    """query: [tokens, heads, head_dim]; key, value: [tokens, kv_heads, head_dim]. Returns [run's tokens, heads, head_dim].

    Short prompts of equal length that lie side by side are one call. A prompt is padded with what lies behind it, where that is
    enough, and with zeros otherwise: no query of its own sees later keys, as long as they are finite. See
    `AttentionSettings.long_prompt_min`.
    """
    first, end, padding = run.first, run.first + run.count * run.length, 0
    prefill_backend = settings.prefill_backend
    if prefill_backend == "cudnn":
        if run.length < settings.long_prompt_min:
            prefill_backend = "flash"
        else:
            padding = planned_length(run.length) - run.length
    shape = (run.count, run.length + padding)
    missing = max(0, end + padding - len(query))
    parts = (x[first : end + padding] for x in (query, key, value))
    padded = (F.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x for x in parts)
    q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in padded)
    with sdpa_kernel(_BACKENDS[prefill_backend], set_priority=True):
        attended = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    return attended.transpose(1, 2).flatten(0, 1)[: end - first]


def attend_ragged(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, run: RaggedRun, scale: float) -> torch.Tensor:
    """query: [tokens, heads, head_dim]; key, value: [tokens, kv_heads, head_dim]. Returns as query; only the run's tokens mean
    anything."""
    if not query.is_cuda:
        return attend_ragged_reference(query, key, value, run, scale)
    attend: Any = torch.ops.aten._flash_attention_forward
    return attend(query, key, value, run.starts, run.starts, run.longest, run.longest, 0.0, True, False, scale=scale)[0]


def attend_ragged_reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, run: RaggedRun, scale: float
) -> torch.Tensor:
    """As `attend_ragged`."""
    output = torch.full_like(query, torch.nan)
    for first, end in pairwise(run.starts.tolist()):
        own = slice(first, end)
        output[own] = attend_part_reference(query[own], key[own], value[own], scale, causal=True)[0]
    return output


def ragged_is_right(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Does `attend_ragged` compute what its reference does, for two prompts behind other tokens?

    :raises RuntimeError: if torch refuses to.
    """
    starts = torch.tensor([9, 79, 176], dtype=torch.int32, device=device)
    run = RaggedRun(9, 167, 97, starts)
    generator = torch.Generator(device).manual_seed(1)
    query, key, value = (
        torch.randn(180, n, head_dim, device=device, generator=generator).to(dtype) for n in (heads, kv_heads, kv_heads)
    )
    own = slice(9, 176)
    found = attend_ragged(query, key, value, run, head_dim**-0.5)[own]
    expected = attend_ragged_reference(query, key, value, run, head_dim**-0.5)[own]
    return bool(torch.allclose(found.float(), expected.float(), atol=0.02, rtol=0.02))


def planned_lengths(longest: int, settings: AttentionSettings) -> Iterator[int]:
    """Yield the lengths that cuDNN gets for prompts of up to `longest` tokens: what a thread should run before the first
    prompt."""
    if settings.prefill_backend != "cudnn" or settings.batch_invariant:
        return
    length = settings.long_prompt_min
    while length < longest:
        yield length
        length = planned_length(length + 1)
    if longest >= settings.long_prompt_min:
        yield planned_length(longest)
