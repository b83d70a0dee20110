"""The threads that work on a stage's slots, and who has them first.

Fetches go before offers: a request waits for a fetch, and nobody for an offer. What is read out of a GPU for a kvstore stops
between two parts until nothing is written, or for `PATIENCE_S`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Generic, TypeVar

import numpy as np

from common.protocol.errors import TransportUnavailable
from common.transfer.block_memory import T
from common.transfer.paths import Operation

LOOK_EVERY_S = 0.5
"""Between two looks at whether the engine was given up, while copies run."""
PATIENCE_S = 0.05
"""Reads wait so long at most for writes to end."""

Slot = TypeVar("Slot")


class StageThreads(Generic[Slot]):
    """One thread for each slot."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._num_slots = len(slots)
        self._free = deque(slots)
        self._threads = ThreadPoolExecutor(len(slots), thread_name_prefix="kv-stage")
        self._precedence = _Precedence()
        self._closed = self._given_up = False

    @property
    def num_free_slots(self) -> int:
        return len(self._free)

    def in_parts(self, num_blocks: int, size: int, copy: Callable[[Slot, range], T], operation: Operation) -> list[T]:
        """Call `copy(slot, part)` in the threads for all parts of `num_blocks`, of `size` each; return the results in order.

        What one of them raises is raised when all that have begun have ended; no more begin then.

        :raises TransportUnavailable: the stage is closed.
        """
        parts = [range(start, min(start + size, num_blocks)) for start in range(0, num_blocks, size)]
        left, results = deque(enumerate(parts)), dict[int, T]()

        def copy_parts(slot: Slot, paused: np.ndarray) -> None:
            try:
                while left and not paused[0]:
                    try:
                        number, part = left.popleft()
                    except IndexError:  # another thread was faster
                        return
                    results[number] = copy(slot, part)
            except BaseException:
                left.clear()
                raise

        self.run(len(parts), copy_parts, lambda: bool(left), operation)
        return [results[number] for number in range(len(parts))]

    def run(
        self, num_parts: int, work: Callable[[Slot, np.ndarray], None], has_more: Callable[[], bool], operation: Operation
    ) -> None:
        """Call `work(slot, paused)` in as many threads as there are parts and slots, until `has_more()` is false.

        What is read stops where paused[0] is not 0, and goes on when nothing is written. Errors are raised when all have ended.

        :raises TransportUnavailable: the stage is closed, or its engine was given up.
        """
        if operation == "write":
            with self._precedence.first() as paused:
                self._once(num_parts, work, paused)
            return
        if not num_parts:
            self._once(0, work, np.zeros(1, np.int64))
        while has_more():
            self._once(num_parts, work, self._precedence.last())

    def _once(self, num_parts: int, work: Callable[[Slot, np.ndarray], None], paused: np.ndarray) -> None:
        if self._closed:
            raise TransportUnavailable("the stage is closed")

        def run() -> None:
            slot = self._free.pop()  # there is one for each thread
            try:
                work(slot, paused)
            finally:
                self._free.append(slot)

        running: list[Future[None]] = []
        try:
            for _ in range(min(self._num_slots, num_parts)):
                running.append(self._threads.submit(run))
        finally:
            while wait(running, timeout=LOOK_EVERY_S).not_done:
                if self._given_up:
                    raise TransportUnavailable("the engine was given up")
        for one in running:
            one.result()

    def close(self) -> None:
        """Wait for what is being copied, and end the threads. Harmless twice."""
        self._closed = True
        self._threads.shutdown(wait=not self._given_up, cancel_futures=self._given_up)

    def give_up(self) -> None:
        """Wait for no copy any more: the process is about to end."""
        self._closed = self._given_up = True


class _Precedence:
    """Who reads waits for who writes."""

    def __init__(self) -> None:
        self._running = np.zeros(1, np.int64)  # writes; threads in compiled code look at it
        self._never = np.zeros(1, np.int64)
        self._changed = threading.Condition()

    @contextmanager
    def first(self) -> Iterator[np.ndarray]:
        """Have reads take no further part meanwhile."""
        with self._changed:
            self._running[0] += 1
        try:
            yield self._never
        finally:
            with self._changed:
                self._running[0] -= 1
                self._changed.notify_all()

    def last(self) -> np.ndarray:
        """Wait until no write is under way, or for `PATIENCE_S`; return what tells by its first element, when it is not 0, that
        another has begun. That of one who has waited so long tells of none, so that reads make progress."""
        with self._changed:
            idle = self._changed.wait_for(lambda: not self._running[0], PATIENCE_S)
        return self._running if idle else self._never
