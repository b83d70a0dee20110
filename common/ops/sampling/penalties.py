"""Penalties for tokens that were there already, with vLLM's meaning (sampler `apply_penalties`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def apply_penalties(
    logits: torch.Tensor,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    presence: float,
    frequency: float,
    repetition: float,
) -> None:
    """logits: float32 [vocab], changed in place.

    `repetition` divides positive logits of tokens in prompt or output and multiplies negative ones; `frequency` is
    subtracted once per occurrence in the output, `presence` once per token that occurs there.

    :raises ValueError: for logits of another rank.
    """
    if logits.ndim != 1:
        raise ValueError(f"penalties apply to one row of logits, not {list(logits.shape)}")
    values = logits.numpy()
    generated, counts = np.unique(np.asarray(output, np.int64), return_counts=True)
    if repetition != 1:
        seen = np.union1d(np.asarray(prompt, np.int64), generated)
        found = values[seen]
        values[seen] = np.where(found > 0, found / np.float32(repetition), found * np.float32(repetition))
    values[generated] -= np.float32(frequency) * counts.astype(np.float32)
    values[generated] -= np.float32(presence)
