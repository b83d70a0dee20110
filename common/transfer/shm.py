"""KV blocks in shared memory: a file on a tmpfs that every worker of the host maps.

    penstock-<name>:   header · generations [num_blocks] uint64 · padding to a page · blocks [num_blocks, block_bytes]

The owner creates it sparse (pages appear when first written), holds an flock on it for life and unlinks it at the end.
When a process dies the kernel drops its flock, so the next worker that starts can tell and sweep the file away. A reader
maps it read-only and copies straight out of the owner's blocks; that the owner may reuse a block meanwhile is caught by
its generation, which the owner raises before it writes. Containers that mount the same tmpfs share it (see `host_id`).

Where the blocks are in a GPU's memory the file ends before them: it holds the generations, and in its header how to reach
that memory (see `cuda_ipc`).
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import re
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from common.protocol.errors import ConfigError, StaleHandle, TransportUnavailable
from common.transfer.base import RemoteBlocks, check_generations, copy_blocks

PREFIX = "penstock-"
_DRAFT_PREFIX = ".penstock-"  # a segment that is being made: not yet locked, so not to be swept
_DRAFT_AGE_S = 60.0
_MAGIC = b"PENSTOCK"
_VERSION = 1
# magic, version, bytes of device_memory, num_blocks, block_bytes, blocks offset, fingerprint, device_memory
_HEADER = struct.Struct("<8sIIQQQ16s72s")
DEVICE_MEMORY_BYTES = 72
_GENERATIONS_OFFSET = 128
_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
_MAX_OPEN_SEGMENTS = 64


class Segment:
    """A mapped segment: `blocks` [num_blocks, block_bytes] uint8 and `generations` [num_blocks] uint64.

    `device_memory` is not empty where the blocks are in a GPU's memory; then `blocks` is [num_blocks, 0].
    Views of either, numpy's or torch's, may outlive `close`: the memory goes with the last of them.
    """

    blocks: np.ndarray
    generations: np.ndarray

    def __init__(
        self,
        path: Path,
        fd: int,
        *,
        num_blocks: int,
        block_bytes: int,
        owner: bool,
        writable: bool,
        device_memory: bytes = b"",
    ) -> None:
        self.path = path
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self.device_memory = device_memory
        self._fd = fd
        self._owner = owner
        mapped_bytes = 0 if device_memory else block_bytes
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._map: mmap.mmap | None = mmap.mmap(fd, _size(num_blocks, mapped_bytes), access=access)
        self.generations = np.frombuffer(self._map, np.uint64, num_blocks, _GENERATIONS_OFFSET)
        blocks = np.frombuffer(self._map, np.uint8)[_blocks_offset(num_blocks) :]
        self.blocks = blocks.reshape(num_blocks, mapped_bytes)

    @property
    def name(self) -> str:
        return self.path.name.removeprefix(PREFIX)

    @classmethod
    def create(
        cls,
        directory: str | Path,
        name: str,
        *,
        num_blocks: int,
        block_bytes: int,
        fingerprint: str,
        device_memory: bytes = b"",
    ) -> Segment:
        """A new segment that this process owns. Generations are 0, blocks read as 0.

        device_memory: up to 72 bytes that tell readers how to reach blocks in a GPU's memory; empty: they are here.

        :raises ConfigError: `directory` is missing, not writable or too small, or a live process owns that name.
        """
        assert num_blocks > 0 and block_bytes > 0 and len(device_memory) <= DEVICE_MEMORY_BYTES
        directory = Path(directory)
        path = _path(directory, name)
        size = _size(num_blocks, 0 if device_memory else block_bytes)
        check_room(directory, size)
        draft = directory / f"{_DRAFT_PREFIX}{name}.{os.urandom(4).hex()}"
        try:
            fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise ConfigError(_not_writable(directory, error), param="shm_dir") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, size)
            sizes = (num_blocks, block_bytes, _blocks_offset(num_blocks))
            header = _HEADER.pack(_MAGIC, _VERSION, len(device_memory), *sizes, _digest(fingerprint), device_memory)
            os.pwrite(fd, header, 0)
            _remove_dead(path)
            os.link(draft, path)  # fails where the name exists; appears locked and complete, or not at all
        except FileExistsError as error:
            os.close(fd)
            raise ConfigError(
                f"{path} belongs to a running worker: give this one another worker_id", param="worker_id"
            ) from error
        except OSError as error:
            os.close(fd)
            raise ConfigError(_not_writable(directory, error), param="shm_dir") from error
        finally:
            draft.unlink(missing_ok=True)
        return cls(
            path,
            fd,
            num_blocks=num_blocks,
            block_bytes=block_bytes,
            owner=True,
            writable=True,
            device_memory=device_memory,
        )

    @classmethod
    def open(cls, directory: str | Path, name: str, *, fingerprint: str, writable: bool = False) -> Segment:
        """Map a segment of another process.

        :raises TransportUnavailable: there is none, or it is not one this version can read.
        :raises StaleHandle: it holds the KV of another model or layout.
        """
        path = _path(Path(directory), name)
        try:
            fd = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
        except OSError as error:
            raise TransportUnavailable(f"{path} can't be opened: {error.strerror}") from error
        try:
            num_blocks, block_bytes, device_memory = _read_header(fd, path, fingerprint)
            return cls(
                path,
                fd,
                num_blocks=num_blocks,
                block_bytes=block_bytes,
                owner=False,
                writable=writable,
                device_memory=device_memory,
            )
        except OSError as error:
            os.close(fd)
            raise TransportUnavailable(f"{path} can't be mapped: {error.strerror}") from error
        except (StaleHandle, TransportUnavailable):
            os.close(fd)
            raise

    def is_current(self) -> bool:
        """False once the file is gone or another took its name: the owner ended or started anew."""
        if self._map is None:
            return False
        try:
            found = self.path.stat()
        except OSError:
            return False
        mine = os.fstat(self._fd)
        return (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino)

    def close(self) -> None:
        """Unmap; the owner also unlinks and unlocks. Harmless twice."""
        if self._map is None:
            return
        if self._owner:
            if self.is_current():
                self.path.unlink(missing_ok=True)
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # the map keeps a duplicate of the descriptor, and the lock with it
        mapped, self._map = self._map, None
        self.blocks = np.empty((0, self.blocks.shape[1]), np.uint8)
        self.generations = np.empty(0, np.uint64)
        os.close(self._fd)
        try:
            mapped.close()
        except BufferError:
            del mapped  # views are alive: the last of them unmaps it


class SegmentCache:
    """Segments of other processes, kept mapped between uses. A mapping keeps the memory of a dead owner alive, so those
    that are out of date are let go whenever a new one is opened. Safe to call from several threads."""

    def __init__(self, directory: str | Path, *, writable: bool = False) -> None:
        self.directory = Path(directory)
        self._writable = writable
        self._segments: OrderedDict[tuple[str, str], Segment] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()

    def views(self, name: str, fingerprint: str) -> tuple[np.ndarray, np.ndarray]:
        """Blocks and generations of a segment. They stay mapped while referenced, whatever happens to this cache.

        :raises TransportUnavailable: see `Segment.open`; or the blocks are in a GPU's memory. :raises StaleHandle: see there.
        """
        with self._lock:
            segment = self._current(name, fingerprint)
            if segment.device_memory:
                raise TransportUnavailable(f"the blocks of {name} are in a GPU's memory")
            return segment.blocks, segment.generations

    def device_memory(self, name: str, fingerprint: str) -> tuple[bytes, int, np.ndarray]:
        """How to reach a segment's blocks in a GPU's memory, bytes of a block, and the generations (see `views`).

        :raises TransportUnavailable: see `Segment.open`; or the blocks are not on a GPU. :raises StaleHandle: see there.
        """
        with self._lock:
            segment = self._current(name, fingerprint)
            if not segment.device_memory:
                raise TransportUnavailable(f"the blocks of {name} are not in a GPU's memory")
            return segment.device_memory, segment.block_bytes, segment.generations

    def close(self) -> None:
        with self._lock:
            self._drop(list(self._segments))

    def _current(self, name: str, fingerprint: str) -> Segment:
        key = (name, fingerprint)
        segment = self._segments.get(key)
        if segment is None or not segment.is_current():
            self._drop([known for known, other in self._segments.items() if not other.is_current()])
            self._drop(list(self._segments)[: -_MAX_OPEN_SEGMENTS + 1])
            segment = Segment.open(self.directory, name, fingerprint=fingerprint, writable=self._writable)
            self._segments[key] = segment
        self._segments.move_to_end(key)
        return segment

    def _drop(self, keys: list[tuple[str, str]]) -> None:
        for key in keys:
            self._segments.pop(key).close()


class ShmTransport:
    """Reads from segments of the same host."""

    def __init__(self, directory: str | Path) -> None:
        """:raises ConfigError: if `directory` does not exist."""
        self.host = host_id(directory)
        self._segments = SegmentCache(directory)

    def read(self, source: RemoteBlocks, into: np.ndarray, into_blocks: Sequence[int]) -> int:
        """See `Transport.read`."""
        if source.host != self.host:
            raise TransportUnavailable(f"{source.segment} is in another host's shared memory")
        theirs, current = self._segments.views(source.segment, source.fingerprint)
        if theirs.shape[1] != into.shape[1]:
            raise StaleHandle(f"{source.segment} has blocks of {theirs.shape[1]} bytes, not {into.shape[1]}")
        check_generations(current, source.blocks, source.generations)
        copied = copy_blocks(theirs, source.blocks, into, into_blocks)
        check_generations(current, source.blocks, source.generations)
        return copied

    def close(self) -> None:
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


def sweep(directory: str | Path) -> list[str]:
    """Unlink every segment whose owner is dead; returns their names."""
    directory = Path(directory)
    swept = [path.name.removeprefix(PREFIX) for path in directory.glob(f"{PREFIX}*") if _remove_dead(path, wait_s=0)]
    for draft in directory.glob(f"{_DRAFT_PREFIX}*"):
        try:
            if time.time() - draft.stat().st_mtime > _DRAFT_AGE_S:
                draft.unlink(missing_ok=True)
        except OSError:
            continue  # another worker's, or gone already
    return swept


def _path(directory: Path, name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise TransportUnavailable("a segment's name must be 1 to 128 characters of A-Z a-z 0-9 _ -")
    return directory / f"{PREFIX}{name}"


def _blocks_offset(num_blocks: int) -> int:
    end = _GENERATIONS_OFFSET + 8 * num_blocks
    return -(-end // mmap.PAGESIZE) * mmap.PAGESIZE


def _size(num_blocks: int, mapped_bytes: int) -> int:
    return _blocks_offset(num_blocks) + num_blocks * mapped_bytes


def _digest(fingerprint: str) -> bytes:
    return hashlib.blake2b(fingerprint.encode(), digest_size=16).digest()


def _read_header(fd: int, path: Path, fingerprint: str) -> tuple[int, int, bytes]:
    raw = os.pread(fd, _HEADER.size, 0)
    if len(raw) < _HEADER.size or raw[: len(_MAGIC)] != _MAGIC:
        raise TransportUnavailable(f"{path} is not a Penstock segment")
    _, version, device_bytes, num_blocks, block_bytes, offset, digest, device_memory = _HEADER.unpack(raw)
    if version != _VERSION:
        raise TransportUnavailable(f"{path} has format {version}; this version reads {_VERSION}")
    if digest != _digest(fingerprint):
        raise StaleHandle(f"{path} holds the KV of another model or layout")
    size = _size(num_blocks, 0 if device_bytes else block_bytes)
    if offset != _blocks_offset(num_blocks) or os.fstat(fd).st_size != size or device_bytes > DEVICE_MEMORY_BYTES:
        raise TransportUnavailable(f"{path} is damaged: its size is not what its header says")
    return num_blocks, block_bytes, device_memory[:device_bytes]


def _remove_dead(path: Path, wait_s: float = 0.2) -> bool:
    """Unlink the segment at `path` if no live process owns it. `wait_s`: a sweep elsewhere holds the lock for a moment."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fd = os.open(path, os.O_RDWR)
        except OSError:
            return False  # gone, or another user's
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine, found = os.fstat(fd), path.stat()
            if (mine.st_dev, mine.st_ino) == (found.st_dev, found.st_ino):
                path.unlink()
                return True
            return False
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
        except FileNotFoundError:
            return False
        finally:
            os.close(fd)
        time.sleep(0.01)


def check_room(directory: Path, size: int) -> None:
    """A sparse file always fits; the process that writes the first page too many is killed. So count before.

    What other segments were promised but have not touched yet is counted as taken.

    :raises ConfigError: `directory` is missing or too small.
    """
    try:
        stat = os.statvfs(directory)
        promised = 0
        for path in directory.glob(f"{PREFIX}*"):
            try:
                found = path.stat()
            except FileNotFoundError:
                continue
            promised += max(0, found.st_size - 512 * found.st_blocks)
    except OSError as error:
        raise ConfigError(f"shm_dir {directory} can't be used: {error.strerror}", param="shm_dir") from error
    room = stat.f_bavail * stat.f_frsize - promised
    if size > room:
        raise ConfigError(
            f"{directory} has room for {max(room, 0) >> 20} MiB more, and this worker's KV blocks need {size >> 20} MiB: "
            "lower kv_cache_mb (kvstore: capacity_mb), give the container a larger shm_size, or move shm_dir to a larger tmpfs",
            param="shm_dir",
        )


def _not_writable(directory: Path, error: OSError) -> str:
    return f"can't create a segment in shm_dir {directory}: {error.strerror}; point shm_dir at a writable tmpfs"
