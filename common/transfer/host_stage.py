"""KV blocks of a GPU on their way to a kvstore and back, through pinned host memory, beside the steps.

    read    blocks ─► copied to a slot of pinned memory ─► `take`, which writes it on
    write   `fill`, which reads and checks ─► a slot ─► copied to the blocks

The stage is divided into slots of equal size. One thread of each call launches copies between slots and the GPU, a few ahead,
and waits for their ends; others run `take` and `fill`, which compute checksums and copy to and from the kvstore's memory, and
do nothing else. So few calls ask for the interpreter's lock, which is what they would all wait for. A thread that runs `take`
or `fill` has its slot from the start, so it waits for nobody.

Large blocks are copied as they are. Small ones are gathered and scattered on the GPU, one launch for each slot, and pass
through GPU memory of the slot, since many small copies don't keep the link full. Streams of the stage's own neither wait for
steps nor have them wait. Its kernels use few multiprocessors.

Copies have ended when a call returns or raises, whatever happened in it: a block that is given back then is read and written by
nobody. Only where the engine is given up, since its GPU hangs, does a call end without them; so does the process then.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from queue import Empty, LifoQueue, SimpleQueue
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from common.protocol.errors import TransportUnavailable
from common.runtime import logs
from common.transfer.base import runs
from common.transfer.block_memory import Fill, T, Take
from common.transfer.paths import Operation

if TYPE_CHECKING:
    import torch

    from common.transfer.measured import TransferCounts

log = logs.get("transfer")

R = TypeVar("R")

NUM_SLOTS = 16
"""Slots of a stage, fewer where they could not hold a block."""
ALIGNMENT_BYTES = 512
DIRECT_BYTES = 256 << 10
"""Blocks of at least this size are copied one by one, or as many at once as are consecutive."""
AT_ONCE_BYTES = 1 << 30
"""Copied in one call, if there is so much: between two calls the link is idle. It takes 25 ms where a link is fast."""
LOOK_EVERY_S = 0.5
"""Between two looks at whether the engine was given up, while copies run."""
CORES_PER_THREAD = 2
"""One core in so many copies and computes checksums for a moment, and two at least; a core does some 7 GB/s."""
MAX_LAUNCHED = 4
"""Copies of a call that were launched and not waited for: as many as keep the link busy while a thread wakes up."""
_MAX_CALLS = 4  # that launch copies at once; others wait for them
_NUM_STREAMS = 2  # of each direction: one slot is gathered or scattered while the link copies another
_PROGRAMS = 32  # as many as keep the link to the host full; the other multiprocessors belong to the step that runs meanwhile
_MIB = 1 << 20


@dataclass(slots=True, frozen=True)
class _Slot:
    """host: uint8 [slot_bytes] in pinned memory.
    device: as much in the GPU's; [0] where all blocks are large.
    host_ids, device_ids: int64 [as many blocks as fit], likewise.
    streams: those that the slot uses; none on a CPU.
    """

    host: torch.Tensor
    device: torch.Tensor
    host_ids: torch.Tensor
    device_ids: torch.Tensor
    streams: dict[Operation, torch.cuda.Stream]


@dataclass(slots=True, frozen=True)
class _Launched:
    """A copy that was launched. event: recorded behind it; None on a CPU, where it has ended."""

    slot: _Slot
    part: range
    num_bytes: int
    event: torch.Event | None
    began_at: float


class HostStage:
    """Moves blocks of `pools`, one for each cache group: [num_blocks, …], contiguous, all on one device.

    `groups`: the pools as memory that a kvstore's client copies from and to. `transfers`, once set: where copies between the
    GPU and the host are counted, under the path `device`.
    """

    def __init__(self, pools: Sequence[torch.Tensor], num_bytes: int) -> None:
        """`num_bytes`: of pinned memory; as much of the GPU's is used where blocks are small.

        :raises TransportUnavailable: there is no such memory, or two blocks don't fit into it.
        """
        import torch

        from common.ops.backend import ready_for_threads

        self.device = pools[0].device
        blocks = [pool.view(torch.uint8).flatten(1) for pool in pools]
        largest = max(pool.shape[1] for pool in blocks)
        self.slot_bytes = max(num_bytes // NUM_SLOTS, largest) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        if self.slot_bytes < largest:
            self.slot_bytes += ALIGNMENT_BYTES
        self.num_slots = num_bytes // self.slot_bytes
        if self.num_slots < 2:
            raise TransportUnavailable(f"kv_stage_mb {num_bytes // _MIB} holds less than two blocks of {largest} bytes")
        on_gpu, smallest = self.device.type == "cuda", min(pool.shape[1] for pool in blocks)
        staging_bytes, num_ids = (self.slot_bytes, self.slot_bytes // smallest) if smallest < DIRECT_BYTES else (0, 0)
        try:
            host = torch.empty(self.num_slots, self.slot_bytes, dtype=torch.uint8, pin_memory=on_gpu)
            staging = torch.empty(self.num_slots, staging_bytes, dtype=torch.uint8, device=self.device)
            host_ids = torch.empty(self.num_slots, num_ids, dtype=torch.int64, pin_memory=on_gpu)
            ids = torch.empty(self.num_slots, num_ids, dtype=torch.int64, device=self.device)
            streams: list[dict[Operation, torch.cuda.Stream]] = [
                {"read": torch.cuda.Stream(self.device), "write": torch.cuda.Stream(self.device)} if on_gpu else {}
                for _ in range(_NUM_STREAMS)
            ]
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise TransportUnavailable(
                f"{num_bytes // _MIB} MiB of pinned memory, and of the GPU's, are refused: {reason}"
            ) from error
        ready_for_threads()
        memory = zip(host, staging, host_ids, ids, strict=True)
        self._free: LifoQueue[_Slot] = LifoQueue()  # what was used last is still in a cache
        for number, parts in enumerate(memory):
            self._free.put(_Slot(*parts, streams[number % _NUM_STREAMS]))
        self.transfers: TransferCounts | None = None
        num_threads = min(self.num_slots, max(2, len(os.sched_getaffinity(0)) // CORES_PER_THREAD))
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="kv-stage")
        self._num_ahead = num_threads + 2
        """Parts that are being filled, or wait for it, or for being copied to the GPU: more would leave the caches first."""
        self._links = ThreadPoolExecutor(_MAX_CALLS, thread_name_prefix="kv-stage-link")
        self._closed = self._given_up = False
        self.groups = [StagedBlocks(self, pool) for pool in blocks]

    @property
    def num_free_slots(self) -> int:
        return self._free.qsize()

    def read(self, pool: torch.Tensor, blocks: Sequence[int], take: Take[T]) -> list[T]:
        """See `BlockMemory.read`. pool: one of the stage's."""
        return self._run(lambda: self._read(pool, blocks, take))

    def write(self, pool: torch.Tensor, blocks: Sequence[int], fill: Fill) -> int:
        """See `BlockMemory.write`. pool: one of the stage's."""
        return self._run(lambda: self._write(pool, blocks, fill))

    def _run(self, call: Callable[[], R]) -> R:
        """:raises TransportUnavailable: the stage is closed, or given up."""
        if self._closed:
            raise TransportUnavailable("the stage is closed")
        running = self._links.submit(call)
        while wait([running], timeout=LOOK_EVERY_S).not_done:
            if self._given_up:
                raise TransportUnavailable("the engine was given up")
        return running.result()

    def _parts(self, num_blocks: int, block_bytes: int) -> deque[range]:
        size = self.slot_bytes // block_bytes
        return deque(range(start, min(start + size, num_blocks)) for start in range(0, num_blocks, size))

    def _read(self, pool: torch.Tensor, blocks: Sequence[int], take: Take[T]) -> list[T]:
        left, launched, failed = self._parts(len(blocks), pool.shape[1]), deque[_Launched](), False
        taken: list[Future[T]] = []

        def use(slot: _Slot, part: range) -> T:
            nonlocal failed
            try:
                return take(_rows(slot, part, pool).numpy(), range(len(part)), part)
            except BaseException:
                failed = True
                raise
            finally:
                self._free.put(slot)

        try:
            while launched or (left and not failed):
                slot = None
                if left and not failed and len(launched) < MAX_LAUNCHED:
                    slot = self._free_slot(wait=not launched)
                if slot is not None:
                    part = left.popleft()
                    launched.append(self._launch("read", slot, part, pool, blocks))
                    continue
                copy = launched.popleft()
                self._land("read", copy)
                taken.append(self._threads.submit(use, copy.slot, copy.part))
        finally:
            self._abandon(launched)
            wait(taken)
        return [one.result() for one in taken]

    def _write(self, pool: torch.Tensor, blocks: Sequence[int], fill: Fill) -> int:
        left, launched = self._parts(len(blocks), pool.shape[1]), deque[_Launched]()
        filled: SimpleQueue[tuple[_Slot, range, int | BaseException]] = SimpleQueue()
        num_filling, num_good, error = 0, dict[int, int](), None

        def prepare(slot: _Slot, part: range) -> None:
            try:
                filled.put((slot, part, fill(_rows(slot, part, pool).numpy(), range(len(part)), part)))
            except BaseException as raised:
                filled.put((slot, part, raised))

        try:
            while left or num_filling or launched:
                while left and num_filling < self._num_ahead:
                    slot = self._free_slot(wait=not num_filling and not launched)
                    if slot is None:
                        break
                    self._threads.submit(prepare, slot, left.popleft())
                    num_filling += 1
                found = _next(filled, wait=not launched) if num_filling and len(launched) < MAX_LAUNCHED else None
                if found is None:
                    copy = launched.popleft()
                    self._land("write", copy)
                    self._free.put(copy.slot)
                    continue
                slot, part, result = found
                num_filling -= 1
                good = 0 if isinstance(result, BaseException) else result
                if isinstance(result, BaseException):
                    error = error or result
                num_good[part.start] = good
                if good < len(part):
                    left.clear()  # of no use behind a bad block
                if good and error is None:
                    launched.append(self._launch("write", slot, part[:good], pool, blocks))
                else:
                    self._free.put(slot)
        finally:
            self._abandon(launched)
            for _ in range(num_filling):
                self._free.put(filled.get()[0])
        if error is not None:
            raise error
        done = 0
        while num_good.get(done):  # a part ends where the next begins, if it is whole
            done += num_good[done]
        return done

    def _free_slot(self, *, wait: bool) -> _Slot | None:
        return _next(self._free, wait=wait)

    def _launch(self, operation: Operation, slot: _Slot, part: range, pool: torch.Tensor, blocks: Sequence[int]) -> _Launched:
        """Launch the copy of a part of `blocks`; the slot is free again where this raises.

        :raises TransportUnavailable: the GPU failed, or the blocks can't be copied.
        """
        import torch

        stream, began_at, rows = slot.streams.get(operation), time.perf_counter(), _rows(slot, part, pool)
        try:
            with torch.inference_mode(), torch.cuda.stream(stream):
                try:
                    (self.gather if operation == "read" else self.scatter)(slot, pool, blocks[part.start : part.stop])
                except BaseException:
                    if stream is not None:  # some of it may have been launched
                        stream.synchronize()
                    raise
                # who waits for it sleeps, as other threads have work for this core
                event = None if stream is None else stream.record_event(torch.cuda.Event(blocking=True))
        except BaseException as error:
            self._free.put(slot)
            self._failed(operation, error)
            raise
        return _Launched(slot, part, rows.nbytes, event, began_at)

    def _land(self, operation: Operation, copy: _Launched) -> None:
        """Wait for the end of a copy; its slot is free where this raises. :raises TransportUnavailable: the GPU failed."""
        try:
            if copy.event is not None:
                copy.event.synchronize()
        except BaseException as error:
            self._free.put(copy.slot)
            self._failed(operation, error)
            raise
        if self.transfers is not None:
            self.transfers.copied("device", operation, copy.num_bytes, time.perf_counter() - copy.began_at)

    def _abandon(self, launched: deque[_Launched]) -> None:
        """Wait for copies that nobody uses any more, and free their slots."""
        while launched:
            copy = launched.popleft()
            try:
                if copy.event is not None:
                    copy.event.synchronize()
            except RuntimeError as error:
                log.warning("kv_stage_copy_failed", reason=str(error).splitlines()[0])
            self._free.put(copy.slot)

    def _failed(self, operation: Operation, error: BaseException) -> None:
        """:raises TransportUnavailable: where the error is the GPU's, or of blocks that can't be copied."""
        if isinstance(error, (RuntimeError, ValueError)):
            if self.transfers is not None:
                self.transfers.failed("device", operation, TransportUnavailable.code)
            raise TransportUnavailable(f"copying between host and GPU failed: {error}") from error

    def gather(self, slot: _Slot, pool: torch.Tensor, blocks: Sequence[int]) -> None:
        """Launch copies of blocks to the beginning of a slot."""
        from common.ops.kv.block_copy import gather_blocks

        host = _rows(slot, blocks, pool)
        if pool.shape[1] >= DIRECT_BYTES:
            for block, row, count in runs(blocks, range(len(blocks))):
                host[row : row + count].copy_(pool[block : block + count], non_blocking=True)
        else:
            staged = slot.device[: host.nbytes].view(host.shape)
            gather_blocks(pool, _ids(slot, blocks), staged, max_programs=_PROGRAMS)
            host.copy_(staged, non_blocking=True)

    def scatter(self, slot: _Slot, pool: torch.Tensor, blocks: Sequence[int]) -> None:
        """Launch copies of the beginning of a slot to blocks."""
        from common.ops.kv.block_copy import scatter_blocks

        host = _rows(slot, blocks, pool)
        if pool.shape[1] >= DIRECT_BYTES:
            for block, row, count in runs(blocks, range(len(blocks))):
                pool[block : block + count].copy_(host[row : row + count], non_blocking=True)
        else:
            staged = slot.device[: host.nbytes].view(host.shape)
            staged.copy_(host, non_blocking=True)
            scatter_blocks(staged, pool, _ids(slot, blocks), max_programs=_PROGRAMS)

    def check(self) -> None:
        """Take a test pattern to blocks of each pool and back, before any step runs. No request waits for a compiler then.

        The blocks have the content that they had.

        :raises TransportUnavailable: the GPU failed, or something else came back.
        """
        for group in self.groups:
            blocks = sorted({group.num_blocks - 1, 0}, reverse=True)
            content = np.concatenate(group.read(blocks, _copied))
            pattern = np.random.default_rng(0).integers(0, 256, content.shape, np.uint8)
            group.write(blocks, _from(pattern))
            found = np.concatenate(group.read(blocks, _copied))
            group.write(blocks, _from(content))
            if (found != pattern).any():
                raise TransportUnavailable("a test pattern came back damaged from the GPU")

    def close(self) -> None:
        """Wait for what is being copied, and end the threads. Harmless twice."""
        self._closed = True
        self._links.shutdown(wait=not self._given_up, cancel_futures=self._given_up)
        self._threads.shutdown(wait=not self._given_up, cancel_futures=self._given_up)

    def give_up(self) -> None:
        """The GPU hangs, and the process is about to end: wait for no copy any more."""
        self._closed = self._given_up = True


class StagedBlocks:
    """A pool of a `HostStage`, uint8 [num_blocks, block_bytes]: see `BlockMemory`."""

    def __init__(self, stage: HostStage, pool: torch.Tensor) -> None:
        self.num_blocks, self.block_bytes = pool.shape
        self.num_at_once = max(stage.num_slots * stage.slot_bytes, AT_ONCE_BYTES) // self.block_bytes
        self.stage = stage
        self._pool = pool

    def read(self, blocks: Sequence[int], take: Take[T]) -> list[T]:
        """See `BlockMemory.read`."""
        return self.stage.read(self._pool, blocks, take)

    def write(self, blocks: Sequence[int], fill: Fill) -> int:
        """See `BlockMemory.write`."""
        return self.stage.write(self._pool, blocks, fill)


def _rows(slot: _Slot, blocks: Sized, pool: torch.Tensor) -> torch.Tensor:
    """Return the beginning of a slot as uint8 [len(blocks), block_bytes] in host memory."""
    return slot.host[: len(blocks) * pool.shape[1]].view(len(blocks), pool.shape[1])


def _next(queue: SimpleQueue[R] | LifoQueue[R], *, wait: bool) -> R | None:
    """Return what is next in a queue; None: it is empty, and the caller does not wait."""
    try:
        return queue.get(block=wait)
    except Empty:
        return None


def _ids(slot: _Slot, blocks: Sequence[int]) -> torch.Tensor:
    """Return ids on the device, for what is launched next in this stream. The host does not wait for them: what the slot holds
    stays as it is until the stream's work has ended."""
    import torch

    host, device = slot.host_ids[: len(blocks)], slot.device_ids[: len(blocks)]
    host.copy_(torch.tensor(list(blocks), dtype=torch.int64))
    return device.copy_(host, non_blocking=True)


def _copied(rows: np.ndarray, indices: Sequence[int], part: range) -> np.ndarray:
    return rows[list(indices)].copy()


def _from(content: np.ndarray) -> Fill:
    def fill(rows: np.ndarray, indices: Sequence[int], part: range) -> int:
        rows[list(indices)] = content[part.start : part.stop]
        return len(part)

    return fill


def open_stage(pools: Sequence[torch.Tensor], stage_mb: int) -> HostStage | None:
    """Return a stage for a GPU's pools that was checked; None without one.

    Where the system refuses the memory, or anything else fails, a line in the log says so, and the worker goes on without a
    kvstore.
    """
    if not stage_mb:
        return None
    try:
        stage = HostStage(pools, stage_mb * _MIB)
        try:
            stage.check()
        except BaseException:
            stage.close()
            raise
    except Exception as error:  # a kernel that does not compile, for instance: no reason to serve nobody
        reason = str(error) if isinstance(error, TransportUnavailable) else f"{type(error).__name__}: {error}"
        log.warning("kv_stage_unavailable", reason=reason, consequence="this worker uses no kvstore", hint="--kv-stage-mb")
        return None
    return stage
