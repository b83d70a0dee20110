"""Waiting in a test for what other tasks, threads and processes do."""

from __future__ import annotations

from collections.abc import Callable

import anyio

_SLEEP_S = 0.005


async def until(condition: Callable[[], object], within_s: float = 15.0) -> None:
    """Return when `condition` has come true. Only the time that this function sleeps is counted, so that a machine that pauses,
    as those of CI do, has as much left afterwards.

    :raises TimeoutError: it has not come true.
    """
    for _ in range(max(1, int(within_s / _SLEEP_S))):
        if condition():
            return
        await anyio.sleep(_SLEEP_S)
    if not condition():
        raise TimeoutError(f"waited {within_s:g} s in vain")
