"""What `sample_tokens` computes: every filter over the whole vocabulary, noise for every token."""

from __future__ import annotations

import math

import torch

from common.ops.sampling.gumbel_reference import gumbel_noise_reference


def filter_reference(scaled: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """scaled: float32 [vocab], tempered logits. Returns a copy with -inf where min-p, top-k and top-p cut."""
    kept = scaled.clone()
    if min_p > 0:
        kept[kept < kept.max() + torch.tensor(math.log(min_p), dtype=torch.float32)] = -math.inf
    order = kept.sort(descending=True, stable=True).indices
    if top_k > 0:
        kept[order[top_k:]] = -math.inf
    if top_p < 1:
        weights = (kept[order].double() - kept.max().double()).exp()
        before = weights.cumsum(0) - weights
        kept[order[before >= top_p * weights.sum()]] = -math.inf
    return kept


def sample_reference(
    logits: torch.Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int
) -> int:
    """logits: float32 [vocab]."""
    if temperature == 0:
        return int(logits.argmax())
    kept = filter_reference(logits / temperature, top_k, top_p, min_p)
    return int((kept + gumbel_noise_reference(seed, position, torch.arange(len(logits)))).argmax())
