"""The masks of a step's constrained samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.engine.plan import Masks, StepRow


class StepMasks(NamedTuple):
    """samples: int32 [n], rising: which samples of the step have a mask; the others may be any token. words: see `Masks`."""

    samples: NDArray[np.int32]
    words: Masks


def fill_masks(rows: Sequence[StepRow], vocab_size: int) -> StepMasks | None:
    """Ask each constrained row what it may be; None without such rows. Outputs are known to their ends.

    Takes some 20 µs a sample.
    """
    if not any(row.is_constrained for row in rows):
        return None
    samples: list[int] = []
    at = 0
    for row in rows:
        if row.is_constrained:
            samples.extend(range(at, at + row.num_samples))
        at += row.num_samples
    words = np.full((len(samples), -(-vocab_size // 32)), -1, np.int32)
    done = 0
    for row in rows:
        if row.is_constrained:
            assert row.constraint is not None
            count = row.num_samples
            row.constraint.fill(row.output, row.tokens[len(row.tokens) - count + 1 :], words[done : done + count])
            done += count
    return StepMasks(np.array(samples, np.int32), words)


def allowed_tokens(words: NDArray[np.int32], vocab_size: int) -> NDArray[np.bool_]:
    """words: int32 [words] of one sample. Returns bool [vocab_size]."""
    return np.unpackbits(words.view(np.uint8), bitorder="little", count=vocab_size).view(np.bool_)
