"""The matrix that mixes the channels of a head, so that none is much larger than the others: what `hadamard_triton` computes.

A number of few bits is off by a share of its own size, so scores are off the most where K's largest channels meet Q's. Q and K
times one orthonormal matrix have the same scores, and no such channels: QuaRot, arXiv 2404.00456; "incoherent processing" in
FlashAttention-3, arXiv 2407.08608.
"""

from __future__ import annotations

import torch


def hadamard(head_dim: int) -> torch.Tensor:
    """float32 [head_dim, head_dim], symmetric and its own inverse. head_dim: even.

    In each half of a head Sylvester's matrix mixes runs of as many channels as the largest power of two that divides the half;
    then channel i is mixed with i + half. So a power of two is mixed as a whole, in natural order.
    """
    half = head_dim // 2
    run = half & -half
    mixes = torch.ones(1, 1)
    while len(mixes) < run:
        mixes = _doubled(mixes)
    return _doubled(torch.block_diag(*[mixes] * (half // run))) * (2 * run) ** -0.5


def _doubled(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((torch.cat((x, x), 1), torch.cat((x, -x), 1)))
