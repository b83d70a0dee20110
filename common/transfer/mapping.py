"""Maps the memory of a kvstore's blocks before somebody copies them, a few at a time, in a thread.

Touching a page of a file for the first time costs each process some tenths of a microsecond: 35 to 60 ms for each GiB on a
server's cores, which is longer than copying it. Blocks that were granted to anyone are mapped here within `EVERY_S`. Only
memory that exists is: a block is looked at while a lock keeps its memory (see `store_segment`), and holes stay holes.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

from common.runtime import logs

log = logs.get("transfer")

EVERY_S = 0.25
_POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14 and later
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Mapped(Protocol):
    def map_granted(self, stopped: Callable[[], bool]) -> None:
        """Map what was granted since the last call, as long as it is not `stopped`."""
        ...


def map_pages(address: int, num_bytes: int) -> None:
    """Have the pages of a mapping mapped as by reading them, without the interpreter's lock.

    :raises OSError: Linux can't.
    """
    if _libc.madvise(address, num_bytes, _POPULATE_READ):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


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
        while not self._ended.wait(EVERY_S):
            for segment in self._opened():
                try:
                    segment.map_granted(self._ended.is_set)
                except OSError as error:
                    log.warning("blocks_not_mapped", reason=error.strerror, consequence="they are mapped as they are copied")
                    return
