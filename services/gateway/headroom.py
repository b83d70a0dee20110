"""Room that is kept for tenants who have less than their share: a few places of a pool, so that none of them waits for one to
become free. Pure.

    one tenant in RECENT_S            nothing is kept: it may have everything
    several, and one has its share    it does not get the last places of a pool, 1 in PLACES_FOR_ONE
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

RECENT_S = 10.0
"""For so long after its last request, room is kept for a tenant."""
NOTED_EVERY_S = 1.0
PLACES_FOR_ONE = 8
MIN_KEPT = 2


class Spare(Protocol):
    """A pool: how many places it has, and how many of them are free, exactly up to `limit`."""

    @property
    def places(self) -> int: ...

    def spare(self, limit: int) -> int: ...


class _Places:
    """Who has how many places of a pool. Those promised to requests on their way count, though no worker knows of them yet."""

    def __init__(self) -> None:
        self.total = 0
        self._taken: dict[str, int] = {}

    def change(self, tenant: str, number: int) -> None:
        self.total += number
        taken = self._taken.get(tenant, 0) + number
        if taken:
            self._taken[tenant] = taken
        else:
            self._taken.pop(tenant, None)

    def are_kept_from(self, tenant: str, share: float, pool: Spare) -> bool:
        if self._taken.get(tenant, 0) <= share * pool.places:
            return False
        kept = min(max(MIN_KEPT, -(-pool.places // PLACES_FOR_ONE)), pool.places // 2)
        return self.total + kept >= pool.places or pool.spare(kept) <= kept  # other gateways' show in `spare`


class Headroom:
    def __init__(self) -> None:
        self.prefill = _Places()
        self.decode = _Places()
        self._seen: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._weights = 0.0
        self._last = ("", -NOTED_EVERY_S)

    @property
    def several(self) -> bool:
        """Whether more than one tenant has asked lately."""
        return len(self._seen) > 1

    def came(self, tenant: str, weight: float, now: float) -> None:
        """It sent a request."""
        if self._last[0] == tenant and now - self._last[1] < NOTED_EVERY_S and tenant in self._seen:
            return
        self._last = tenant, now
        _, before = self._seen.pop(tenant, (0.0, 0.0))
        self._weights += weight - before
        self._seen[tenant] = now, weight

    def tick(self, now: float) -> None:
        """Forget who has sent nothing lately."""
        while self._seen:
            tenant, (seen_at, weight) = next(iter(self._seen.items()))
            if now - seen_at <= RECENT_S:
                return
            del self._seen[tenant]
            self._weights = self._weights - weight if self._seen else 0.0

    def must_wait(self, tenant: str, weight: float, *, prefill: Spare | None, decode: Spare | None) -> bool:
        """Whether the places that are left are for others. A pool is None if it needs no place there."""
        others = self._weights - self._seen[tenant][1] if tenant in self._seen else self._weights
        if len(self._seen) <= (tenant in self._seen):
            return False
        share = weight / (weight + others)
        if prefill is not None and self.prefill.are_kept_from(tenant, share, prefill):
            return True
        return decode is not None and self.decode.are_kept_from(tenant, share, decode)
