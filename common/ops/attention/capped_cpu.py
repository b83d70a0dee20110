"""Attention whose scores are capped (Gemma 2), with the interface of torch's flash attention for CPUs, which has no cap."""

from __future__ import annotations

import torch


def capped_flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None,
    scale: float,
    soft_cap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """query, key, value: float32 [batch, heads, rows, head_dim]; attn_mask: added after the cap.

    Returns the query's shape, and log-sum-exps [batch, heads, rows].
    """
    scores = torch.matmul(query, key.transpose(-1, -2))
    scores.mul_(scale / soft_cap).tanh_().mul_(soft_cap)
    if attn_mask is not None:
        scores += attn_mask
    top = scores.amax(-1, keepdim=True)
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    return torch.matmul(weights, value).div_(total), (top + total.log()).squeeze(-1)
