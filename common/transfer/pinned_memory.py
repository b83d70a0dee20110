"""Memory of this process that a GPU's driver has pinned, so that its copy engine reads and writes it without the host's help.

pin ─► used by copies ─► unpin, which waits for the copies that use it
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
from numpy.typing import NDArray

from common.protocol.errors import TransportUnavailable
from common.runtime import logs

log = logs.get("transfer")


class PinnedMemory:
    """Ranges of addresses that don't overlap. Safe to call from several threads.

    `register(address, num_bytes)` has the driver pin memory, `unregister(address)` ends it; both raise TransportUnavailable.
    """

    def __init__(self, register: Callable[[int, int], None], unregister: Callable[[int], None]) -> None:
        self._register, self._unregister = register, unregister
        self._starts = self._ends = np.empty(0, np.int64)  # of ranges, rising
        self._uses: list[NDArray[np.int64]] = []
        """Of each copy that is under way, the starts of the ranges that it uses."""
        self._changed = threading.Condition()
        self._refused = self._given_up = False

    @property
    def refused(self) -> bool:
        """Whether nothing more is pinned."""
        return self._refused or self._given_up

    @property
    def num_bytes(self) -> int:
        with self._changed:
            return int((self._ends - self._starts).sum())

    def pin(self, address: int, num_bytes: int) -> bool:
        """Have the driver pin memory; return whether it is. After a refusal nothing more is. Blocks: 0.2 ms a megabyte."""
        if self.refused:
            return False
        try:
            self._register(address, num_bytes)
        except TransportUnavailable as error:
            self._refused = True
            log.warning(
                "kvstore_not_pinned",
                reason=str(error),
                bytes=num_bytes,
                consequence="KV passes to and from it through the stage",
            )
            return False
        with self._changed:
            place = int(np.searchsorted(self._starts, address))
            self._starts = np.insert(self._starts, place, address)
            self._ends = np.insert(self._ends, place, address + num_bytes)
        return True

    def unpin(self, address: int) -> None:
        """Wait for copies that use the range that begins at an address, and have it pinned no longer."""
        with self._changed:
            place = int(np.searchsorted(self._starts, address))
            if place == len(self._starts) or self._starts[place] != address:
                return
            self._starts, self._ends = np.delete(self._starts, place), np.delete(self._ends, place)
            self._changed.wait_for(lambda: self._given_up or not any(address in use for use in self._uses))
        if self._given_up:  # the driver may never answer
            return
        with suppress(TransportUnavailable):  # the GPU failed, and the process ends
            self._unregister(address)

    @contextmanager
    def used(self, addresses: NDArray[np.int64], num_bytes: int) -> Iterator[NDArray[np.bool_]]:
        """Tell of which of these addresses so many bytes are pinned: bool, as many. They stay so inside."""
        with self._changed:
            places = np.searchsorted(self._starts, addresses, "right") - 1
            pinned = places >= 0
            pinned[pinned] = addresses[pinned] + num_bytes <= self._ends[places[pinned]]
            mine = self._starts[places[pinned]]
            self._uses.append(mine)
        try:
            yield pinned
        finally:
            with self._changed:
                self._uses = [use for use in self._uses if use is not mine]
                self._changed.notify_all()

    def give_up(self) -> None:
        """The GPU hangs, and the process is about to end: pin nothing, and wait for no copy."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()
