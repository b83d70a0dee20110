"""Attention of prompts with no cached prefix, through torch's SDPA: nothing is paged there, and cuDNN is hard to beat."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.ops.attention.configs import planned_length
from common.ops.attention.settings import AttentionSettings
from common.ops.attention.work import FreshRun

_REST = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # for dtypes and head sizes that the fast ones refuse
_BACKENDS: dict[str, list[SDPBackend]] = {
    "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, *_REST],
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, *_REST],
}


def attend_run(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, run: FreshRun, settings: AttentionSettings, scale: float
) -> torch.Tensor:
    """query: [tokens, heads, head_dim]; key, value: [tokens, kv_heads, head_dim]. Returns [run's tokens, heads, head_dim].

    Short prompts of equal length that lie side by side are one call. See `AttentionSettings.long_prompt_min`.
    """
    first, end, padding = run.first, run.first + run.count * run.length, 0
    prefill_backend = settings.prefill_backend
    if prefill_backend == "cudnn":
        if run.length < settings.long_prompt_min:
            prefill_backend = "flash"
        else:
            padding = planned_length(run.length) - run.length
    shape = (run.count, run.length + padding)
    parts = (x[first:end] for x in (query, key, value))
    padded = (F.pad(x, (0, 0, 0, 0, 0, padding)) if padding else x for x in parts)  # later keys: no real query sees them
    q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in padded)
    with sdpa_kernel(_BACKENDS[prefill_backend], set_priority=True):
        attended = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
        )
    return attended.transpose(1, 2).flatten(0, 1)[: end - first]


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
