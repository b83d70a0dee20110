"""A transport inside one process, with faults on demand: what tests read through instead of shared memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from common.protocol.errors import StaleHandle, TransportUnavailable
from common.transfer.base import RemoteBlocks, check_generations, copy_blocks
from common.transfer.paths import KvPath
from common.transfer.transfer import Pulling


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """What goes wrong, counted in reads of one transport: `fail_every=3` hits the 3rd, 6th, 9th … read. 0: never.

    `fail`: nothing is copied. `truncate`: the first half of the blocks is copied, then the link breaks. `stale`: all is
    copied, then a block turns out to have been reused. `delay_s` comes before every copy.
    """

    fail_every: int = 0
    truncate_every: int = 0
    stale_every: int = 0
    delay_s: float = 0.0


class MemoryFabric:
    """The segments that exist, by (host, name): shared by all transports of a test."""

    def __init__(self) -> None:
        self._segments: dict[tuple[str, str], tuple[str, np.ndarray, np.ndarray]] = {}

    def add(self, host: str, segment: str, fingerprint: str, blocks: np.ndarray, generations: np.ndarray) -> None:
        """`blocks`: [num_blocks, block_bytes] uint8. `generations`: [num_blocks] uint64. Kept by reference."""
        self._segments[host, segment] = (fingerprint, blocks, generations)

    def remove(self, host: str, segment: str) -> None:
        """The owner died."""
        self._segments.pop((host, segment), None)

    def find(self, host: str, segment: str, fingerprint: str) -> tuple[np.ndarray, np.ndarray]:
        """Blocks and generations. :raises TransportUnavailable: no such segment. :raises StaleHandle: another model's."""
        found = self._segments.get((host, segment))
        if found is None:
            raise TransportUnavailable(f"no segment {segment} on host {host}")
        if found[0] != fingerprint:
            raise StaleHandle(f"{segment} holds the KV of another model or layout")
        return found[1], found[2]


class MemoryTransport(Pulling):
    """Reads from a `MemoryFabric`, as `ShmTransport` does from shared memory."""

    def __init__(
        self, fabric: MemoryFabric, faults: Faults | None = None, *, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.fabric = fabric
        self.faults = faults or Faults()
        self.reads = 0
        self._sleep = sleep
        self._lock = threading.Lock()

    def path_of(self, source: RemoteBlocks) -> KvPath:
        """See `Transport.path_of`."""
        return "memory"

    def read(self, source: RemoteBlocks, into: np.ndarray, into_blocks: Sequence[int]) -> int:
        """See `Transport.read`."""
        with self._lock:
            self.reads += 1
            number = self.reads
        if self.faults.delay_s:
            self._sleep(self.faults.delay_s)
        if _hits(number, self.faults.fail_every):
            raise TransportUnavailable("injected: the link is down")
        theirs, current = self.fabric.find(source.host, source.segment, source.fingerprint)
        check_generations(current, source.blocks, source.generations)
        if _hits(number, self.faults.truncate_every):
            half = len(source.blocks) // 2
            copy_blocks(theirs, source.blocks[:half], into, into_blocks[:half])
            raise TransportUnavailable("injected: the link broke in the middle")
        copied = copy_blocks(theirs, source.blocks, into, into_blocks)
        if _hits(number, self.faults.stale_every):
            raise StaleHandle("injected: a block was reused")
        check_generations(current, source.blocks, source.generations)
        return copied


def _hits(number: int, every: int) -> bool:
    return every > 0 and number % every == 0
