"""Maps the memory of a kvstore's blocks before somebody copies them, a few at a time, in a thread.

Touching a page of a file for the first time costs each process some tenths of a microsecond: 35 to 60 ms for each GiB on a
server's cores, which is longer than copying it. Blocks that were granted to anyone are mapped here within `EVERY_S`. Only
memory that exists is: a block is looked at while a lock keeps its memory (see `store_segment`), and holes stay holes.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import numpy as np

from common.ops.madvise import madvise
from common.runtime import logs

log = logs.get("transfer")

EVERY_S = 0.25
"""Seconds between two looks at what was granted."""
SOON_S = 0.01
"""Seconds until the next look where the last one stopped early, with more memory to pin."""
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # MADV_POPULATE_READ, MADV_POPULATE_WRITE, Linux 5.14 and later
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


class Mapped(Protocol):
    def map_granted(self, stopped: Callable[[], bool]) -> bool:
        """Map what was granted since the last call, until it is `stopped`; return whether it stopped with more to do."""
        ...

    def let_go(self) -> None:
        """`map_granted` is not called any more: keep no memory that the kvstore may want."""
        ...


def map_pages(address: int, num_bytes: int, *, to_write: bool = False) -> None:
    """Have the pages of a mapping mapped as by reading them, or by writing, without the interpreter's lock.

    :raises OSError: Linux can't.
    """
    madvise(address, num_bytes, _POPULATE_WRITE if to_write else _POPULATE_READ)


def map_written(fd: int, offset: int, num_bytes: int, address: int) -> bool:
    """Map what of a range of a file has memory that was written; return whether all of it has. `address`: of the range in a
    mapping of the file. Keep its memory by a lock meanwhile.

    :raises OSError: Linux can't, or the file can't be read.
    """
    stretches = _resident(address, num_bytes) if _tells_residents() else _data(fd, offset, num_bytes)
    end = 0
    for begin, stop in stretches:
        map_pages(address + begin, stop - begin)
        end = stop if begin == end else end
    return end == num_bytes


def _data(fd: int, offset: int, num_bytes: int) -> Iterator[tuple[int, int]]:
    """Give the stretches of a range of a file that have memory, as bytes from its beginning. Linux looks for the end of each in
    all that follows."""
    begin = offset
    while begin < offset + num_bytes:
        try:
            begin = os.lseek(fd, begin, os.SEEK_DATA)
            stop = os.lseek(fd, begin, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:  # no memory from here on
                return
            raise
        if begin < offset + num_bytes:
            yield begin - offset, min(stop, offset + num_bytes) - offset
        begin = stop


def _resident(address: int, num_bytes: int) -> Iterator[tuple[int, int]]:
    """Give the stretches of a mapping whose pages are in memory, likewise. :raises OSError: Linux can't tell."""
    pages = np.zeros(-(-num_bytes // mmap.PAGESIZE), np.uint8)
    if _libc.mincore(address, num_bytes, pages.ctypes.data):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    edges = np.flatnonzero(np.diff(pages & 1, prepend=0, append=0)) * mmap.PAGESIZE
    for begin, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        yield begin, min(stop, num_bytes)


@functools.cache
def _tells_residents() -> bool:
    """Whether mincore(2) tells pages that were written from those that only have memory, and from holes."""
    try:
        fd = os.memfd_create("penstock-mincore")
        try:
            os.ftruncate(fd, 3 * mmap.PAGESIZE)
            os.posix_fallocate(fd, 0, 2 * mmap.PAGESIZE)
            os.pwrite(fd, b"x", 0)
            tried = np.frombuffer(mmap.mmap(fd, 3 * mmap.PAGESIZE), np.uint8)
            return list(_resident(tried.ctypes.data, tried.nbytes)) == [(0, mmap.PAGESIZE)]
        finally:
            os.close(fd)
    except OSError:
        return False


class MappingThread:
    """Looks after all that `opened` returns, from `start` on."""

    def __init__(self, opened: Callable[[], Iterable[Mapped]]) -> None:
        self._opened = opened
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="map-blocks", daemon=True)
        self._lock = threading.Lock()
        self._started = False

    def start(self) -> None:
        """Harmless twice."""
        with self._lock:
            if not self._started and not self._ended.is_set():
                self._started = True
                self._thread.start()

    def close(self) -> None:
        """Wait for what is being mapped. Harmless twice."""
        self._ended.set()
        with self._lock:
            if self._started:
                self._thread.join()

    def _run(self) -> None:
        wait_s = EVERY_S
        while not self._ended.wait(wait_s):
            wait_s = EVERY_S
            for segment in self._opened():
                try:
                    if segment.map_granted(self._ended.is_set):
                        wait_s = SOON_S
                except OSError as error:
                    log.warning("blocks_not_mapped", reason=error.strerror, consequence="they are mapped as they are copied")
                    for each in self._opened():
                        each.let_go()
                    return
