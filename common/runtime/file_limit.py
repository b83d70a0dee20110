"""File descriptors: as many as this process may have, and what happens when they run out.

An event loop that can't accept a connection for want of a descriptor says nothing, and clients see their connections closed. So
HTTP leaves some descriptors to everything else, tells the clients beyond that, and both cases are logged and counted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from pathlib import Path
from typing import Literal

from common.runtime import logs
from common.runtime.metrics import Metrics

log = logs.get("files")

_RESERVE_SHARE = 8
_MIN_RESERVE, _MAX_RESERVE = 8, 64
_FEW_OTHERS = 16
"""Files that a service opens after its start, besides connections."""
_MIN_CONNECTIONS = 8
_LOG_PERIOD_S = 10.0

Admission = Literal["serve", "tell", "drop"]
"""What to do with a connection: serve it, tell its client that there is no room, or close it at once."""


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard one; returns what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class FileLimit:
    """How many HTTP connections the process can afford, and a look now and then whether it has run out of descriptors."""

    def __init__(self, metrics: Metrics) -> None:
        self._others = len(list(Path("/proc/self/fd").iterdir()))  # files that are no connections
        self._turned_away = metrics.counter("http_connections_refused_total", "Connections beyond what open files allow")
        self._exhausted = metrics.counter("open_files_exhausted_total", "Times that the process had no file descriptor left")
        self._was_exhausted = False
        self._quiet_until = 0.0
        self._unlogged = 0

    @property
    def max_connections(self) -> int:
        return self._bounds()[0]

    def admit(self, connections: int) -> Admission:
        """What becomes of the newest of `connections`. Those that are told hold a descriptor for a moment, too."""
        most, reserve = self._bounds()
        if connections <= most:
            return "serve"
        self._turned_away.inc()
        self._unlogged += 1
        return "tell" if connections <= most + reserve // 2 else "drop"

    def _bounds(self) -> tuple[int, int]:
        """(connections, descriptors kept for everything else)."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # an operator may change it while we run
        reserve = min(max(limit // _RESERVE_SHARE, _MIN_RESERVE), _MAX_RESERVE)
        return max(limit - self._others - _FEW_OTHERS - reserve, _MIN_CONNECTIONS), reserve

    def check(self, now: float) -> None:
        """Call now and then: logs that descriptors ran out when they do, and what was refused since, at most every 10 s."""
        exhausted = _none_left()
        if exhausted and not self._was_exhausted:
            self._exhausted.inc()
            self._quiet_until = now
        ended = self._was_exhausted and not exhausted
        self._was_exhausted = exhausted
        if ended:
            log.info("file_descriptors_again")
        if now >= self._quiet_until and (exhausted or self._unlogged):
            self._quiet_until = now + _LOG_PERIOD_S
            log.error(
                "out_of_file_descriptors" if exhausted else "connections_refused",
                refused=self._unlogged,
                max_connections=self.max_connections,
                hint="raise the limit of open files (ulimit -n, LimitNOFILE=), or start more gateways",
            )
            self._unlogged = 0


def _none_left() -> bool:
    try:
        os.close(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return error.errno in (errno.EMFILE, errno.ENFILE)
    return False
