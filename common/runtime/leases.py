"""Leases: what others may still need of mine, each until its holder stops renewing it. Pure: `now` is an argument.

An owner grants a lease on a value (KV blocks, a finished request), the holder renews it once a second, and either a
release or the end of the lease gives the value back, exactly once, to be freed. While the bus is away nobody can renew,
so the owner pauses the table and time does not count.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

import msgspec

from common.protocol.handles import WorkerRef

T = TypeVar("T")


class _Lease(msgspec.Struct, Generic[T]):
    holder: WorkerRef
    value: T
    granted_at: float
    ends_at: float


class LeaseTable(Generic[T]):
    """Keys are unique in a table. Every value that was granted comes back exactly once: from `release`, `expire`,
    `release_holder` or `clear`."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._leases: dict[str, _Lease[T]] = {}
        self._paused_at: float | None = None

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, key: str) -> bool:
        return key in self._leases

    def keys(self) -> list[str]:
        return list(self._leases)

    def values(self) -> list[T]:
        """A copy: the table may change while it is walked."""
        return [lease.value for lease in self._leases.values()]

    def ages(self, now: float) -> list[tuple[T, float]]:
        """Each value with the seconds since it was granted, however often its lease was renewed."""
        return [(lease.value, max(0.0, now - lease.granted_at)) for lease in self._leases.values()]

    def get(self, key: str) -> T | None:
        lease = self._leases.get(key)
        return None if lease is None else lease.value

    def holder(self, key: str) -> WorkerRef | None:
        lease = self._leases.get(key)
        return None if lease is None else lease.holder

    def grant(self, key: str, holder: WorkerRef, value: T, now: float) -> None:
        """:raises KeyError: if `key` is held already: the value it has would never be freed."""
        if key in self._leases:
            raise KeyError(f"lease {key} is held already")
        self._leases[key] = _Lease(holder, value, now, now + self.lease_s)

    def move(self, key: str, holder: WorkerRef, now: float) -> bool:
        """Give the lease to another holder, with a whole new term. False if it has ended."""
        lease = self._leases.get(key)
        if lease is None:
            return False
        lease.holder = holder
        lease.ends_at = now + self.lease_s
        return True

    def renew(self, holder: WorkerRef, keys: Iterable[str], now: float) -> list[str]:
        """A whole new term for each key that `holder` has in its present epoch. Returns the keys that it doesn't hold."""
        unknown: list[str] = []
        for key in keys:
            lease = self._leases.get(key)
            if lease is None or lease.holder != holder:
                unknown.append(key)
            else:
                lease.ends_at = now + self.lease_s
        return unknown

    def release(self, key: str) -> T | None:
        """The value to free, or None if the lease has ended before. Harmless twice."""
        lease = self._leases.pop(key, None)
        return None if lease is None else lease.value

    def release_holder(self, worker_id: str) -> list[tuple[str, T]]:
        """End every lease of a worker that is lost, whatever its epoch."""
        return self._pop([key for key, lease in self._leases.items() if lease.holder.id == worker_id])

    def expire(self, now: float) -> list[tuple[str, T]]:
        """End the leases whose term is over; nothing while the table is paused."""
        if self._paused_at is not None:
            return []
        return self._pop([key for key, lease in self._leases.items() if lease.ends_at <= now])

    def clear(self) -> list[tuple[str, T]]:
        """End every lease: this worker was fenced, or stops."""
        return self._pop(list(self._leases))

    def pause(self, now: float) -> None:
        """The bus is away: nobody can renew. Harmless twice."""
        if self._paused_at is None:
            self._paused_at = now

    def resume(self, now: float) -> None:
        """The bus is back: the time away does not count, and no lease gets more than a whole term."""
        if self._paused_at is None:
            return
        away_s = max(now - self._paused_at, 0.0)
        self._paused_at = None
        for lease in self._leases.values():
            lease.ends_at = min(lease.ends_at + away_s, now + self.lease_s)

    def _pop(self, keys: list[str]) -> list[tuple[str, T]]:
        return [(key, self._leases.pop(key).value) for key in keys]
