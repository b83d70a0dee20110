"""What the requests of a gateway share while they come in and while whole answers are put together: memory, and the event loop.

A request's body takes room before it is read and gives it back when it has become tokens. Small bodies are let in at once or
refused; a large one waits for others to finish, since a few of them would fill the memory that small ones need. Large bodies
are decoded one at a time, a step per turn of the event loop.
"""

from __future__ import annotations

import gc
import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import anyio
import anyio.lowlevel

from common.protocol.errors import Overloaded
from services.gateway.config import GatewayConfig
from services.gateway.json_slices import Steps
from services.gateway.parse import SMALL_BYTES

_T = TypeVar("_T")

LARGE_SHARE = 0.75
"""Of the memory for bodies, what large ones may take; the rest is for small ones alone."""

TOKENIZING_THREADS = 2
"""Long prompts, of all models, that are tokenized at a time."""

WAIT_S = 10.0
"""How long a large body waits for room."""


class Room:
    """What one request holds of the memory for bodies. Use as a context manager."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._held = 0

    def __enter__(self) -> Room:
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()

    def give_back(self) -> None:
        """Harmless twice."""
        held, self._held = self._held, 0
        if held:
            self._intake._give_back(held)

    def take(self, size: int) -> None:
        """Make sure of `size` bytes in all, at once.

        :raises Overloaded: if they are not to be had now.
        """
        if size > self._held:
            self._intake._take(size - self._held, large=size > SMALL_BYTES)
            self._held = size

    async def wait_for(self, size: int) -> None:
        """Make sure of `size` bytes in all, as soon as others have given back enough.

        :raises Overloaded: after WAIT_S.
        """
        if size > self._held:
            await self._intake._wait(size - self._held)
            self._held = size


class Intake:
    """One per gateway process, whatever the number of its models. `threads` limits those that tokenize."""

    def __init__(self, config: GatewayConfig) -> None:
        self._limit = config.max_bodies_bytes
        self._large_limit = max(int(LARGE_SHARE * self._limit), min(config.max_body_bytes, self._limit))
        self._used = 0
        self._waiting: deque[tuple[int, anyio.Event]] = deque()
        self._lane = anyio.Lock()
        self._answers_limit = config.max_collected_bytes
        self._answers_used = 0
        self.threads = anyio.CapacityLimiter(TOKENIZING_THREADS)

    @property
    def body_bytes(self) -> int:
        """Bytes that bodies hold at present."""
        return self._used

    @property
    def answer_bytes(self) -> int:
        """Bytes that whole answers hold at present."""
        return self._answers_used

    def room(self) -> Room:
        return Room(self)

    async def run(self, steps: Steps[_T], *, large: bool) -> _T:
        """The value of `steps`, whose steps are taken one per turn of the loop; of large ones, only one has its turn.

        :raises: what the steps raise.
        """
        if not large:
            return _finish(steps)
        async with self._lane:
            while True:
                done, value = _step(steps)
                if done:
                    return value
                await anyio.lowlevel.checkpoint()

    def collect(self, size: int) -> None:
        """Take memory for a part of a whole answer; `dropped` gives it back.

        :raises Overloaded: if whole answers hold too much already; nothing is taken then.
        """
        if self._answers_used + size > self._answers_limit:
            raise Overloaded(
                f"whole answers hold {self._answers_used} of {self._answers_limit} bytes: stream this one, or ask for less"
            )
        self._answers_used += size

    @contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """Memory for a whole answer, while it is sent.

        :raises Overloaded: as `collect`.
        """
        self.collect(size)
        try:
            yield
        finally:
            self.dropped(size)

    def dropped(self, size: int) -> None:
        self._answers_used -= size

    # -- inside

    def _take(self, size: int, *, large: bool) -> None:
        limit = self._large_limit if large else self._limit
        if self._used + size > limit or (large and self._waiting):
            raise Overloaded(f"bodies of other requests fill the {limit} bytes there are for them: try again in a moment")
        self._used += size

    async def _wait(self, size: int) -> None:
        if not self._waiting and self._used + size <= self._large_limit:
            self._used += size
            return
        turn = anyio.Event()
        entry = (size, turn)
        self._waiting.append(entry)
        try:
            with anyio.move_on_after(WAIT_S):
                await turn.wait()
        except BaseException:
            self._leave(entry)
            if turn.is_set():
                self._give_back(size)
            raise
        if not turn.is_set():
            self._leave(entry)
            raise Overloaded(f"bodies of other requests filled memory for {math.ceil(WAIT_S)} s: try again in a moment")

    def _leave(self, entry: tuple[int, anyio.Event]) -> None:
        if entry in self._waiting:
            self._waiting.remove(entry)
            self._let_in()

    def _give_back(self, size: int) -> None:
        self._used -= size
        self._let_in()

    def _let_in(self) -> None:
        """Those who wait, in order, as far as there is room. Whoever is let in has its room already."""
        while self._waiting and self._used + self._waiting[0][0] <= self._large_limit:
            size, turn = self._waiting.popleft()
            self._used += size
            turn.set()


def _step(steps: Steps[_T]) -> tuple[bool, _T]:
    """(whether that was the last one, the value). Without the garbage collector, which millions of small values would set off
    every few thousand of them."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        next(steps)
    except StopIteration as end:
        return True, end.value
    finally:
        if collecting:
            gc.enable()
    return False, None  # pyright: ignore[reportReturnType]


def _finish(steps: Steps[_T]) -> _T:
    while True:
        done, value = _step(steps)
        if done:
            return value
