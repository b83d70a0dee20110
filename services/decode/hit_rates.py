"""How often guesses come true, by class; of lookup by the length of the match: measured, with a first guess. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

_LENGTHS = (3, 4, 5, 7, 10, 16, 32)
"""Where the next class of lengths begins."""
_FIRST = (0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.92, 0.96)
_FIRST_WEIGHT = 8.0
"""Trials that a first guess counts for."""
_MOST_TRIALS = 256.0
"""Then trials and hits are halved: texts change."""
_MAX_CHANCE = 0.99
_OWN_WEIGHT = 4.0
"""Hits that a sequence needs to count as much as the table."""
_OWN_DECAY = 0.95
_SPLIT = 0.7
"""Of a first guess, where other tokens came, too."""


@dataclass(slots=True)
class Record:
    """How a sequence's own trials went, the latest counting most: `hits`, of `expected` ones."""

    hits: float = 0.0
    expected: float = 0.0


class RateTable:
    """How often guesses of each class come true: one table for all sequences, each of which corrects it by a factor of its own
    (`Record`). first: what is assumed of each class."""

    def __init__(self, first: Sequence[float]) -> None:
        self._hits = [_FIRST_WEIGHT * rate for rate in first]
        self._trials = [_FIRST_WEIGHT] * len(first)

    def chance(self, bucket: int, record: Record) -> float:
        """Return the chance that a guess of that class is right."""
        factor = (_OWN_WEIGHT + record.hits) / (_OWN_WEIGHT + record.expected)
        return min(_MAX_CHANCE, factor * self._hits[bucket] / self._trials[bucket])

    def ladder(self, count: int, record: Record) -> list[float]:
        """Return the chance of each of `count` tokens of a proposal, with all before it. Classes are places, the last one that
        of all behind it, too."""
        last = len(self._hits) - 1
        return list(accumulate((self.chance(min(place, last), record) for place in range(count)), mul))

    def record(self, bucket: int, hit: bool, record: Record) -> None:
        record.expected = _OWN_DECAY * record.expected + self._hits[bucket] / self._trials[bucket]
        record.hits = _OWN_DECAY * record.hits + hit
        self._hits[bucket] += hit
        self._trials[bucket] += 1
        if self._trials[bucket] > _MOST_TRIALS:
            self._hits[bucket] /= 2
            self._trials[bucket] /= 2


class HitRates(RateTable):
    """Of lookup: classes are those of matches."""

    def __init__(self) -> None:
        super().__init__([rate * factor for factor in (1.0, 1.0, _SPLIT) * 2 for rate in _FIRST])

    def bucket(self, length: int, num_agreeing: int, num_found: int, *, shared: bool) -> int:
        """Return the table's row for matches of `length` tokens.

        They are told apart by whether there was one, several before one token, or before several; and in another text.
        """
        kind = 0 if num_found == 1 else 1 if num_agreeing == num_found else 2
        return (kind + 3 * shared) * len(_FIRST) + bisect_right(_LENGTHS, length)
