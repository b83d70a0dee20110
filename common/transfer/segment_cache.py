"""Other processes' segments, kept open between uses."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

MAX_OPEN = 64


class Openable(Protocol):
    """What the cache keeps. It is closed with the last reference, so that threads may go on with what they have."""

    def is_current(self) -> bool: ...


T = TypeVar("T", bound=Openable)


class SegmentCache(Generic[T]):
    """`open(name, fingerprint)` opens one. What is open keeps the memory of a dead owner alive, so those that are out of date
    are let go whenever a new one is opened. Safe to call from several threads."""

    def __init__(self, open: Callable[[str, str], T]) -> None:
        self._open = open
        self._segments: OrderedDict[tuple[str, str], T] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()

    def get(self, name: str, fingerprint: str) -> T:
        """:raises TransportUnavailable, StaleHandle: what `open` raises."""
        key = (name, fingerprint)
        with self._lock:
            segment = self._segments.get(key)
            if segment is None or not segment.is_current():
                for outdated in [known for known, other in self._segments.items() if not other.is_current()]:
                    del self._segments[outdated]
                while len(self._segments) >= MAX_OPEN:
                    self._segments.popitem(last=False)
                segment = self._segments[key] = self._open(name, fingerprint)
            self._segments.move_to_end(key)
            return segment

    def opened(self) -> list[T]:
        """Return all that are open."""
        with self._lock:
            return list(self._segments.values())

    def close(self) -> None:
        with self._lock:
            self._segments.clear()
