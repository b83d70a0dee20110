"""Threads that help the caller with a call of compiled code which shares out its work (`team_numba`)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

_MAX_HELPERS = 256

_lock = threading.Lock()
_helpers: ThreadPoolExecutor | None = None


def together(threads: int, work: Callable[..., object], *arguments: object) -> None:
    """Call `work(*arguments)` here and in `threads - 1` helpers; returns when the call here has.

    A helper may come late or never: when any one call returns all work must be complete, and later calls find nothing to do.
    """
    if threads <= 1:
        work(*arguments)
        return
    calls = [_executor().submit(work, *arguments) for _ in range(threads - 1)]
    work(*arguments)
    for call in calls:
        call.cancel()


def _executor() -> ThreadPoolExecutor:
    global _helpers
    with _lock:
        if _helpers is None:
            _helpers = ThreadPoolExecutor(_MAX_HELPERS, thread_name_prefix="rows")
        return _helpers
