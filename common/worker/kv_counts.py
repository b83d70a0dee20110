"""What an engine's worker counts of KV: where that of each prompt came from, and what had to be computed again.

a prompt to compute ─► looked up: own cache ─► kvstore's memory, kvstore's disk, another host's kvstore ─► the rest is computed
a hand-off          ─► received ─► what is missing is computed again, and counted by the reason
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, get_args

from common.engine.timeline import DRAFTED, MOVED
from common.protocol.errors import StaleHandle, TransportUnavailable
from common.protocol.kv_messages import KvTraffic
from common.runtime.metrics import Metrics
from common.transfer.measured import TransferCounts

Tier = Literal["own", "kvstore_memory", "kvstore_disk", "kvstore_remote"]
"""Where a prefix was found: in this worker's own cache, in a kvstore's memory, on a kvstore's disk, in a kvstore of another
host."""

PREEMPTED = "preempted"
"""A reason of recomputation: blocks were given to others. Further ones are `timeline.MOVED` and the codes of hand-offs that
failed."""


class KvCounts:
    """Since the start of the process. One event loop only, but for `transfers`. `lease_ages`: of the leases that are held on
    this worker's blocks now, the age of each in seconds."""

    def __init__(self, metrics: Metrics, lease_ages: Callable[[], Sequence[float]]) -> None:
        self.transfers = TransferCounts(metrics)
        self._lease_ages = lease_ages
        self._looked_up = metrics.counter(
            "prefix_lookup_tokens_total", "Tokens of prompts to compute, whose KV was looked up in caches"
        )
        self._hits = metrics.counter("prefix_hit_tokens_total", "Tokens of prompts found in a cache, by tier", ["tier"])
        self._received_tokens = metrics.counter("kv_received_tokens_total", "Tokens whose KV was received at hand-offs")
        self._present_tokens = metrics.counter(
            "kv_handoff_cached_tokens_total", "Tokens of hand-offs whose KV was in this worker's own cache already"
        )
        self._received_bytes = metrics.counter("kv_received_bytes_total", "KV bytes received at hand-offs")
        self._streamed_bytes = metrics.counter(
            "kv_streamed_bytes_total", "KV bytes received at hand-offs while the prompt was still computed"
        )
        self._handoffs = metrics.counter(
            "kv_handoffs_total", "Hand-offs whose KV was fetched, by outcome: ok, or the code of what failed", ["outcome"]
        )
        self._recomputed = metrics.counter(
            "kv_recomputed_tokens_total", "Tokens computed although their KV had been computed before, by reason", ["reason"]
        )
        for outcome in ("ok", TransportUnavailable.code, StaleHandle.code):
            self._handoffs.labels(outcome)
        for reason in (PREEMPTED, MOVED, DRAFTED):
            self._recomputed.labels(reason)
        self._by_tier: dict[Tier, int] = dict.fromkeys(get_args(Tier), 0)
        for tier in self._by_tier:
            self._hits.labels(tier)
        self._num_looked_up = self._num_received = self._num_bytes = self._num_cached = 0
        self._again: Counter[str] = Counter()

    def looked_up(self, num_tokens: int) -> None:
        """A prompt of so many tokens is to be computed here."""
        self._looked_up.inc(num_tokens)
        self._num_looked_up += num_tokens

    def found(self, tier: Tier, num_tokens: int) -> None:
        """So many tokens of a prompt need not be computed."""
        self._hits.labels(tier).inc(num_tokens)
        self._by_tier[tier] += num_tokens

    def received(self, num_tokens: int, num_bytes: int, num_cached: int) -> None:
        """A hand-off has brought KV of `num_tokens` tokens; that of `num_cached` tokens was here already."""
        self._handoffs.labels("ok").inc()
        self._received_tokens.inc(num_tokens)
        self._received_bytes.inc(num_bytes)
        self._present_tokens.inc(num_cached)
        self._num_cached += num_cached
        self._num_received += num_tokens
        self._num_bytes += num_bytes

    def streamed(self, num_bytes: int) -> None:
        """Of the bytes of a hand-off that `received` counted, so many were here before its prompt had been computed."""
        self._streamed_bytes.inc(num_bytes)

    def not_received(self, code: str) -> None:
        """A hand-off brought nothing that can be used."""
        self._handoffs.labels(code).inc()

    def recomputed(self, num_tokens: int, reason: str) -> None:
        """Tokens were computed again. `reason`: `moved` (the request was continued from another worker), `preempted`, `drafted`
        (a head needs their hidden states), or the code with which a hand-off failed."""
        self._recomputed.labels(reason).inc(num_tokens)
        self._again[reason] += num_tokens

    def traffic(self) -> KvTraffic:
        """Return what a heartbeat says of all this."""
        ages = self._lease_ages()
        return KvTraffic(
            paths=self.transfers.totals(),
            looked_up_tokens=self._num_looked_up,
            own_tokens=self._by_tier["own"],
            memory_tokens=self._by_tier["kvstore_memory"],
            disk_tokens=self._by_tier["kvstore_disk"],
            remote_tokens=self._by_tier["kvstore_remote"],
            received_tokens=self._num_received,
            received_bytes=self._num_bytes,
            cached_tokens=self._num_cached,
            recomputed_tokens=self._again.total(),
            preempted_tokens=self._again[PREEMPTED],
            drafted_tokens=self._again[DRAFTED],
            leases=len(ages),
            oldest_lease_s=round(max(ages, default=0.0), 1),
        )
