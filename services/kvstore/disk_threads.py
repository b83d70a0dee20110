"""Calls in threads that a hanging disk keeps for as long as it likes.

    run ─► a thread ─► its result
            └ no end for STUCK_S: the disk hangs, and the store goes on without it until the call ends
            └ the store stops meanwhile: the thread is left behind

A thread that is left behind keeps the folder, which is then as a kill of the process leaves it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

STUCK_S = 10.0
"""Seconds after which a disk that has not ended a call hangs. It ends 16 MiB in one."""

_LOOK_EVERY_S = 0.02

_T = TypeVar("_T")


class LeftBehind(Exception):
    """The store stops, and does not wait for this call."""


class DiskThreads:
    """`clock`: seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.left_behind = False
        """Whether a thread that was not waited for may still use the folder."""
        self._clock = clock
        self._began_at: dict[anyio.CancelScope, float] = {}

    async def run(self, call: Callable[[], _T]) -> _T:
        """Return what `call` does, in a thread, also when cancelled meanwhile.

        :raises LeftBehind: `leave_behind` was called.
        """
        if not self.left_behind:
            with anyio.CancelScope(shield=True) as scope:
                self._began_at[scope] = self._clock()
                try:
                    return await anyio.to_thread.run_sync(call, abandon_on_cancel=True)
                finally:
                    del self._began_at[scope]
        raise LeftBehind

    @property
    def are_stuck(self) -> bool:
        """Whether a call has been waiting for the disk for longer than one takes that works."""
        return self.stuck_in_s <= 0

    @property
    def stuck_in_s(self) -> float:
        """Seconds until the oldest call is stuck, unless it ends."""
        return min(self._began_at.values(), default=float("inf")) + STUCK_S - self._clock()

    async def settle(self) -> None:
        """Wait for the calls that run now. The store stops: those that hang, and when cancelled all, are left behind."""
        calls = set(self._began_at)
        try:
            while calls & self._began_at.keys() and not self.are_stuck:  # noqa: ASYNC110  # each ends for a reason of its own
                await anyio.sleep(_LOOK_EVERY_S)
        finally:
            if calls & self._began_at.keys():
                self.leave_behind()

    def leave_behind(self) -> None:
        """Wait for no call any more, those that have begun included."""
        self.left_behind = True
        for scope in self._began_at:
            scope.cancel()
