"""Log-probabilities of the chosen and of the likeliest tokens."""

from __future__ import annotations

import numpy as np
import torch


def top_logprobs(logits: torch.Tensor, token: int, num_top: int) -> tuple[float, list[int], list[float]]:
    """logits: float32 [vocab]. Returns the natural-log probability of `token`, the `num_top` likeliest tokens (equal ones
    by id) and theirs.

    :raises ValueError: for logits of another rank, or a token outside the vocabulary.
    """
    if logits.ndim != 1 or not 0 <= token < len(logits):
        raise ValueError(f"token {token} has no logit in {list(logits.shape)}")
    found = torch.log_softmax(logits, dim=-1).numpy()
    if num_top <= 0:
        return float(found[token]), [], []
    num_top = min(num_top, len(found))
    values = logits.numpy()  # rounded log-probabilities have ties that logits don't
    likely = np.flatnonzero(values >= np.partition(values, -num_top)[-num_top])
    likely = likely[np.argsort(-values[likely], kind="stable")][:num_top]
    return float(found[token]), likely.tolist(), found[likely].tolist()
