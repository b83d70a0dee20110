"""An event loop whose clock jumps to the next timer instead of waiting: hours of heartbeats and leases in a second.

Inside `run`, `time.monotonic` and `time.time` follow the loop's clock, and what would go to a thread runs in the loop, a little
later, so that a history depends on nothing but its inputs.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar
from unittest import mock

import anyio
import anyio.to_thread

T = TypeVar("T")

IDLE_LIMIT = 200_000
STEP_S = 0.02
TICK_S = 1e-6
THREAD_S = 0.003


class _JumpingSelector(selectors.DefaultSelector):
    """Never sleeps: with nothing to read, the clock advances by what the loop wanted to wait."""

    now = 1000.0
    idle = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            self.idle += 1
            if self.idle > IDLE_LIMIT:
                raise RuntimeError("the loop waits for something that no timer will bring")
        elif not ready and timeout and timeout > 0:
            self.now += max(timeout, TICK_S)  # less would be lost in rounding, and time would stand still
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.jumping = _JumpingSelector()
        self.busy_until: dict[int, float] = {}
        super().__init__(self.jumping)

    def time(self) -> float:
        return self.jumping.now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Run `func` STEP_S after what the executor, of one thread, has to do before: who frees too early is found out."""
        future: asyncio.Future[T] = self.create_future()

        def finish() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:
                future.set_exception(error)

        when = max(self.time(), self.busy_until.get(id(executor), 0.0)) + STEP_S
        self.busy_until[id(executor)] = when
        self.call_at(when, finish)
        return future


async def _inline(func: Callable[..., T], *args: Any, **_: Any) -> T:
    with anyio.CancelScope(shield=True):
        await anyio.sleep(THREAD_S)
    return func(*args)


@contextlib.contextmanager
def runner() -> Iterator[asyncio.Runner]:
    """A runner on a virtual loop; several coroutines may be run on it, one after another, and time goes on between them."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        wall = 1_800_000_000.0
        with (
            mock.patch.object(time, "monotonic", loop.time),
            mock.patch.object(time, "time", lambda: wall + loop.time()),
            mock.patch.object(anyio.to_thread, "run_sync", _inline),
        ):
            yield runner


def run(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `main()` to its end on a virtual loop."""
    with runner() as virtual:
        return virtual.run(main())
