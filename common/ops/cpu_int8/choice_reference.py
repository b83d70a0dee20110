"""What `choice_numba` computes, in NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from common.ops.cpu_int8.choice_numba import NO_CHOICE, TOP_TOKENS
from common.ops.sampling.gumbel import GREEDY_BELOW, gumbel_noise
from common.ops.sampling.sample import Draw


def choice_reference(logits: NDArray[np.float32], ids: NDArray[np.int64], draw: Draw) -> tuple[int, float]:
    """Return the target's id of the proposed token and its probability among the tokens that could be drawn; `NO_CHOICE` and 0
    if a logit is not finite.

    logits: float32 [draft_vocab]. ids: int64 [draft_vocab], the target's id of each row of the draft vocabulary.
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
