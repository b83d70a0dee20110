"""What a head knows of each sequence: the hidden states that it has noted, and where the KV of its own layer lies.

Position p of a text and the token at p + 1 are a pair, which the head computes once both are known:

    [first, end)                  pairs whose KV is in the cache, `capacity` at most: the oldest block gives way
    [end, end + num_noted)        positions whose states are noted and not computed yet; `nexts` are the tokens behind them

States come step by step; where some are missing (a cached prefix, a hand-off, more than `KEPT_STATES` that nobody computed),
the context begins anew behind the gap. What was drafted lies behind `end` and is overwritten.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

KEPT_STATES = 16
"""Of a sequence for which nothing is drafted: so many of the latest are kept, to begin with later."""

States = NDArray[np.float32]


class HeadContext:
    """blocks: int64, of the head's pool, the oldest pairs first."""

    def __init__(self, blocks: NDArray[np.int64], block_tokens: int) -> None:
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.first = self.end = 0
        self.nexts: list[int] = []
        self._states: list[States] = []
        self._num_noted = 0

    @property
    def capacity(self) -> int:
        return len(self.blocks) * self.block_tokens

    @property
    def num_known(self) -> int:
        """Positions whose states were seen, without a gap: the next one is expected there."""
        return self.end + self._num_noted

    def note(self, start: int, states: States, tokens: list[int]) -> None:
        """Take and keep the states of positions [start, start + len(states)). tokens: that at `start`, and those behind it, as
        far as they are known: at most one more than there are states."""
        self._go_back(start)
        if start != self.num_known:
            self._begin(start)
        if self._num_noted > len(self.nexts):
            self.nexts.append(tokens[0])
        self.nexts += tokens[1:]
        self._states.append(states)
        self._num_noted += len(states)

    def keep_latest(self, most: int) -> None:
        """Drop the oldest states that are noted, until `most` are left."""
        if self._num_noted <= most:
            return
        dropped = self._num_noted - most
        kept, nexts = np.concatenate(self._states)[dropped:], self.nexts[dropped:]
        self._begin(self.end + dropped)
        self._states, self.nexts, self._num_noted = [kept], nexts, most

    def take(self, spare: int) -> tuple[States, list[int], int, int]:
        """Return the states of pairs to compute, the tokens behind them, and where the first one is in the cache and in the
        text. They count as computed. spare: places that must be left behind them, for what is drafted."""
        count = len(self.nexts)
        self.keep_latest(self.capacity - spare - self.block_tokens + self._num_noted - count)
        count = len(self.nexts)
        excess = self.end - self.first + count + spare - self.capacity
        if excess > 0:
            self._shift(-(-excess // self.block_tokens))
        states, nexts, place, position = np.concatenate(self._states), self.nexts, self.end - self.first, self.end
        self._states, self.nexts, self._num_noted = [states[count:]], [], self._num_noted - count
        self.end += count
        return states[:count], nexts, place, position

    def forget(self) -> None:
        self._begin(0)

    def _begin(self, position: int) -> None:
        self.first = self.end = position
        self._states, self.nexts, self._num_noted = [], [], 0

    def _go_back(self, start: int) -> None:
        """Positions from `start` on are computed again: with the same tokens, for a text does not change."""
        if start >= self.num_known:
            return
        if start < self.first:
            self._begin(start)
        elif start <= self.end:
            self.end, self._states, self.nexts, self._num_noted = start, [], [], 0
        else:
            kept = start - self.end
            self._states, self.nexts, self._num_noted = [np.concatenate(self._states)[:kept]], self.nexts[:kept], kept

    def _shift(self, num_blocks: int) -> None:
        """Give up the oldest blocks."""
        num_blocks = min(num_blocks, len(self.blocks))
        self.first = min(self.end, self.first + num_blocks * self.block_tokens)
        self.blocks = np.roll(self.blocks, -num_blocks)


class HeadContexts:
    """A context for each of the `count` sequences that were here last."""

    def __init__(self, *, count: int, blocks_each: int, block_tokens: int) -> None:
        self._free = [np.arange(slot * blocks_each, (slot + 1) * blocks_each) for slot in reversed(range(count))]
        self._block_tokens = block_tokens
        self._contexts: OrderedDict[int, HeadContext] = OrderedDict()

    def of(self, serial: int) -> HeadContext:
        """Return the context of a sequence, which is empty if it is new or was away for long."""
        context = self._contexts.get(serial)
        if context is None:
            blocks = self._free.pop() if self._free else self._contexts.popitem(last=False)[1].blocks
            context = self._contexts[serial] = HeadContext(blocks, self._block_tokens)
        self._contexts.move_to_end(serial)
        return context
