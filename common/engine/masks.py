"""The masks of a step's constrained samples."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from llguidance import LLExecutor
from numpy.typing import NDArray

from common.engine.matcher import Matcher, fill_together
from common.engine.plan import Masks, StepRow
from common.runtime.cores import usable_cores

MIN_TOGETHER = 8
"""Rows with a mask from which on several threads fill them."""

MAX_THREADS = 8


class StepMasks(NamedTuple):
    """samples: int32 [n], rising: which samples of the step have a mask; the others may be any token. words: see `Masks`."""

    samples: NDArray[np.int32]
    words: Masks


def fill_masks(rows: Sequence[StepRow], vocab_size: int, buffer: Callable[[int, int], Masks] | None = None) -> StepMasks | None:
    """Return the masks of the constrained rows, whose outputs are known to their ends; None without such rows.

    buffer: gives the memory for a number of masks of so many words.

    Takes some 10 µs a sample as a rule, and 1 ms in a string that may have few characters more (`grammar.SLICES`), so many rows
    are filled in several threads, if this process has cores for them.
    """
    if not any(row.is_constrained for row in rows):
        return None
    samples: list[int] = []
    at = 0
    for row in rows:
        if row.is_constrained:
            samples.extend(range(at, at + row.num_samples))
        at += row.num_samples
    words = (buffer or _new)(len(samples), -(-vocab_size // 32))
    together: list[tuple[Matcher, Sequence[int], int, int]] = []
    done = 0
    for row in rows:
        if row.constraint is None or not row.num_samples:
            continue
        count = row.num_samples
        if count == 1 and isinstance(row.constraint, Matcher):
            together.append((row.constraint, row.output, row.output_start, done))
        else:
            own = words[done : done + count]
            own.fill(-1)
            row.constraint.fill(row.output, row.tokens[len(row.tokens) - count + 1 :], own, start=row.output_start)
        done += count
    if len(together) >= MIN_TOGETHER and num_threads() > 1:
        fill_together(_executor(), together, words)
    else:
        for matcher, output, start, at in together:
            matcher.fill(output, (), words[at : at + 1], start=start)
    return StepMasks(np.array(samples, np.int32), words)


@functools.cache
def num_threads() -> int:
    """Return how many threads fill masks: half of this process's cores, since the event loop and the runner need some, too."""
    return max(1, min(MAX_THREADS, usable_cores() // 2))


@functools.cache
def _executor() -> LLExecutor:
    return LLExecutor(num_threads())


def _new(count: int, words: int) -> Masks:
    return np.empty((count, words), np.int32)


def allowed_tokens(words: NDArray[np.int32], vocab_size: int) -> NDArray[np.bool_]:
    """Return one sample's mask as bool [vocab_size]. words: int32 [words]."""
    return np.unpackbits(words.view(np.uint8), bitorder="little", count=vocab_size).view(np.bool_)
