"""KV blocks between processes of a host whose pools are in GPU memory: one copy on the reader's GPU, over NVLink or at home.

The owner's segment (see `shm`) holds the generations, and in its header the CUDA IPC handle of the pool: 64 bytes, and the
pool's offset in its allocation. The reader opens it once per owner, in the context of its own GPU: a kernel on that GPU may
then read the memory wherever it is. What the owner has announced is complete, since its step has ended; that it may reuse a
block meanwhile is caught by the generations, before and after the copy.

The pool must be one plain cudaMalloc: memory of an allocator with expandable segments has no such handle. Two containers need
a common IPC namespace (`ipc: host`). Where a handle can't be opened, the transport is unavailable and the KV is computed anew.

What a reader has opened stays allocated, even if its owner dies. So a thread looks every second whose segment is gone: the
dead one's successor needs that memory.
"""

from __future__ import annotations

import contextlib
import functools
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from common.protocol.errors import StaleHandle, TransportUnavailable
from common.runtime import logs
from common.transfer.base import RemoteBlocks, check_generations
from common.transfer.cuda_driver import HANDLE_BYTES, CudaDriver
from common.transfer.fence import memory_fence
from common.transfer.paths import KvPath
from common.transfer.segment import Segment
from common.transfer.segment_cache import SegmentCache
from common.transfer.shm import ShmTransport, mapped_segments
from common.transfer.transfer import Pulling

if TYPE_CHECKING:
    import torch

log = logs.get("transfer")

_MEMORY = struct.Struct(f"<{HANDLE_BYTES}sQ")  # handle, offset of the pool in the allocation
_NO_HANDLE = bytes(HANDLE_BYTES)
_LOOK_EVERY_S = 1.0
_SLICE_BYTES = 512 << 20  # 1.5 ms over NVLink; each slice costs a launch and two looks at the generations
_IDS = 4096  # of blocks, in pinned memory: more get it when they come
_PROGRAMS = 64  # enough to keep NVLink full; the other multiprocessors belong to the step that runs meanwhile


class Driver(Protocol):
    """The part of a GPU's driver that hands memory from process to process."""

    def export(self, pointer: int) -> tuple[bytes, int]:
        """The handle of the allocation that holds `pointer`, and the offset in it. :raises TransportUnavailable:"""
        ...

    def open(self, handle: bytes) -> tuple[int, int]:
        """Address and bytes of another process's allocation. :raises TransportUnavailable:"""
        ...

    def close(self, pointer: int) -> None: ...


def export_pool(pool: torch.Tensor, driver: Driver | None = None) -> bytes:
    """What the pool's segment says in `device_memory`. The memory must live as long as the segment.

    Some sandboxes let no process share a GPU's memory: the segment then names no handle, its KV is computed anew elsewhere, and
    a warning says so.
    """
    try:
        return _MEMORY.pack(*(driver or CudaDriver(pool.device.index)).export(pool.data_ptr()))
    except TransportUnavailable as error:
        log.warning("kv_pool_not_shared", reason=str(error), hint="expandable_segments, or a sandbox without CUDA IPC")
        return _MEMORY.pack(_NO_HANDLE, 0)


class LocalTransport(Pulling):
    """Reads KV of other workers of this host: out of shared memory, or from GPU to GPU once a pool is attached."""

    def __init__(self, directory: str) -> None:
        """:raises ConfigError: if `directory` does not exist."""
        self._shm = ShmTransport(directory)
        self._segments = mapped_segments(directory)
        self._fence = memory_fence()
        self._device: _DeviceReader | None = None

    @property
    def host(self) -> str:
        return self._shm.host

    def attach(self, pools: Mapping[str, torch.Tensor], driver: Driver | None = None) -> None:
        """From now on blocks are copied into the pool of their fingerprint, [num_blocks, …], contiguous, on a GPU; `into` of
        `read` is not used. pools: of each cache group, on one GPU."""
        index = next(iter(pools.values())).device.index
        self.slice_bytes = _SLICE_BYTES
        self._device = _DeviceReader(pools, self._segments, driver or CudaDriver(index))

    def path_of(self, source: RemoteBlocks) -> KvPath:
        """See `Transport.path_of`."""
        return "shm" if self._device is None else "cuda_ipc"

    def read(self, source: RemoteBlocks, into: np.ndarray, into_blocks: Sequence[int]) -> int:
        """See `Transport.read`."""
        if self._device is None:
            return self._shm.read(source, into, into_blocks)
        if source.host != self.host:
            raise TransportUnavailable(f"{source.segment} is on another host")
        return self._device.read(source, into_blocks)

    def begin(self, source: RemoteBlocks, into: np.ndarray, into_blocks: Sequence[int]) -> Callable[[], int] | None:
        """See `Transport.begin`: a kernel is launched, if the owner's pool is open here and no other copy is under way."""
        if self._device is None or source.host != self.host:
            return None
        return self._device.begin(source, into_blocks)

    def prepare(self, source: RemoteBlocks, into: np.ndarray, into_blocks: Sequence[int]) -> Callable[[], int] | None:
        """See `Transport.prepare`: the owner's pool is opened, and block ids are on the GPU."""
        if self._device is None or source.host != self.host:
            return None
        return self._device.prepare(source, into_blocks)

    def progress_of(self, host: str, segment: str, fingerprint: str) -> Callable[[], int] | None:
        """See `Transport.progress_of`."""
        if host != self.host:
            return None
        try:
            found = self._segments.get(segment, fingerprint)
        except (StaleHandle, TransportUnavailable):
            return None
        progress, fence = found.progress, self._fence

        def ran() -> int:
            step = int(progress[0])
            fence()  # the word is read before what was complete when it was written
            return step

        return ran

    def close(self) -> None:
        if self._device is not None:
            self._device.close()
        self._segments.close()
        self._shm.close()


class _DeviceReader:
    """Copies into `pools` what other processes keep on GPUs. One copy at a time: they share a link anyway."""

    def __init__(self, pools: Mapping[str, torch.Tensor], segments: SegmentCache[Segment], driver: Driver) -> None:
        import torch

        self._pools = {fingerprint: pool.view(torch.uint8).flatten(1) for fingerprint, pool in pools.items()}
        self._device = next(iter(pools.values())).device
        self._segments = segments
        self._driver = driver
        # beside the steps: a copy waits for nothing that runs, and nothing that runs waits for it
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._fence = memory_fence()
        self._opened: dict[tuple[str, str, bytes], int] = {}
        self._lock = threading.Lock()
        """Held while a copy is under way, from its launch to its end, perhaps by two threads."""
        self._ids = _pinned(0 if self._stream is None else _IDS)
        if self._stream is not None:  # the first request does not wait for a compiler; of even numbers of ids it makes another
            for pool in self._pools.values():
                for count in (1, 2):
                    self._launch(pool, [0] * count, pool, [0] * count)
                    self._stream.synchronize()
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="cuda-ipc", daemon=True)
        self._watcher.start()

    def read(self, source: RemoteBlocks, into_blocks: Sequence[int]) -> int:
        """See `Transport.read`."""
        segment, key = self._checked(source, into_blocks)
        self._lock.acquire()
        return self._launched(segment, key, source, into_blocks)()

    def begin(self, source: RemoteBlocks, into_blocks: Sequence[int]) -> Callable[[], int] | None:
        """See `Transport.begin`."""
        try:
            segment, key = self._checked(source, into_blocks)
            if not self._lock.acquire(blocking=False):
                return None
            if key not in self._opened:
                self._lock.release()
                return None
            return self._launched(segment, key, source, into_blocks)
        except (StaleHandle, TransportUnavailable):
            return None

    def prepare(self, source: RemoteBlocks, into_blocks: Sequence[int]) -> Callable[[], int] | None:
        """See `Transport.prepare`."""
        try:
            segment, key = self._checked(source, into_blocks)
            with self._lock:
                self._theirs(key, len(segment.generations), segment.block_bytes)
            ids = self._new_ids(source.blocks, into_blocks)
        except (StaleHandle, TransportUnavailable, RuntimeError):
            return None

        def copy() -> int:
            self._lock.acquire()
            return self._launched(segment, key, source, into_blocks, ids)()

        return copy

    def _checked(self, source: RemoteBlocks, into_blocks: Sequence[int]) -> tuple[Segment, tuple[str, str, bytes]]:
        """Return the owner's segment, and by what its pool is known when it is open.

        :raises StaleHandle, TransportUnavailable: the blocks can't be read.
        """
        segment = self._segments.get(source.segment, source.fingerprint)
        memory, block_bytes = segment.device_memory, segment.block_bytes
        if not memory:
            raise TransportUnavailable(f"the blocks of {source.segment} are not in a GPU's memory")
        pool = self._pools.get(source.fingerprint)
        if pool is None or block_bytes != pool.shape[1]:
            raise StaleHandle(f"{source.segment} has blocks of {block_bytes} bytes and of another kind than this worker's")
        check_generations(segment.generations, source.blocks, source.generations)
        if len(into_blocks) != len(source.blocks):
            raise StaleHandle(f"{len(source.blocks)} blocks don't fit into {len(into_blocks)}")
        return segment, (source.segment, source.fingerprint, memory)

    def _launched(
        self,
        segment: Segment,
        key: tuple[str, str, bytes],
        source: RemoteBlocks,
        into_blocks: Sequence[int],
        ids: torch.Tensor | None = None,
    ) -> Callable[[], int]:
        """Launch a copy; return what waits for it. The lock is the caller's, and is given back when the copy has ended.
        ids: of both sides' blocks, if they are on the device already.

        :raises TransportUnavailable: nothing was launched, and the lock was given back.
        """
        try:
            theirs = self._theirs(key, len(segment.generations), segment.block_bytes)
            self._launch(theirs, source.blocks, self._pools[source.fingerprint], into_blocks, ids)
        except BaseException as error:
            self._lock.release()
            if isinstance(error, (RuntimeError, ValueError)):
                raise TransportUnavailable(f"copying from {source.segment} failed: {error}") from error
            raise
        return functools.partial(self._finish, segment.generations, source, len(into_blocks) * segment.block_bytes)

    def _finish(self, current: np.ndarray, source: RemoteBlocks, num_bytes: int) -> int:
        """Wait for the copy that was launched. Errors: see `Transport.read`."""
        try:
            if self._stream is not None:
                self._stream.synchronize()
        except RuntimeError as error:
            raise TransportUnavailable(f"copying from {source.segment} failed: {error}") from error
        finally:
            self._lock.release()
        self._fence()  # the copy comes before the generations are read
        check_generations(current, source.blocks, source.generations)
        return num_bytes

    def close(self) -> None:
        self._closed.set()
        self._watcher.join()
        with self._lock:
            for pointer in self._opened.values():
                self._driver.close(pointer)
            self._opened.clear()

    def _theirs(self, key: tuple[str, str, bytes], num_blocks: int, block_bytes: int) -> torch.Tensor:
        """The owner's pool as a tensor of the reader's device, uint8 [num_blocks, block_bytes]."""
        import torch

        handle, offset = _MEMORY.unpack(key[2])
        pointer = self._opened.get(key)
        size = num_blocks * block_bytes
        if handle == _NO_HANDLE:
            raise TransportUnavailable(f"{key[0]} is in memory that its owner can't share")
        if pointer is None:
            self._forget_the_dead()
            pointer, allocated = self._driver.open(handle)
            if offset + size > allocated:
                self._driver.close(pointer)
                raise TransportUnavailable(f"{key[0]} is damaged: its pool is larger than its allocation")
            self._opened[key] = pointer
        # made from the address alone: torch would ask the driver which GPU owns it and refuse to read that from here
        storage: Any = torch._C._construct_storage_from_data_pointer(pointer + offset, self._device, size)
        whole: Any = torch.empty(0, dtype=torch.uint8, device=self._device)
        return whole.set_(storage, 0, (num_blocks, block_bytes))

    def _launch(
        self,
        theirs: torch.Tensor,
        source_blocks: Sequence[int],
        pool: torch.Tensor,
        into_blocks: Sequence[int],
        ids: torch.Tensor | None = None,
    ) -> None:
        """Copy behind what was launched before. Waits for nothing if that has ended."""
        from common.ops.kv.block_copy import copy_blocks

        count = len(source_blocks)
        with self._launching():
            if ids is None and self._stream is not None:
                if 2 * count > len(self._ids):
                    self._ids = _pinned(4 * count)
                pinned = self._ids[: 2 * count]
                pinned.numpy()[:] = np.fromiter((*source_blocks, *into_blocks), np.int64, 2 * count)
                ids = pinned.to(self._device, non_blocking=True).view(2, count)
            elif ids is None:
                ids = self._new_ids(source_blocks, into_blocks)
            copy_blocks(theirs, ids[0], pool, ids[1], max_programs=_PROGRAMS)

    def _new_ids(self, source_blocks: Sequence[int], into_blocks: Sequence[int]) -> torch.Tensor:
        """Return int64 [2, count] on the device."""
        import torch

        with self._launching():
            return torch.from_numpy(np.array([source_blocks, into_blocks], np.int64)).to(self._device)

    def _launching(self) -> contextlib.AbstractContextManager[None]:
        from common.ops.launching import launching

        return launching(self._device, self._stream)

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_EVERY_S):
            with self._lock, contextlib.suppress(TransportUnavailable):
                self._forget_the_dead()

    def _forget_the_dead(self) -> None:
        for key in list(self._opened):
            try:
                alive = self._segments.get(key[0], key[1]).device_memory == key[2]
            except (TransportUnavailable, StaleHandle):
                alive = False
            if not alive:
                self._driver.close(self._opened.pop(key))


def _pinned(count: int) -> torch.Tensor:
    """Return int64 [count] in pinned memory; where there is none, in other memory, which takes longer to copy from."""
    import torch

    try:
        return torch.zeros(count, dtype=torch.int64, pin_memory=count > 0)
    except RuntimeError as error:
        log.warning("ids_not_pinned", reason=str(error))
        return torch.zeros(count, dtype=torch.int64)
