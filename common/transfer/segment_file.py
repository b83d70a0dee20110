"""A segment's file: its name, its header, and how it is made and opened where other users may write, too.

    penstock-<name>:   header · generations [num_blocks] uint64 · progress uint64 · padding to a page
                       · blocks [num_blocks, block_bytes]

`progress` is the number of the last step that has run on a prefill worker (see `awaited`), and counts in a kvstore's segments
how often it wanted the memory of a block that a worker kept (see `segment_pins`).

`/dev/shm` is everyone's: whoever gets in first may plant a symbolic link, a FIFO or a file of their own under a name that is
about to be used. So no link is followed, and only a regular file that belongs to this user and is closed to others counts.

Memory of a tmpfs is taken when a page is first written, and a process that writes a page too many is killed (SIGBUS). So every
page is taken beforehand with `reserve`, where lack of room is an error like any other.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import re
import stat
import struct
import time
from pathlib import Path
from typing import NamedTuple

from common.protocol.errors import ConfigError, StaleHandle, TransportUnavailable
from common.transfer.available_memory import available_memory_bytes

PREFIX = "penstock-"
DRAFT_PREFIX = ".penstock-"
"""A segment that is being made: not locked yet, so not to be swept."""
GENERATIONS_OFFSET = 128
DEVICE_MEMORY_BYTES = 72

ROOM_WAIT_S = 1.0
"""Four looks of a reader at whether what it has mapped is still its owner's."""

_DRAFT_AGE_S = 60.0
_MAGIC = b"PENSTOCK"
VERSION = 2
"""Which header and order of a file this is. Part of every fingerprint: another version can't read it."""
# magic, version, bytes of device_memory, num_blocks, block_bytes, blocks offset, fingerprint, device_memory
_HEADER = struct.Struct("<8sIIQQQ16s72s")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
_SAFELY = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO would keep who opens it waiting


class Header(NamedTuple):
    """`device_memory` is not empty where the blocks are in a GPU's memory: the file then ends before them."""

    num_blocks: int
    block_bytes: int
    device_memory: bytes

    @property
    def progress_offset(self) -> int:
        return GENERATIONS_OFFSET + 8 * self.num_blocks

    @property
    def blocks_offset(self) -> int:
        end = self.progress_offset + 8
        return -(-end // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def file_bytes(self) -> int:
        return self.blocks_offset + (0 if self.device_memory else self.num_blocks * self.block_bytes)

    def pack(self, fingerprint: str) -> bytes:
        sizes = (self.num_blocks, self.block_bytes, self.blocks_offset)
        return _HEADER.pack(_MAGIC, VERSION, len(self.device_memory), *sizes, _digest(fingerprint), self.device_memory)


def path_of(directory: Path, name: str) -> Path:
    """:raises TransportUnavailable: if `name` could lead out of `directory`."""
    if not _NAME.fullmatch(name):
        raise TransportUnavailable("a segment's name must be 1 to 128 characters of A-Z a-z 0-9 _ -")
    return directory / f"{PREFIX}{name}"


def open_own(path: Path, flags: int) -> int:
    """Return a descriptor of a private, regular file of this user.

    :raises OSError: it can't be opened; ELOOP: it is a symbolic link. :raises TransportUnavailable: it is something else.
    """
    fd = os.open(path, flags | _SAFELY)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise TransportUnavailable(f"{path} is not a private file of this user, so not a segment of ours")
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_segment(path: Path, fingerprint: str, flags: int) -> tuple[int, Header]:
    """Open another process's segment and read what it says of itself.

    :raises TransportUnavailable: there is none, or it is not one this version can read.
    :raises StaleHandle: it holds the KV of another model or layout.
    """
    try:
        fd = open_own(path, flags)
    except OSError as error:
        raise TransportUnavailable(f"{path} can't be opened: {error.strerror}") from error
    try:
        return fd, _read_header(fd, path, fingerprint)
    except BaseException:
        os.close(fd)
        raise


def make_segment(path: Path, header: Header, fingerprint: str, *, reserved_bytes: int) -> int:
    """Make a segment that this process owns, with its first `reserved_bytes` of memory taken. Returns its descriptor, locked.

    :raises ConfigError: the folder is missing, not writable or too small, or the name is taken.
    """
    directory, name = path.parent, path.name.removeprefix(PREFIX)
    check_room(directory, reserved_bytes)
    check_memory(reserved_bytes)
    draft = directory / f"{DRAFT_PREFIX}{name}.{os.urandom(4).hex()}"
    try:
        fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFELY, 0o600)
    except OSError as error:
        raise ConfigError(_not_writable(directory, error), param="shm_dir") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, header.file_bytes)
        reserve(fd, 0, reserved_bytes, directory)
        os.pwrite(fd, header.pack(fingerprint), 0)
        remove_dead(path)
        os.link(draft, path)  # fails where the name exists; appears locked and complete, or not at all
    except FileExistsError as error:
        os.close(fd)
        raise ConfigError(_taken(path), param="worker_id") from error
    except OSError as error:
        os.close(fd)
        raise ConfigError(_not_writable(directory, error), param="shm_dir") from error
    except ConfigError:
        os.close(fd)
        raise
    finally:
        draft.unlink(missing_ok=True)
    return fd


def reserve(fd: int, offset: int, size: int, directory: Path) -> None:
    """Take memory for bytes [offset, offset + size) of a file now, so that writing them can't fail later.

    :raises ConfigError: there is too little, and nothing more is taken than before.
    """
    try:
        os.posix_fallocate(fd, offset, size)
    except OSError as error:
        raise ConfigError(_no_room(directory, size, error.strerror or "no memory"), param="shm_dir") from error


def wait_for_room(directory: Path, size: int) -> None:
    """Return when `directory` has `size` bytes left, or after ROOM_WAIT_S: readers of a segment whose owner died let go of its
    memory a moment after it was swept.

    :raises ConfigError: `directory` is missing.
    """
    until = time.monotonic() + ROOM_WAIT_S
    while room_bytes(directory) < size and time.monotonic() < until:
        time.sleep(0.05)


def check_room(directory: Path, size: int) -> None:
    """:raises ConfigError: `directory` is missing, or has less than `size` bytes left."""
    if size > room_bytes(directory):
        raise ConfigError(_no_room(directory, size, "it is too small"), param="shm_dir")


def room_bytes(directory: Path) -> int:
    """Return how much memory `directory` has left. :raises ConfigError: it is missing."""
    try:
        found = os.statvfs(directory)
    except OSError as error:
        raise ConfigError(f"shm_dir {directory} can't be used: {error.strerror}", param="shm_dir") from error
    return found.f_bavail * found.f_frsize


def check_memory(size: int) -> None:
    """Memory that a machine or container does not have is not refused by the kernel: it kills a process for it.

    :raises ConfigError: less than `size` bytes are left.
    """
    available = available_memory_bytes()
    if available is not None and size > available:
        raise ConfigError(
            f"this machine or container has {available >> 20} MiB of memory left, and this worker's KV blocks need "
            f"{-(-size >> 20)} MiB: lower kv_cache_mb (kvstore: capacity_mb), or give the container more memory",
            param="kv_cache_mb",
        )


def remove_dead(path: Path, wait_s: float = 0.2) -> bool:
    """Unlink the segment at `path` if no live process owns it. `wait_s`: a sweep elsewhere holds the lock for a moment."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fd = open_own(path, os.O_RDWR)
        except (OSError, TransportUnavailable):
            return False  # gone, or not ours to remove
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if same_file(fd, path):
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


def same_file(fd: int, path: Path) -> bool:
    """Whether `path` is still the file that was opened as `fd`."""
    try:
        found = path.lstat()
    except OSError:
        return False
    mine = os.fstat(fd)
    return (mine.st_dev, mine.st_ino) == (found.st_dev, found.st_ino)


def sweep(directory: str | Path) -> list[str]:
    """Unlink every segment of this user whose owner is dead; returns their names."""
    directory = Path(directory)
    swept = [path.name.removeprefix(PREFIX) for path in directory.glob(f"{PREFIX}*") if remove_dead(path, wait_s=0)]
    for draft in directory.glob(f"{DRAFT_PREFIX}*"):
        try:
            found = draft.lstat()
            if found.st_uid == os.geteuid() and time.time() - found.st_mtime > _DRAFT_AGE_S:
                draft.unlink(missing_ok=True)
        except OSError:
            continue  # gone already
    return swept


def _read_header(fd: int, path: Path, fingerprint: str) -> Header:
    raw = os.pread(fd, _HEADER.size, 0)
    if len(raw) < _HEADER.size or raw[: len(_MAGIC)] != _MAGIC:
        raise TransportUnavailable(f"{path} is not a Penstock segment")
    _, version, device_bytes, num_blocks, block_bytes, offset, digest, device_memory = _HEADER.unpack(raw)
    if version != VERSION:
        raise TransportUnavailable(f"{path} has format {version}; this version reads {VERSION}")
    if digest != _digest(fingerprint):
        raise StaleHandle(f"{path} holds the KV of another model or layout")
    header = Header(num_blocks, block_bytes, device_memory[:device_bytes])
    if device_bytes > DEVICE_MEMORY_BYTES or offset != header.blocks_offset or os.fstat(fd).st_size != header.file_bytes:
        raise TransportUnavailable(f"{path} is damaged: its size is not what its header says")
    return header


def _digest(fingerprint: str) -> bytes:
    return hashlib.blake2b(fingerprint.encode(), digest_size=16).digest()


def _no_room(directory: Path, size: int, reason: str) -> str:
    room = room_bytes(directory)
    return (
        f"{directory} has room for {room >> 20} MiB more, and this worker's KV blocks need {-(-size >> 20)} MiB ({reason}): "
        "lower kv_cache_mb (kvstore: capacity_mb), give the container a larger shm_size, or move shm_dir to a larger tmpfs"
    )


def _taken(path: Path) -> str:
    try:
        os.close(open_own(path, os.O_RDONLY))
    except (OSError, TransportUnavailable):
        return f"{path} is a link or belongs to another user: remove it, or give this worker another worker_id"
    return f"{path} belongs to a running worker: give this one another worker_id"


def _not_writable(directory: Path, error: OSError) -> str:
    return f"can't create a segment in shm_dir {directory}: {error.strerror}; point shm_dir at a writable tmpfs"
