"""What `top_logprobs` computes."""

from __future__ import annotations

import torch


def top_logprobs_reference(logits: torch.Tensor, token: int, num_top: int) -> tuple[float, list[int], list[float]]:
    """logits: float32 [vocab]."""
    found = logits.double() - torch.logsumexp(logits.double(), dim=-1)
    order = found.sort(descending=True, stable=True).indices[:num_top]
    return float(found[token]), order.tolist(), found[order].tolist()
