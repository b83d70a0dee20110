"""Noise for the Gumbel-max trick: a pure function of (seed, position, token).

argmax(logits / T + noise) is a draw from softmax(logits / T). Because the noise of a token at a position is fixed by the
seed, the draw does not depend on the batch, the worker or on guesses made about it (arXiv 2408.07978).

Philox4x32-10 with key = seed, counter = (token / 4, position, 0, 0) and lane = token mod 4: one call serves four tokens, and
Triton has the same generator (`tl.philox`). The 32-bit word w becomes u = (w + 1/2) / 2^32, exact in float64, and
-log(-log(u)), computed in float64 and rounded to float32, so that libraries whose logarithms differ in the last bit agree.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from common.ops.sampling.host_loops import words_of, words_of_each
from common.ops.sampling.philox import MASK32

GREEDY_BELOW = 1e-5
"""Temperatures below are greedy, as in vLLM: there is no noise."""


def gumbel_noise(seed: int, position: int, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
    """tokens: int64 [n], each in [0, 2^34). seed: its low 64 bits count; position: in [0, 2^32). Returns float32 [n].

    :raises ValueError: for a position out of range.
    """
    _check(position, position)
    return _noise_of(words_of(seed, position, tokens))


def gumbel_noise_of_each(
    seeds: NDArray[np.uint64], positions: NDArray[np.int64], tokens: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Return what `gumbel_noise` says of tokens that have a seed and a position each, bit for bit. All [n], as there.

    :raises ValueError: for a position out of range.
    """
    if positions.size:
        _check(int(positions.min()), int(positions.max()))
    return _noise_of(words_of_each(seeds, positions, tokens))


def _check(lowest: int, highest: int) -> None:
    if not 0 <= lowest <= highest <= MASK32:
        raise ValueError(f"position {lowest if lowest < 0 else highest} is not in [0, 2^32)")


def _noise_of(words: NDArray[np.unsignedinteger]) -> NDArray[np.float32]:
    uniform = words.astype(np.float64)
    uniform += 0.5
    uniform *= 2.0**-32
    np.log(uniform, out=uniform)
    np.negative(uniform, out=uniform)
    np.log(uniform, out=uniform)
    np.negative(uniform, out=uniform)
    return uniform.astype(np.float32)
