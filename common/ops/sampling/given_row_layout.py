"""The layout of an upload with the rows of a step that do not go on from the step before; see `given_rows.py`."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import torch
from numpy.typing import NDArray

MAX_ROWS = 64
"""Of a step: one program has all of them, since what it writes of block tables it also reads."""
MAX_CHANGES = 1024
"""Ids of block tables: of two texts of 8,192 tokens in blocks of 16, or one id each of many."""
HEADER = 8
"""Words before the lists: the number of rows, and of changes."""
GOES_ON, GIVEN, ENDS = 0, 1, 2
"""A row continues that of the step before; is what the host says; is padding."""
KINDS, TOKENS, FEEDS, POSITIONS = (HEADER + MAX_ROWS * index for index in range(4))
"""Where the lists begin."""
STARTS = HEADER + MAX_ROWS * 4
PLACE_SHIFT = 32
"""Of a place among the ids of block tables, in a word whose low half is the id."""

CONSTANTS = {
    "ROWS": MAX_ROWS,
    "CHANGES": MAX_CHANGES,
    "KINDS_AT": KINDS,
    "TOKENS_AT": TOKENS,
    "FEEDS_AT": FEEDS,
    "POSITIONS_AT": POSITIONS,
    "STARTS_AT": STARTS,
    "PLACE_SHIFT": PLACE_SHIFT,
    "IS_GIVEN": GIVEN,
    "IS_OVER": ENDS,
}
"""The same as arguments of the kernel, which reads no globals."""

Words = TypeVar("Words", torch.Tensor, NDArray[Any])


def given_words(num_groups: int) -> int:
    """Return the words, int64, of an upload for a model with so many cache groups."""
    return STARTS + MAX_ROWS * num_groups + MAX_CHANGES


class GivenRows(Generic[Words]):
    """Views of `words`, int64 [`given_words`].

    head: [2], the numbers of rows and of changes. kinds, tokens, feeds, positions: [MAX_ROWS]; tokens and feeds as in
    `step_buffers.Fields`. starts: [groups, MAX_ROWS], where the rows' tables begin. changes: [MAX_CHANGES], of
    `StepInputs.block_ids`: the place of each shifted by `PLACE_SHIFT`, plus the id that is to be there. All but `kinds` and
    `head` are read only where they are used. Nothing behind the first `used` words is.
    """

    def __init__(self, words: Words, num_groups: int) -> None:
        self.words = words
        self.head = words[:2]
        self.kinds = words[KINDS : KINDS + MAX_ROWS]
        self.tokens = words[TOKENS : TOKENS + MAX_ROWS]
        self.feeds = words[FEEDS : FEEDS + MAX_ROWS]
        self.positions = words[POSITIONS : POSITIONS + MAX_ROWS]
        end = STARTS + MAX_ROWS * num_groups
        self.starts = words[STARTS:end].reshape(num_groups, MAX_ROWS)
        self.changes = words[end:]

    def used(self, num_changes: int) -> int:
        """Return how many of the words a step with so many changes has."""
        return len(self.words) - MAX_CHANGES + num_changes
