"""One copy of KV blocks from another worker's pool, as something to await: how far it is, its result, and its end.

    pull(source, target) ─► await transfer ─► slices, one after the other, in a thread ─► bytes that were copied
                            cancel()       ─► no further slice begins; returns once nothing is written into the target

The target may be freed or reused once `await transfer` or `cancel` has ended, however it ended, and not before. A copy begins
when it is awaited, so that some task always owns it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import anyio
import anyio.to_thread
import numpy as np

from common.protocol.errors import Cancelled
from common.transfer.blocks import LocalBlocks, RemoteBlocks

Read = Callable[[RemoteBlocks, np.ndarray, Sequence[int]], int]
"""`Transport.read`."""

SLICE_BYTES = 32 << 20
"""Copied between two looks at whether the transfer was cancelled: some 5 ms in shared memory."""


class Transfer:
    """Created by `Transport.pull`. Await it once; `cancel` it, from another task, any number of times.

    `num_blocks`, `num_bytes`: copied so far and found to be of the generations that the source names. They only grow.
    `queued_s`: until a thread took the copy up; `copy_s`: what it took there.
    """

    def __init__(self, read: Read, source: RemoteBlocks, target: LocalBlocks, *, slice_bytes: int = SLICE_BYTES) -> None:
        self.source = source
        self.target = target
        self.num_blocks = self.num_bytes = 0
        self.queued_s = self.copy_s = 0.0
        self._read = read
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
        return await anyio.to_thread.run_sync(self._timed_copy, time.perf_counter())

    def facts(self, *, waited_s: float = 0.0) -> tuple[tuple[str, int], ...]:
        """What a timeline says of it. waited_s: until it was awaited."""
        return (("queued_us", round(1e6 * (waited_s + self.queued_s))), ("copy_us", round(1e6 * self.copy_s)))

    def stop(self) -> None:
        """Let no further slice begin. Whoever awaits the transfer learns when nothing is written any more."""
        self._stop.set()

    async def cancel(self) -> None:
        """`stop`, and wait until nothing is written into the target any more."""
        self._stop.set()
        if self._ended is not None:
            with anyio.CancelScope(shield=True):
                await self._ended.wait()

    def _timed_copy(self, asked_at: float) -> int:
        """In a thread. asked_at: by `time.perf_counter`."""
        began_at = time.perf_counter()
        self.queued_s = began_at - asked_at
        try:
            return self._copy()
        finally:
            self.copy_s = time.perf_counter() - began_at

    def _copy(self) -> int:
        """In a thread."""
        source, target = self.source, self.target
        for start in range(0, len(source.blocks), self._slice_blocks):
            if self._stop.is_set():
                raise Cancelled(f"the copy was given up after {self.num_blocks} of {len(source.blocks)} blocks")
            part = source.part(start, start + self._slice_blocks)
            blocks = target.blocks[start : start + self._slice_blocks]
            self.num_bytes += self._read(part, target.memory, blocks)
            self.num_blocks += len(part.blocks)
        return self.num_bytes


class Pulling:
    """Gives a transport that has `read` its `pull`. `slice_bytes`: see `SLICE_BYTES`."""

    slice_bytes = SLICE_BYTES

    def read(self, source: RemoteBlocks, into: np.ndarray, into_blocks: Sequence[int]) -> int:
        """See `Transport.read`."""
        raise NotImplementedError

    def pull(self, source: RemoteBlocks, target: LocalBlocks) -> Transfer:
        """See `Transport.pull`."""
        return Transfer(self.read, source, target, slice_bytes=self.slice_bytes)
