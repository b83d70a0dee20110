"""Measure how much CPU time other processes took during a measurement, so that a disturbed one can be repeated."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import anyio

from bench.common.stack import psutil_module

QUIET_S = 3.0
_TICKS = os.sysconf("SC_CLK_TCK")
_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


class Others:
    """Start it before a measurement; `share` afterwards, while the processes that were measured still live."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._busy_s = _busy_s()
        self._mine_s = _mine_s()

    def share(self) -> float:
        """Return the share of the machine's CPU time that went to processes other than this one and its descendants, 0 to 1."""
        cores = os.cpu_count() or 1
        others_s = (_busy_s() - self._busy_s) - (_mine_s() - self._mine_s)
        return max(0.0, others_s / (cores * max(1e-6, time.monotonic() - self._began)))


def wait_for_quiet(max_share: float) -> None:
    """Block until others take no more than this share of the machine for some seconds."""
    while True:
        others = Others()
        time.sleep(QUIET_S)
        if others.share() <= max_share:
            return


def undisturbed(max_share: float, measure: Callable[[*_Ts], Awaitable[_T]], *args: *_Ts) -> _T:
    """Run `measure` while others take no more than this share of the machine: again for as long as they take more. Return its
    last result."""
    while True:
        wait_for_quiet(max_share)
        others = Others()
        found = anyio.run(measure, *args)
        if others.share() <= max_share:
            return found


def _busy_s() -> float:
    """CPU seconds that the machine has spent on processes since it started (user, nice, system)."""
    user, nice, system = Path("/proc/stat").read_text().split()[1:4]
    return (int(user) + int(nice) + int(system)) / _TICKS


def _mine_s() -> float:
    """Return the CPU seconds of this process and its descendants, including those that have ended.

    :raises ConfigError: psutil is not installed.
    """
    psutil = psutil_module()
    me = psutil.Process()
    total = 0.0
    for process in (me, *me.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total
