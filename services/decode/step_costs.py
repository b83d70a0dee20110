"""How long a step takes by the number of its tokens, as measured lately. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from itertools import compress
from statistics import median

import numpy as np
from numpy.typing import NDArray

SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""A step counts as one of the next of these numbers of tokens."""
_WEIGHT = 0.1
_FIRST = 3
"""Measurements after which a size is known, if none of them is twice another one."""
_ENOUGH = 8
"""Measurements after which it is known, whatever they say."""
_OUTLIER = 2.0
"""Times what was expected, or its inverse: more of a measurement is something else, a compilation, another process, or two
results that were taken together."""
_LAST = 5
"""Measurements of a size that are kept."""
_OFF = 1.25
"""Times what was expected, or its inverse: if the median of the last measurements is that far off, it is right."""
_DRIFT = 0.02
"""What all sizes take, by how much one took longer than expected: contexts grow, and clocks fall."""
_MOST_PATIENCE = 8
"""Limit of the number of steps for which a size that does not occur stays known, as a multiple of `stale_after`."""


class StepCosts:
    """`stale_after`: steps after which a size that did not occur counts as unknown. It is measured again when it occurs, since
    its last time may be that of a busy moment. Each time it turns out unchanged, it stays known for twice as many steps."""

    def __init__(self, *, stale_after: int = 128) -> None:
        self.stale_after = stale_after
        self._seconds = [0.0] * len(SIZES)
        self._last: list[deque[float]] = [deque(maxlen=_LAST) for _ in SIZES]
        self._counts = [0] * len(SIZES)
        self._settled = [False] * len(SIZES)
        self._seen = [0] * len(SIZES)
        self._patience = [stale_after] * len(SIZES)
        self._steps = 0

    def skip(self) -> None:
        """Count a step in which nothing was measured."""
        self._steps += 1

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long; larger ones than the largest size are passed over."""
        self._steps += 1
        index = bisect_left(SIZES, num_tokens)
        if index == len(SIZES) or seconds <= 0:
            return
        last = self._last[index]
        if self._steps - self._seen[index] > self._patience[index]:
            self._see_again(index, seconds)
        count = self._counts[index] = self._counts[index] + 1
        self._seen[index] = self._steps
        last.append(seconds)
        if count >= _ENOUGH or (count >= _FIRST and max(last) < _OUTLIER * min(last)):
            self._settled[index] = True
        if count <= _FIRST:  # any of which may have compiled something
            self._seconds[index] = min(last)
            return
        expected, lately = self._seconds[index], median(last)
        if not expected / _OFF <= lately <= expected * _OFF:
            self._seconds[index] = lately
            return
        seconds = min(max(seconds, expected / _OUTLIER), expected * _OUTLIER)
        drift = 1 + _DRIFT * (seconds / expected - 1)
        self._seconds = [known * drift for known in self._seconds]
        self._seconds[index] = expected + max(_WEIGHT, 1 / count) * (seconds - expected)

    def _see_again(self, index: int, seconds: float) -> None:
        """Compare the first measurement of a size that had become unknown with its last known time, or forget that."""
        known_s = self._seconds[index]
        if self._settled[index] and known_s / _OFF <= seconds <= known_s * _OFF:
            self._patience[index] = min(2 * self._patience[index], _MOST_PATIENCE * self.stale_after)
            return
        self._patience[index] = self.stale_after
        self._counts[index], self._settled[index] = 0, False
        self._last[index].clear()

    @property
    def is_empty(self) -> bool:
        """Whether no size is known."""
        return not any(self._known())

    def is_known(self, num_tokens: int) -> bool:
        """Whether steps of that size were measured lately."""
        index = bisect_left(SIZES, num_tokens)
        return index < len(SIZES) and self._known()[index]

    def seconds(self, sizes: NDArray[np.int64]) -> NDArray[np.float64]:
        """Of steps of `sizes` tokens: on a line between known sizes, and on the last such line beyond them.

        At least one size is known; with just one, all steps take as long.
        """
        known = self._known()
        at = np.array(list(compress(SIZES, known)))
        seconds = np.maximum.accumulate(np.array(list(compress(self._seconds, known))))
        slope = (seconds[-1] - seconds[-2]) / (at[-1] - at[-2]) if len(at) > 1 else 0.0
        return np.interp(sizes, at, seconds) + slope * np.maximum(0, sizes - at[-1])

    def seconds_if_known(self, num_tokens: int) -> float:
        """Of one step of so many tokens; 0 as long as no size is known."""
        return 0.0 if self.is_empty else float(self.seconds(np.array([num_tokens]))[0])

    def _known(self) -> list[bool]:
        return [
            settled and self._steps - seen <= patience
            for settled, seen, patience in zip(self._settled, self._seen, self._patience, strict=True)
        ]
