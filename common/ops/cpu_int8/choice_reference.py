"""What `choice_numba` computes, in NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from common.ops.sampling.gumbel import GREEDY_BELOW, gumbel_noise
from common.ops.sampling.sample import Draw

TOP_TOKENS = 64
"""Tokens that noise is drawn for."""

NO_CHOICE = -1


def choice_reference(logits: NDArray[np.float32], ids: NDArray[np.int64], draw: Draw) -> tuple[int, float]:
    """logits: float32 [draft_vocab], finite or not. ids: int64 [draft_vocab], the target's.

    Return the target's id, and how likely it is among what could be drawn; `NO_CHOICE` where a logit is not finite.
    """
    if not np.isfinite(logits).all():
        return NO_CHOICE, 0.0
    if draw.temperature < GREEDY_BELOW:
        best = int(logits.argmax())
        return int(ids[best]), 1.0 / float(np.exp(logits - logits[best]).sum())
    return _drawn(logits, ids, draw)


def _drawn(logits: NDArray[np.float32], ids: NDArray[np.int64], draw: Draw) -> tuple[int, float]:
    count = min(TOP_TOKENS, len(logits))
    if draw.top_k > 0:
        count = min(count, draw.top_k)
    top = np.argpartition(logits, len(logits) - count)[len(logits) - count :]
    scores = logits[top] / np.float32(draw.temperature)
    if draw.top_p < 1 or draw.min_p > 0:
        order = np.argsort(-scores)
        top, scores = top[order], scores[order]
        shares = np.exp(scores - scores[0])
        kept = np.searchsorted(shares.cumsum(), draw.top_p * shares.sum()) + 1
        kept = max(1, min(int(kept), int((shares >= draw.min_p).sum())))
        top, scores = top[:kept], scores[:kept]
    noisy = scores + gumbel_noise(draw.seed, draw.position, ids[top])
    best = int(noisy.argmax())
    return int(ids[top[best]]), 1.0 / float(np.exp(noisy - noisy[best]).sum())
