"""KV blocks in shared memory: a file on a tmpfs that every worker of the host maps (its layout: `segment_file`).

The owner takes all its memory when it makes it, holds an flock on it for life and unlinks it at the end. When a process dies
the kernel drops its flock, so the next worker that starts can tell and sweep the file away. A reader maps it read-only and
copies straight out of the owner's blocks; that the owner may reuse a block meanwhile is caught by its generation, which the
owner raises before it writes. Containers that mount the same tmpfs share it (see `host_id`).

Where the blocks are in a GPU's memory the file ends before them: it holds the generations, and in its header how to reach
that memory (see `cuda_ipc`). A kvstore's segments are read and written by others, too (see `store_segment`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from common.protocol.errors import ConfigError, PenstockError, StaleHandle, TransportUnavailable
from common.transfer.base import RemoteBlocks, check_generations, copy_blocks
from common.transfer.fence import memory_fence
from common.transfer.mapping import MappingThread
from common.transfer.paths import KvPath
from common.transfer.pinned_memory import PinnedMemory
from common.transfer.segment import Segment
from common.transfer.segment_cache import SegmentCache
from common.transfer.store_segment import StoreSegment
from common.transfer.transfer import Pulling


def mapped_segments(directory: str | Path) -> SegmentCache[Segment]:
    """Other workers' segments, mapped to read."""
    return SegmentCache(lambda name, fingerprint: Segment.open(directory, name, fingerprint=fingerprint))


class ShmTransport(Pulling):
    """Reads from segments of the same host."""

    def __init__(self, directory: str | Path) -> None:
        """:raises ConfigError: if `directory` does not exist, or this processor has no fence (see `fence`)."""
        self.host = host_id(directory)
        self._segments = mapped_segments(directory)
        self._fence = memory_fence()

    def path_of(self, source: RemoteBlocks) -> KvPath:
        """See `Transport.path_of`."""
        return "shm"

    def read(self, source: RemoteBlocks, into: np.ndarray, into_blocks: Sequence[int]) -> int:
        """See `Transport.read`."""
        if source.host != self.host:
            raise TransportUnavailable(f"{source.segment} is in another host's shared memory")
        segment = self._segments.get(source.segment, source.fingerprint)
        theirs, current = segment.blocks, segment.generations
        if segment.device_memory:
            raise TransportUnavailable(f"the blocks of {source.segment} are in a GPU's memory")
        if theirs.shape[1] != into.shape[1]:
            raise StaleHandle(f"{source.segment} has blocks of {theirs.shape[1]} bytes, not {into.shape[1]}")
        check_generations(current, source.blocks, source.generations)
        copied = copy_blocks(theirs, source.blocks, into, into_blocks)
        self._fence()  # the copy comes before the generations are read
        check_generations(current, source.blocks, source.generations)
        return copied

    def close(self) -> None:
        self._segments.close()


class StoreTransport(Pulling):
    """Reads and writes blocks that kvstores of the same host keep."""

    def __init__(self, directory: str | Path, pinned: PinnedMemory | None = None) -> None:
        """`pinned`: where their memory is to be pinned. :raises ConfigError: as `ShmTransport`."""
        self.host = host_id(directory)
        fence = memory_fence()
        self._segments: SegmentCache[StoreSegment] = SegmentCache(
            lambda name, fingerprint: StoreSegment(directory, name, fingerprint=fingerprint, fence=fence, pinned=pinned)
        )
        self._mapping = MappingThread(self._segments.opened)

    def path_of(self, source: RemoteBlocks) -> KvPath:
        """See `Transport.path_of`."""
        return "kvstore"

    def read(self, source: RemoteBlocks, into: np.ndarray, into_blocks: Sequence[int]) -> int:
        """See `Transport.read`."""
        if source.host != self.host:
            raise TransportUnavailable(f"{source.segment} is in another host's shared memory")
        segment = self._segments.get(source.segment, source.fingerprint)
        return segment.read(source.blocks, source.generations, into, into_blocks)

    def lends(self, segment: str, fingerprint: str) -> bool:
        """See `StoreSegment.lends`. False also where there is no such segment."""
        try:
            return self._segments.get(segment, fingerprint).lends
        except PenstockError:
            return False

    def lend(
        self, segment: str, fingerprint: str, row_bytes: int, blocks: Sequence[int], generations: Sequence[int]
    ) -> AbstractContextManager[np.ndarray]:
        """See `StoreSegment.lend`."""
        self._mapping.start()
        return self._segments.get(segment, fingerprint).lend(row_bytes, blocks, generations)

    def write(
        self,
        segment: str,
        fingerprint: str,
        blocks: Sequence[int],
        source: np.ndarray,
        source_blocks: Sequence[int],
        generations: Sequence[int] = (),
    ) -> None:
        """Copy `source[source_blocks]` to blocks that a kvstore granted, with `generations` if it said. Blocks: call it in a
        thread.

        :raises StaleHandle, TransportUnavailable: see `StoreSegment.write`.
        """
        self._segments.get(segment, fingerprint).write(source, source_blocks, blocks, generations)

    def close(self) -> None:
        self._mapping.close()
        self._segments.close()


def host_id(directory: str | Path) -> str:
    """Names the shared memory behind `directory`: equal where two processes can map each other's segments.

    The boot id alone is not enough: two containers of a host share the kernel but may each have a tmpfs of their own.

    :raises ConfigError: if `directory` does not exist.
    """
    try:
        found = Path(directory).stat()
    except OSError as error:
        raise ConfigError(f"shm_dir {directory} can't be used: {error.strerror}", param="shm_dir") from error
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = os.uname().nodename
    return hashlib.blake2b(f"{boot}:{found.st_dev}:{found.st_ino}".encode(), digest_size=8).hexdigest()
