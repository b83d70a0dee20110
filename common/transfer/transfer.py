"""One copy of KV blocks from another worker's pool, as something to await: how far it is, its result, and its end.

    pull(source, target) ─► await transfer ─► slices, one after the other, in a thread ─► bytes that were copied
                            cancel()       ─► no further slice begins; returns once nothing is written into the target

The target may be freed or reused once `await transfer` or `cancel` has ended, however it ended, and not before. A copy begins
when it is awaited, so that some task always owns it. With `after` it first waits, in its thread, until a step of the owner has
run: what can be got ready meanwhile is, and the event loop has no part in the copy's beginning.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import numpy as np

from common.protocol.errors import Cancelled
from common.transfer.awaited import Awaited
from common.transfer.blocks import LocalBlocks, RemoteBlocks

Read = Callable[[RemoteBlocks, np.ndarray, Sequence[int]], int]
"""`Transport.read`."""
Begin = Callable[[RemoteBlocks, np.ndarray, Sequence[int]], "Callable[[], int] | None"]
"""`Transport.begin`, and `Transport.prepare`."""

SLICE_BYTES = 32 << 20
"""Copied between two looks at whether the transfer was cancelled: some 5 ms in shared memory."""

_threads = ThreadPoolExecutor(32, thread_name_prefix="transfer")
"""Of all copies of this process. anyio's own threads begin a turn of the event loop later: much may be done in that first."""
MAX_AWAITING = 8
"""Copies of this process that may wait for a step at the same time, each in a thread of its own."""
_awaiting = ThreadPoolExecutor(MAX_AWAITING, thread_name_prefix="awaiting")
"""None of the threads above: those that wait keep nobody from copying what is complete."""


class Transfer:
    """Created by `Transport.pull`. Await it once; `cancel` it, from another task, any number of times.

    after: a step of the owner without which the blocks are not complete. At most `MAX_AWAITING` of these make progress at once.
    `num_blocks`, `num_bytes`: copied so far and found to be of the generations that the source names. They only grow.
    `queued_s`: until a thread took the copy up, and the step had run; `copy_s`: what it took from there.
    """

    def __init__(
        self,
        read: Read,
        source: RemoteBlocks,
        target: LocalBlocks,
        *,
        slice_bytes: int = SLICE_BYTES,
        begin: Begin = lambda source, into, into_blocks: None,
        prepare: Begin = lambda source, into, into_blocks: None,
        after: Awaited | None = None,
    ) -> None:
        self.source = source
        self.target = target
        self.num_blocks = self.num_bytes = 0
        self.queued_s = self.copy_s = 0.0
        self._read = read
        self._begin = begin
        self._prepare = prepare
        self._after = after
        self._slice_blocks = max(1, slice_bytes // max(1, target.memory.shape[1]))
        self._stop = threading.Event()
        self._ended: anyio.Event | None = None

    @property
    def is_cancelled(self) -> bool:
        """Whether `cancel` or `stop` was called."""
        return self._stop.is_set()

    def __await__(self) -> Generator[Any, None, int]:
        """Copy the blocks; return the bytes copied. A task that is cancelled meanwhile leaves once the copy has ended.

        :raises StaleHandle, TransportUnavailable: as `Transport.read`; blocks behind the first `num_blocks` hold anything.
        :raises Cancelled: `cancel` or `stop` was called before the last block was copied.
        """
        return self._run().__await__()

    async def _run(self) -> int:
        assert self._ended is None, "a transfer is awaited once"
        self._ended = anyio.Event()
        try:
            return await self._copied()
        finally:
            self._ended.set()

    async def _copied(self) -> int:
        asked_at = time.perf_counter()
        is_void = self._stop.is_set() or not self.source.blocks or self._after is not None
        first = None if is_void else self._begin(*self._slice(0))
        copy = functools.partial(self._timed_copy, asked_at, first)
        # the thread begins in this turn, whoever is cancelled: it ends what has begun
        threads = _threads if self._after is None else _awaiting
        copying = asyncio.get_running_loop().run_in_executor(threads, contextvars.copy_context().run, copy)
        with anyio.CancelScope(shield=True):
            await copying
        return copying.result()

    def facts(self, *, waited_s: float = 0.0) -> tuple[tuple[str, int], ...]:
        """What a timeline says of it. waited_s: until it was awaited."""
        return (("queued_us", round(1e6 * (waited_s + self.queued_s))), ("copy_us", round(1e6 * self.copy_s)))

    def stop(self) -> None:
        """Let no further slice begin. Whoever awaits the transfer learns when nothing is written any more."""
        self._stop.set()
        self.hurry()

    def hurry(self) -> None:
        """A message has said that the step has run: wait for it no longer. Harmless where nothing is waited for."""
        if self._after is not None:
            self._after.told.set()

    async def cancel(self) -> None:
        """`stop`, and wait until nothing is written into the target any more."""
        self.stop()
        if self._ended is not None:
            with anyio.CancelScope(shield=True):
                await self._ended.wait()

    def _timed_copy(self, asked_at: float, first: Callable[[], int] | None) -> int:
        """In a thread. asked_at: by `time.perf_counter`. first: ends the first slice, if that has begun.

        :raises TransportUnavailable: also if the step has not run in time.
        """
        if self._after is not None and self.source.blocks and not self._stop.is_set():
            first = self._prepare(*self._slice(0))
            self._after.wait()
            first = None if self._stop.is_set() else first
        began_at = time.perf_counter()
        self.queued_s = 0.0 if first is not None and self._after is None else began_at - asked_at
        try:
            return self._copy(first)
        finally:
            self.copy_s = time.perf_counter() - asked_at - self.queued_s

    def _copy(self, first: Callable[[], int] | None = None) -> int:
        """In a thread."""
        for start in range(0, len(self.source.blocks), self._slice_blocks):
            part, memory, blocks = self._slice(start)
            if start == 0 and first is not None:
                self.num_bytes += first()
            elif self._stop.is_set():
                raise Cancelled(f"the copy was given up after {self.num_blocks} of {len(self.source.blocks)} blocks")
            else:
                self.num_bytes += self._read(part, memory, blocks)
            self.num_blocks += len(part.blocks)
        return self.num_bytes

    def _slice(self, start: int) -> tuple[RemoteBlocks, np.ndarray, Sequence[int]]:
        """Return what `read` is given for the slice that begins with block number `start`."""
        end = start + self._slice_blocks
        return self.source.part(start, end), self.target.memory, self.target.blocks[start:end]


class Pulling:
    """Gives a transport that has `read` its `pull`. `slice_bytes`: see `SLICE_BYTES`."""

    slice_bytes = SLICE_BYTES

    def read(self, source: RemoteBlocks, into: np.ndarray, into_blocks: Sequence[int]) -> int:
        """See `Transport.read`."""
        raise NotImplementedError

    def begin(self, source: RemoteBlocks, into: np.ndarray, into_blocks: Sequence[int]) -> Callable[[], int] | None:
        """See `Transport.begin`."""
        return None

    def prepare(self, source: RemoteBlocks, into: np.ndarray, into_blocks: Sequence[int]) -> Callable[[], int] | None:
        """See `Transport.prepare`."""
        return None

    def progress_of(self, host: str, segment: str, fingerprint: str) -> Callable[[], int] | None:
        """See `Transport.progress_of`."""
        return None

    def pull(self, source: RemoteBlocks, target: LocalBlocks, after: Awaited | None = None) -> Transfer:
        """See `Transport.pull`."""
        size, begin, prepare = self.slice_bytes, self.begin, self.prepare
        return Transfer(self.read, source, target, slice_bytes=size, begin=begin, prepare=prepare, after=after)
