"""Whether a prefix is fetched or computed: by the measured speed of fetches over each path, and that of prefill. Pure.

    a fetch has ended ─► measure(path, bytes, seconds)
    a store has a prefix ─► pays(path, bytes, tokens): no ─► it is computed, and the fetch counts as skipped

A path is taken to be fast until it is known to be slow: by the median of at least three fetches that were not much smaller,
since the time of a small one is mostly latency. What was measured is forgotten after `FORGET_S`. So a path that was found slow
is tried again from then on, and a single slow fetch decides nothing.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from common.transfer.paths import KvPath

FORGET_S = 30.0
"""A measurement counts for so many seconds."""
MIN_FETCHES = 3
"""With fewer measurements nothing is said of a path."""
MAX_FETCHES = 32
"""Measurements kept of each path, the latest."""
SMALLER = 4
"""Fetches of less than a quarter of the bytes in question are left out."""


class _Fetch(NamedTuple):
    at: float
    asked_bytes: int
    bytes_per_s: float


class FetchRates:
    """Of one worker. `prefill_tokens_per_s`: its measured speed of computing prompts, 0 where it is not known yet."""

    def __init__(self, prefill_tokens_per_s: Callable[[], float]) -> None:
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._fetches: dict[KvPath, deque[_Fetch]] = {}

    def measure(self, path: KvPath, num_bytes: int, seconds: float, now: float, *, asked_bytes: int = 0) -> None:
        """A fetch over `path` has ended well. `seconds`: of waiting and copying. `now`: of a monotonic clock. `asked_bytes`:
        what was asked for, where less came in the time that there was."""
        asked_bytes = max(asked_bytes, num_bytes)
        if asked_bytes > 0:
            fetches = self._fetches.setdefault(path, deque(maxlen=MAX_FETCHES))
            fetches.append(_Fetch(now, asked_bytes, max(num_bytes, 1) / max(seconds, 1e-6)))

    def bytes_per_s(self, path: KvPath, num_bytes: int, now: float) -> float:
        """Return the measured speed of fetches of about `num_bytes` or more; 0 where it is not known."""
        speeds = [
            fetch.bytes_per_s
            for fetch in self._fetches.get(path, ())
            if now - fetch.at <= FORGET_S and fetch.asked_bytes * SMALLER >= num_bytes
        ]
        return statistics.median(speeds) if len(speeds) >= MIN_FETCHES else 0.0

    def compute_s(self, num_tokens: int) -> float:
        """Return how long computing so many tokens of prompts takes; 0 where it is not known."""
        tokens_per_s = self._prefill_tokens_per_s()
        return num_tokens / tokens_per_s if tokens_per_s > 0 else 0.0

    def pays(self, path: KvPath, num_bytes: int, num_tokens: int, now: float, *, tested_bytes_per_s: float = 0.0) -> bool:
        """Whether fetching `num_bytes` over `path` takes no longer than computing the `num_tokens` whose KV they are.

        `tested_bytes_per_s`: of a test of the path, which counts until fetches were measured; 0: it was not tested. True where
        one of the two speeds is not known.
        """
        bytes_per_s = self.bytes_per_s(path, num_bytes, now) or tested_bytes_per_s
        computing_s = self.compute_s(num_tokens)
        return not bytes_per_s or not computing_s or num_bytes / bytes_per_s <= computing_s
