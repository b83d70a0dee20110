"""What `apply_penalties` computes, token by token."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def penalties_reference(
    logits: torch.Tensor, prompt: Sequence[int], output: Sequence[int], presence: float, frequency: float, repetition: float
) -> torch.Tensor:
    """logits: float32 [vocab]. Returns the penalised copy."""
    changed = logits.clone()
    for token in set(prompt) | set(output):
        changed[token] = changed[token] / repetition if changed[token] > 0 else changed[token] * repetition
    for token in set(output):
        changed[token] -= frequency * list(output).count(token)
        changed[token] -= presence
    return changed
