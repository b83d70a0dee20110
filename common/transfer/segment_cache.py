"""Other processes' segments, kept open between uses."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

MAX_OPEN = 64
LOOK_EVERY_S = 0.25
"""How often what is open is looked at: an owner's successor needs the memory."""


class Openable(Protocol):
    """What the cache keeps. It is closed with the last reference, so that threads may go on with what they have."""

    def is_current(self) -> bool: ...


T = TypeVar("T", bound=Openable)


class SegmentCache(Generic[T]):
    """`open(name, fingerprint)` opens one. What is open keeps the memory of a dead owner alive, so those that are out of date
    are let go, in a thread: unmapping gigabytes takes a while. Safe to call from several threads."""

    def __init__(self, open: Callable[[str, str], T]) -> None:
        self._open = open
        self._segments: OrderedDict[tuple[str, str], T] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None

    def get(self, name: str, fingerprint: str) -> T:
        """:raises TransportUnavailable, StaleHandle: what `open` raises."""
        key = (name, fingerprint)
        with self._lock:
            segment = self._segments.get(key)
            if segment is None or not segment.is_current():
                self._segments.pop(key, None)
                while len(self._segments) >= MAX_OPEN:
                    self._segments.popitem(last=False)
                segment = self._segments[key] = self._open(name, fingerprint)
                self._watch()
            self._segments.move_to_end(key)
            return segment

    def opened(self) -> list[T]:
        """Return all that are open."""
        with self._lock:
            return list(self._segments.values())

    def close(self) -> None:
        """Nothing is open afterwards, nor being let go. Harmless twice."""
        self._closed.set()
        with self._lock:
            self._segments.clear()
            watcher = self._watcher
        if watcher is not None:
            watcher.join()

    def let_go(self) -> None:
        """Let go of those that are out of date."""
        with self._lock:
            outdated = [key for key, segment in self._segments.items() if not segment.is_current()]
            gone = [self._segments.pop(key) for key in outdated]
        gone.clear()  # without the lock

    def _watch(self) -> None:
        if self._watcher is None and not self._closed.is_set():
            arguments = weakref.ref(self), self._closed
            self._watcher = threading.Thread(target=_watch, args=arguments, name="let-go", daemon=True)
            self._watcher.start()


def _watch(cache: weakref.ref[SegmentCache[Any]], closed: threading.Event) -> None:
    while not closed.wait(LOOK_EVERY_S) and (watched := cache()) is not None:
        watched.let_go()
        del watched
