"""Whether what a kvstore has of a prefix is fetched: decided once in a search for each path, by `FetchRates`, and counted."""

from __future__ import annotations

from collections.abc import Callable

from common.runtime.metrics import Metrics
from common.transfer.paths import KvPath
from common.worker.fetch_rate import FetchRates
from common.worker.store_lookups import Search


class FetchChoice:
    """Of one worker. `clock`: of what was measured, in seconds."""

    def __init__(self, rates: FetchRates, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._rates = rates
        self._clock = clock
        self._skipped = metrics.counter(
            "prefix_fetches_skipped_total", "Prefixes in a kvstore that were computed since that was faster, by path", ["path"]
        )

    def pays(self, path: KvPath, num_blocks: int, search: Search, *, tested_bytes_per_s: float = 0.0) -> bool:
        """Whether so many blocks are fetched rather than computed. `tested_bytes_per_s`: see `FetchRates.pays`."""
        if not num_blocks:
            return True
        if path not in search.pays:
            num_bytes, num_tokens, now = num_blocks * search.block_bytes, num_blocks * search.block_tokens, self._clock()
            search.pays[path] = not num_tokens or self._rates.pays(
                path, num_bytes, num_tokens, now, tested_bytes_per_s=tested_bytes_per_s
            )
            if not search.pays[path]:
                search.num_skipped += num_blocks
                self._skipped.labels(path).inc()
        return search.pays[path]

    def expects(self, path: KvPath, num_blocks: int, search: Search) -> bool:
        """Whether so many blocks would be fetched if they are there. Decides nothing."""
        if path in search.pays or not num_blocks * search.block_tokens:
            return search.pays.get(path, True)
        num_bytes, num_tokens = num_blocks * search.block_bytes, num_blocks * search.block_tokens
        return self._rates.pays(path, num_bytes, num_tokens, self._clock())

    def measured(self, path: KvPath, block_bytes: int, num_blocks: int, seconds: float, num_asked: int) -> None:
        """So many blocks came over a path in so many seconds, of those that were asked for."""
        self._rates.measure(path, num_blocks * block_bytes, seconds, self._clock(), asked_bytes=num_asked * block_bytes)

    def compute_s(self, num_tokens: int) -> float:
        """See `FetchRates.compute_s`."""
        return self._rates.compute_s(num_tokens)
