"""The masks of a step's constrained samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.engine.matcher import Matcher, fill_together, num_threads
from common.engine.plan import Masks, StepRow

MANY = 4
"""Rows from which on they are filled in several threads."""


class StepMasks(NamedTuple):
    """samples: int32 [n], rising: which samples of the step have a mask; the others may be any token. words: see `Masks`."""

    samples: NDArray[np.int32]
    words: Masks


def fill_masks(rows: Sequence[StepRow], vocab_size: int) -> StepMasks | None:
    """Ask each constrained row what it may be; None without such rows. Outputs are known to their ends.

    Takes some 20 µs a sample as a rule, and milliseconds where a grammar gets somewhere for the first time; so many rows are
    filled in several threads, if this process has cores for them.
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
    together: list[tuple[Matcher, Sequence[int], int]] = []
    done = 0
    for row in rows:
        if row.constraint is None or not row.num_samples:
            continue
        count = row.num_samples
        if isinstance(row.constraint, Matcher) and count == 1:
            together.append((row.constraint, row.output, done))
        else:
            row.constraint.fill(row.output, row.tokens[len(row.tokens) - count + 1 :], words[done : done + count])
        done += count
    if len(together) >= MANY and num_threads() > 1:
        fill_together(together, words)
    else:
        for matcher, output, at in together:
            matcher.fill(output, [], words[at : at + 1])
    return StepMasks(np.array(samples, np.int32), words)


def allowed_tokens(words: NDArray[np.int32], vocab_size: int) -> NDArray[np.bool_]:
    """words: int32 [words] of one sample. Returns bool [vocab_size]."""
    return np.unpackbits(words.view(np.uint8), bitorder="little", count=vocab_size).view(np.bool_)
