"""KV blocks of workers of other hosts: one-sided reads over NIXL, whatever UCX finds between the two (RDMA, TCP).

    owner    registers its segments and a test pattern ─► answers DescribeMemory with addresses and its agent's metadata
    reader   adds the agent ─► reads and times the pattern ─► for each pull: blocks ─► staging ─► generations ─► its own pool

A read that does not end can't be taken back: released or not, its bytes may still arrive. So nothing is read into the pool
directly, but into a staging buffer, which stays taken until its read has ended, and its peer is left alone meanwhile.
Generations are read by a second operation, once the first has brought the blocks: what is compared is never older than what
was copied. They and the blocks' checksums are compared before anything is copied on to the pool.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from common.protocol.errors import StaleHandle, TransportUnavailable
from common.protocol.handles import WorkerRef
from common.protocol.transfer_messages import MemoryDescribed, MemoryRegion
from common.transfer.base import RemoteBlocks, check_handle, compare_generations, copy_blocks, runs
from common.transfer.checksums import crc32
from common.transfer.paths import KvPath
from common.transfer.segment import Segment
from common.transfer.transfer import Pulling

PATTERN_BYTES = 4 << 20
BUFFER_BYTES = 8 << 20
NUM_BUFFERS = 12
GENERATION_BYTES = 1 << 20
"""Behind a staging buffer, for the generations of its blocks: pools of other hosts may have 131,072 blocks."""
MAX_READS_PER_PEER = 3
"""A peer that stops answering takes this many buffers at most."""
RETRY_FIRST_S, RETRY_MOST_S = 1.0, 30.0
_POLL_FIRST_S, _POLL_MOST_S = 0.00005, 0.001


class Agent(Protocol):
    """What is used of `NixlAgent`."""

    name: str

    def register(self, memory: np.ndarray) -> None: ...
    def metadata(self) -> bytes: ...
    def connect(self, metadata: bytes) -> str: ...
    def disconnect(self, peer: str) -> None: ...
    def begin_read(self, peer: str, local: np.ndarray, remote: np.ndarray) -> int: ...
    def is_done(self, operation: int) -> bool: ...
    def release(self, operation: int) -> None: ...


class _OutOfTime(Exception):
    """An operation still runs, and nobody waits for it any longer."""

    def __init__(self, operation: int, message: str) -> None:
        super().__init__(message)
        self.operation = operation


class SharedMemory:
    """The owner's side: what workers of other hosts may read. Nothing of this process's Python runs while they do."""

    def __init__(self, agent: Agent, segments: Sequence[tuple[Segment, str]]) -> None:
        """segments: of each cache group, with its fingerprint. :raises ConfigError: they can't be registered."""
        self._agent = agent
        self._pattern = pattern(agent.name)
        agent.register(self._pattern)
        self._regions: list[MemoryRegion] = []
        for segment, fingerprint in segments:
            agent.register(segment.blocks)
            agent.register(segment.generations)
            addresses = segment.blocks.ctypes.data, segment.generations.ctypes.data
            self._regions.append(MemoryRegion(segment.name, fingerprint, segment.num_blocks, segment.block_bytes, *addresses))
        self._metadata = agent.metadata()

    def describe(self, worker: WorkerRef) -> MemoryDescribed:
        return MemoryDescribed(
            worker=worker,
            agent=self._agent.name,
            metadata=self._metadata,
            pattern=self._pattern.ctypes.data,
            pattern_bytes=self._pattern.nbytes,
            regions=self._regions,
        )


@dataclass(slots=True)
class _Peer:
    """An owner of blocks. `stuck`: reads that ran out of time, with their buffers; they may still write there.
    `is_broken`: its connection has failed, and must be made anew."""

    described: MemoryDescribed
    num_reads: int = 0
    stuck: list[tuple[int, np.ndarray]] = field(default_factory=list)
    is_broken: bool = False
    is_failing: bool = False
    """Its last read did not end well."""
    retry_at: float = 0.0
    retry_s: float = RETRY_FIRST_S


class NixlTransport(Pulling):
    """The reader's side. Reads from peers that were added before."""

    def __init__(
        self,
        agent: Agent,
        *,
        timeout_s: float,
        buffer_bytes: int = BUFFER_BYTES,
        num_buffers: int = NUM_BUFFERS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """timeout_s: of one operation, which copies `buffer_bytes` at most.

        :raises ConfigError: the staging buffers can't be registered.
        """
        self._agent = agent
        self._timeout_s = timeout_s
        self._clock = clock
        self._buffer_bytes = self.slice_bytes = buffer_bytes
        self._staging = np.empty((num_buffers, buffer_bytes + GENERATION_BYTES), np.uint8)
        agent.register(self._staging)
        self._free = list(self._staging)
        self._peers: dict[str, _Peer] = {}
        self._lost: dict[str, _Peer] = {}  # forgotten, but not all their reads have ended
        self._regions: dict[str, tuple[str, MemoryRegion]] = {}
        self._changed = threading.Condition()

    @property
    def num_free_buffers(self) -> int:
        with self._changed:
            self._sweep()
            return len(self._free)

    def knows(self, agent: str) -> bool:
        return agent in self._peers

    def staging_bytes(self, agent: str) -> int:
        """Return the size of the buffer in which a peer stages blocks; 0: it stages none, or is not known."""
        peer = self._peers.get(agent)
        return 0 if peer is None else peer.described.staging_bytes

    def is_failing(self, agent: str) -> bool:
        """Whether the last read of a peer that is known did not end well."""
        peer = self._peers.get(agent)
        return peer is not None and peer.is_failing

    def may_try(self, agent: str) -> bool:
        """Whether a peer that is known is not left alone now, after a read that failed."""
        with self._changed:
            self._sweep()
            peer = self._peers.get(agent)
            return peer is not None and not peer.stuck and self._clock() >= peer.retry_at

    def path_of(self, source: RemoteBlocks) -> KvPath:
        """See `Transport.path_of`."""
        return "nixl"

    def add(self, described: MemoryDescribed) -> None:
        """Make a peer's segments readable.

        :raises TransportUnavailable: its metadata is of no use here, or what it says of itself is impossible.
        """
        if (
            not 0 < described.pattern_bytes <= self._buffer_bytes
            or any(not 0 < region.block_bytes <= self._buffer_bytes for region in described.regions)
            or any(not 0 < 8 * region.num_blocks <= GENERATION_BYTES for region in described.regions)
        ):
            raise TransportUnavailable(f"{described.agent} has blocks that are too large for this reader, or too many")
        if any(self._regions.get(region.segment, (described.agent,))[0] != described.agent for region in described.regions):
            raise TransportUnavailable(f"{described.agent} names another worker's segment as its own")
        agent = described.agent
        self.forget(agent)
        with self._changed:
            peer = self._lost.pop(agent, None)
            if peer is None:
                self._connect(described)
                peer = _Peer(described)
            else:  # reads of its former life have not ended: it is connected anew once they have
                peer.described, peer.is_broken = described, True
            self._peers[agent] = peer
            self._regions |= {region.segment: (agent, region) for region in described.regions}

    def forget(self, agent: str) -> None:
        """The peer is gone. Harmless for one that is not known. Buffers of reads that have not ended stay taken until then.

        So does the connection: without it NIXL calls such reads failed, and their bytes may arrive all the same.
        """
        with self._changed:
            peer = self._peers.pop(agent, None)
            if peer is not None:
                self._lost[agent] = peer
                self._regions = {segment: known for segment, known in self._regions.items() if known[0] != agent}
                self._sweep()

    def measure(self, agent: str) -> float:
        """Return GB/s, from the second copy of the peer's test pattern on. Blocks: call it in a thread.

        :raises TransportUnavailable: it can't be copied, or what arrives is not the pattern.
        """
        described = self._peer(agent).described
        expected, best_s = pattern(agent, described.pattern_bytes), float("inf")
        for _ in range(3):
            with self._buffer(agent) as buffer:
                buffer[: len(expected)] = 0
                began_at = self._clock()
                self._copy(agent, buffer, [(described.pattern, described.pattern_bytes)])
                best_s = min(best_s, self._clock() - began_at)
                if not np.array_equal(buffer[: len(expected)], expected):
                    raise TransportUnavailable(f"the path to {agent} damages what it carries")
        return len(expected) / max(best_s, 1e-9) / 1e9

    def read(self, source: RemoteBlocks, into: np.ndarray, into_blocks: Sequence[int]) -> int:
        """See `Transport.read`. What is not of the handle's generations does not reach `into`.

        :raises TransportUnavailable: also when an operation takes longer than `timeout_s`, and for a while afterwards.
        """
        agent, region = self._regions.get(source.segment, ("", None))
        if region is None:
            raise TransportUnavailable(f"{source.segment} is on another host, which did not say how to reach it")
        if region.fingerprint != source.fingerprint:
            raise StaleHandle(f"{source.segment} holds the KV of another model or layout")
        if region.block_bytes != into.shape[1]:
            raise StaleHandle(f"{source.segment} has blocks of {region.block_bytes} bytes, not {into.shape[1]}")
        check_handle(region.num_blocks, source.blocks, source.generations)
        if source.checksums and len(source.checksums) != len(source.blocks):
            raise StaleHandle(f"a handle names {len(source.blocks)} blocks and {len(source.checksums)} checksums")
        if len(into_blocks) != len(source.blocks):
            raise StaleHandle(f"{len(source.blocks)} blocks don't fit into {len(into_blocks)}")
        size = self._buffer_bytes // region.block_bytes
        for start in range(0, len(source.blocks), size):
            chunk = slice(start, start + size)
            staged = source.blocks[chunk]
            with self._buffer(agent) as buffer:
                self._stage(agent, region, staged, source.generations[chunk], buffer)
                rows = buffer[: len(staged) * region.block_bytes].reshape(-1, region.block_bytes)
                for block, row, checksum in zip(staged, rows, source.checksums[chunk], strict=False):
                    if crc32(row.data) != checksum:
                        raise TransportUnavailable(f"block {block} of {source.segment} was damaged on its way")
                copy_blocks(rows, range(len(staged)), into, into_blocks[chunk])
        return len(source.blocks) * region.block_bytes

    def read_staged(
        self, agent: str, addresses: Sequence[int], checksums: Sequence[int], into: np.ndarray, into_blocks: Sequence[int]
    ) -> int:
        """Copy blocks that a peer has staged at `addresses` to `into[into_blocks]`; returns bytes. Blocks: call it in a
        thread. All of them together are not longer than a slice. Without the right checksums nothing reaches `into`.

        :raises StaleHandle: they are not in its staging buffer. :raises TransportUnavailable: as `read`.
        """
        described, size = self._peer(agent).described, into.shape[1]
        end = described.staging + described.staging_bytes - size
        if any(not described.staging <= address <= end for address in addresses):
            raise StaleHandle(f"{agent} has staged blocks outside its staging buffer")
        if not len(addresses) == len(checksums) == len(into_blocks) <= self._buffer_bytes // size:
            raise StaleHandle(f"{len(addresses)} staged blocks don't fit a buffer, or where they should go")
        with self._buffer(agent) as buffer:
            self._copy(agent, buffer, list(_stretches(addresses, size)))
            rows = buffer[: len(addresses) * size].reshape(-1, size)
            if any(crc32(row) != checksum for row, checksum in zip(rows, checksums, strict=True)):
                raise TransportUnavailable(f"a block of {agent} was damaged on its way, or given to another reader")
            return copy_blocks(rows, range(len(rows)), into, into_blocks)

    def _stage(
        self, agent: str, region: MemoryRegion, blocks: Sequence[int], generations: Sequence[int], buffer: np.ndarray
    ) -> None:
        """Bring blocks to the beginning of `buffer`. :raises StaleHandle: they are not of these generations any more."""
        size, first = region.block_bytes, min(blocks)
        found = runs(blocks, range(len(blocks)))
        self._copy(agent, buffer, [(region.blocks + block * size, count * size) for block, _, count in found])
        end = buffer[self._buffer_bytes :][: 8 * (max(blocks) - first + 1)]
        self._copy(agent, end, [(region.generations + 8 * first, end.nbytes)])
        current = end.view(np.uint64)
        compare_generations([int(current[block - first]) for block in blocks], blocks, generations)

    # -- one operation

    def _copy(self, agent: str, into: np.ndarray, stretches: Sequence[tuple[int, int]]) -> None:
        """Copy stretches (address, bytes) of the peer's memory to the beginning of `into`, one behind the other."""
        remote = np.array([(address, size, 0) for address, size in stretches], np.uint64)
        local = remote.copy()
        local[:, 0] = into.ctypes.data + np.cumsum(remote[:, 1]) - remote[:, 1]
        ends_at = self._clock() + self._timeout_s
        operation = self._agent.begin_read(agent, local, remote)
        pause_s = _POLL_FIRST_S
        try:
            while not self._agent.is_done(operation):
                if self._clock() >= ends_at:
                    raise _OutOfTime(operation, f"{agent} did not answer within {self._timeout_s:g} s")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _POLL_MOST_S)
        except TransportUnavailable:
            self._agent.release(operation)
            raise
        self._agent.release(operation)

    @contextmanager
    def _buffer(self, agent: str) -> Iterator[np.ndarray]:
        """A staging buffer for one operation at a time with a peer."""
        peer, buffer = self._take(agent)
        try:
            yield buffer
        except _OutOfTime as error:
            self._end(peer, buffer, error)
            raise TransportUnavailable(str(error)) from error
        except BaseException as error:
            self._end(peer, buffer, error)
            raise
        self._end(peer, buffer, None)

    def _take(self, agent: str) -> tuple[_Peer, np.ndarray]:
        ends_at = self._clock() + self._timeout_s
        with self._changed:
            while True:
                self._sweep()
                peer = self._peer(agent)
                if peer.stuck or self._clock() < peer.retry_at:
                    raise TransportUnavailable(f"{agent} did not answer lately")
                if self._free and peer.num_reads < (1 if peer.is_broken else MAX_READS_PER_PEER):
                    if peer.is_broken:
                        self._agent.disconnect(agent)
                        self._connect(peer.described)
                    peer.num_reads += 1
                    return peer, self._free.pop()
                if not self._changed.wait(max(0.0, ends_at - self._clock())):
                    raise TransportUnavailable(f"no buffer was free within {self._timeout_s:g} s to read from {agent}")

    def _end(self, peer: _Peer, buffer: np.ndarray, error: BaseException | None) -> None:
        """A read is over, or nobody waits for it any longer."""
        with self._changed:
            peer.num_reads -= 1
            if isinstance(error, _OutOfTime):
                peer.stuck.append((error.operation, buffer))
            else:
                self._free.append(buffer)
            if isinstance(error, _OutOfTime | TransportUnavailable):
                peer.is_failing = True
                peer.is_broken = not isinstance(error, _OutOfTime)
                peer.retry_at = self._clock() + peer.retry_s
                peer.retry_s = min(2 * peer.retry_s, RETRY_MOST_S)
            elif error is None:
                peer.is_failing = peer.is_broken = False
                peer.retry_s = RETRY_FIRST_S
            self._changed.notify_all()

    def _sweep(self) -> None:
        """Take buffers back whose reads have ended meanwhile. Call it with the lock."""
        for peer in (*self._peers.values(), *self._lost.values()):
            for stuck in list(peer.stuck):
                operation, buffer = stuck
                try:
                    if not self._agent.is_done(operation):
                        continue
                    peer.retry_at = 0.0  # it answers again
                except TransportUnavailable:
                    peer.is_broken = True
                self._agent.release(operation)
                peer.stuck = [other for other in peer.stuck if other is not stuck]
                self._free.append(buffer)
        for agent, peer in list(self._lost.items()):
            if not peer.stuck and not peer.num_reads:
                self._agent.disconnect(agent)
                del self._lost[agent]

    def _connect(self, described: MemoryDescribed) -> None:
        """:raises TransportUnavailable: its metadata is of no use here, or another agent's."""
        name = self._agent.connect(described.metadata)
        if name != described.agent:
            if name not in self._peers and name not in self._lost:
                self._agent.disconnect(name)
            raise TransportUnavailable(f"{described.agent} sent another agent's metadata, of {name}")

    def _peer(self, agent: str) -> _Peer:
        peer = self._peers.get(agent)
        if peer is None:
            raise TransportUnavailable(f"{agent} is not known here")
        return peer


def _stretches(addresses: Sequence[int], size: int) -> Iterator[tuple[int, int]]:
    """(address, bytes) of what is one behind the other."""
    start = 0
    for i in range(1, len(addresses) + 1):
        if i == len(addresses) or addresses[i] != addresses[i - 1] + size:
            yield addresses[start], (i - start) * size
            start = i


def pattern(agent: str, num_bytes: int = PATTERN_BYTES) -> np.ndarray:
    """Return the test pattern of an agent, uint8 [num_bytes]: another for each, so that nobody else's memory looks like it."""
    seed = int.from_bytes(hashlib.blake2b(agent.encode(), digest_size=8).digest(), "little")
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)
