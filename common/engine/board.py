"""What draft workers propose, where a device reads it when a step begins, not when it is planned. Pure.

    host     plan a row that takes what is posted ──► … post, post, post …
    device   the step before runs ─────────────────────────────────────────► copy the board, settle the row: what is posted then

Each sequence has a slot with a few lines: tokens that may follow the first `start` ones of its text. The device knows what the
step before has sampled behind these, and goes on with a line that agrees (`ops/sampling/open_rows.py`). A line that is half
written, or about another beginning, is no harm: proposals are verified, whatever they are.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from common.ops.sampling.board_layout import BOARD_WORDS, LINE_TOKENS, LINES

BOARD_SLOTS = 16
"""Sequences that have a slot at once: posting for more takes too much of the host's time."""
HEAD_SLOTS = 32
"""Slots behind these, of sequences that the engine's head drafts for: the device itself posts there."""
_ZEROS = [0] * max(LINES, LINE_TOKENS)


class ProposalBoard:
    """words: int32 [slots, BOARD_WORDS], contiguous. The device copies all of them when a step that takes something begins."""

    def __init__(self, words: NDArray[np.int32]) -> None:
        assert words.flags.c_contiguous, "what is posted would go into a copy"
        self._words = words.reshape(-1).data
        self._free = list(range(len(words)))[::-1]

    def take(self) -> int:
        """Return a slot with nothing on it; -1: none is free."""
        if not self._free:
            return -1
        slot = self._free.pop()
        self._words[slot * BOARD_WORDS : (slot + 1) * BOARD_WORDS] = array("i", bytes(4 * BOARD_WORDS))
        return slot

    def give_back(self, slot: int) -> None:
        """Nobody posts there any more; a step in flight may still read it."""
        self._free.append(slot)

    def post(self, slot: int, start: int, lines: Sequence[Sequence[int]]) -> None:
        """Put `lines` in the place of those before, the likeliest first: tokens of the vocabulary behind the first `start`
        tokens of the slot's text. What does not fit is left out."""
        words = [start, *[min(len(line), LINE_TOKENS) for line in lines[:LINES]]]
        words += _ZEROS[len(words) - 1 : LINES]
        for line in lines[:LINES]:
            words += line[:LINE_TOKENS]
            words += _ZEROS[len(line) : LINE_TOKENS]
        begin = slot * BOARD_WORDS
        self._words[begin : begin + len(words)] = array("i", words)  # all at once: NumPy takes a microsecond for each part


class HeadSlots:
    """Slots of the board that the device's head posts on, by number."""

    def __init__(self) -> None:
        self._free = list(range(BOARD_SLOTS, BOARD_SLOTS + HEAD_SLOTS))[::-1]

    def take(self) -> int:
        """Return a slot; -1: none is free."""
        return self._free.pop() if self._free else -1

    def give_back(self, slot: int) -> None:
        """Nobody drafts for its sequence any more; a step in flight may still do so."""
        self._free.append(slot)
