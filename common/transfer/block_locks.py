"""Keeps the memory of a kvstore's blocks where it is while workers copy them: locks on ranges of the segment's file.

    a worker that copies blocks        lock_to_copy    shared: any number of them
    a worker whose GPU has it pinned   HeldLocks       shared, as long as it is pinned
    the store that takes their memory  try_lock_alone  exclusive: only where nobody copies

Locks of open file descriptions (fcntl(2), `F_OFD_SETLK`): each copy opens the file anew, so threads don't end each other's, and
the kernel ends those of a process that dies. Nobody waits for one. They say nothing about who may use a block (leases do), or
whether it is still the same one (generations do).
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid
_UNKNOWN = (errno.EINVAL, errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_SETLK = getattr(fcntl, "F_OFD_SETLK", None)


def can_lock(fd: int) -> bool:
    """Whether the system has such locks for this file, and descriptors can be opened anew."""
    try:
        with lock_to_copy(fd, [(0, 1)]):
            return True
    except BlockingIOError:
        return True
    except OSError:
        return False


@contextmanager
def lock_to_copy(fd: int, ranges: Sequence[tuple[int, int]]) -> Iterator[None]:
    """Hold shared locks on (offset, size) of a file that is open to read and write.

    :raises BlockingIOError: a range is locked exclusively. :raises OSError: there are no such locks.
    """
    own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        for offset, size in ranges:
            _lock(own, fcntl.F_RDLCK, offset, size)
        yield
    finally:
        os.close(own)  # and all its locks with it


class HeldLocks:
    """Shared locks on ranges of a file that is open to read and write, each until it is unlocked."""

    def __init__(self, fd: int) -> None:
        """:raises OSError: the file can't be opened anew."""
        self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        self._closed = False

    def lock(self, offset: int, size: int) -> None:
        """:raises BlockingIOError: the range is locked exclusively."""
        _lock(self._fd, fcntl.F_RDLCK, offset, size)

    def unlock(self, offset: int, size: int) -> None:
        _lock(self._fd, fcntl.F_UNLCK, offset, size)

    def close(self) -> None:
        """Unlock everything. Harmless twice."""
        if not self._closed:
            self._closed = True
            os.close(self._fd)


@contextmanager
def try_lock_alone(fd: int, offset: int, size: int) -> Iterator[None]:
    """Hold an exclusive lock on a range of a file. Where there are no such locks nobody else has one, and this does nothing.

    :raises BlockingIOError: somebody copies there.
    """
    try:
        _lock(fd, fcntl.F_WRLCK, offset, size)
    except OSError as error:
        if error.errno not in _UNKNOWN:
            raise
        yield
        return
    try:
        yield
    finally:
        _lock(fd, fcntl.F_UNLCK, offset, size)


def _lock(fd: int, kind: int, offset: int, size: int) -> None:
    if _SETLK is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    fcntl.fcntl(fd, _SETLK, _FLOCK.pack(kind, os.SEEK_SET, offset, size, 0))
