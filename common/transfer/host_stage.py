"""KV blocks of a GPU on their way to a kvstore and back, through pinned host memory, beside the steps.

    read    blocks ─► copied to a slot of pinned memory ─► `take`, which writes it on
    write   `fill`, which reads and checks ─► a slot ─► copied to the blocks

Large blocks are copied as they are. Small ones are gathered and scattered on the GPU, one launch for each slot, and pass
through GPU memory of the slot, since many small copies don't keep the link full.

The stage is divided into slots of equal size, and a thread works on one slot at a time: while one waits for the GPU's copy
engine, others compute checksums and copy to and from the kvstore's memory. Large blocks pass between the pool and a kvstore's
memory in one call of each thread, without the interpreter (`stage_ring.py`), or, where that memory is pinned, past the slots:
the copy engine takes them alone (`direct_copies.py`). Streams of the stage's own neither wait for steps
nor have them wait. Its kernels use few multiprocessors.

Copies have ended when a call returns or raises, whatever happened in it: a block that is given back then is read and written by
nobody. Only where the engine is given up, since its GPU hangs, does a call end without them; so does the process then.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import numpy as np

from common.protocol.errors import TransportUnavailable
from common.runtime import logs
from common.transfer.base import runs
from common.transfer.block_memory import Fill, T, Take
from common.transfer.checked_copies import CopyIn, CopyOut, checksums_of, prepare
from common.transfer.large_blocks import Copied, LargeBlocks
from common.transfer.paths import Operation
from common.transfer.pinned_memory import PinnedMemory
from common.transfer.stage_ring import Slot, StageRing, ended
from common.transfer.stage_threads import StageThreads

if TYPE_CHECKING:
    import torch

    from common.transfer.measured import TransferCounts

log = logs.get("transfer")

NUM_SLOTS = 16
"""A stage's memory is so many slots, fewer where they could not hold a block; one is used for each thread. On an H100's
machine a slot costs half a millisecond that threads can't share, whatever its size, so few large ones are faster."""
ALIGNMENT_BYTES = 512
DIRECT_BYTES = 256 << 10
"""Blocks of at least this size are copied one by one, or as many at once as are consecutive."""
AT_ONCE_BYTES = 1 << 30
"""Copied in one call, if there is so much: between two calls the link is idle. It takes 25 ms where a link is fast."""
CORES_PER_THREAD = 2
WAITING_THREADS = 2
"""One core in so many copies and computes checksums for a moment, at some 8 GB/s; so many threads more wait for the link."""
_NUM_STREAMS = 2  # of each direction: one slot is gathered or scattered while the link copies another
_PROGRAMS = 32  # as many as keep the link to the host full; the other multiprocessors belong to the step that runs meanwhile
_MIB = 1 << 20


class HostStage:
    """Moves blocks of `pools`, one for each cache group: [num_blocks, …], contiguous, all on one device.

    `groups`: the pools as memory that a kvstore's client copies from and to. `transfers`, once set: where copies between the
    GPU and the host are counted, under the path `device`.
    """

    def __init__(self, pools: Sequence[torch.Tensor], num_bytes: int, *, pins: bool = True) -> None:
        """`num_bytes`: of pinned memory at most; as much of the GPU's is used where blocks are small. `pins`: whether kvstores'
        memory may be pinned, too.

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
        if num_bytes // self.slot_bytes < 2:
            raise TransportUnavailable(f"kv_stage_mb {num_bytes // _MIB} holds less than two blocks of {largest} bytes")
        num_threads = len(os.sched_getaffinity(0)) // CORES_PER_THREAD + WAITING_THREADS
        self.num_slots = min(num_bytes // self.slot_bytes, num_threads)
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
        prepare()
        ring = self._open_ring() if largest >= DIRECT_BYTES else None
        slots = [
            Slot(*parts, used, ring.handles(used) if ring is not None else None)
            for parts, used in zip(zip(host, staging, host_ids, ids, strict=True), itertools.cycle(streams), strict=False)
        ]
        self.threads = StageThreads(slots)
        self._large = LargeBlocks(ring, self.threads, self.slot_bytes, streams, pins=pins) if ring is not None else None
        self.transfers: TransferCounts | None = None
        self.groups = [StagedBlocks(self, pool) for pool in blocks]

    @property
    def pinned(self) -> PinnedMemory | None:
        """Where a kvstore's memory is to be pinned; None: nowhere."""
        return self._large.pinned if self._large is not None else None

    @property
    def num_free_slots(self) -> int:
        return self.threads.num_free_slots

    def large(self, pool: torch.Tensor, blocks: Sequence[int], copy: CopyIn | CopyOut) -> Copied | None:
        """Copy large blocks of a pool as `copy` says, without the interpreter; None: nothing was copied, as that can't be.

        :raises TransportUnavailable: the stage is closed, or the GPU failed.
        """
        if self._large is None or pool.shape[1] < DIRECT_BYTES:
            return None
        operation: Operation = "write" if isinstance(copy, CopyIn) else "read"
        began_at = time.perf_counter()
        try:
            copied = self._large.copy(pool, blocks, copy)
        except TransportUnavailable:
            if self.transfers is not None:
                self.transfers.failed("device", operation, TransportUnavailable.code)
            raise
        if self.transfers is not None:
            num_bytes = copied.num_good * pool.shape[1]
            self.transfers.copied("device", operation, num_bytes, time.perf_counter() - began_at)
        return copied

    def _open_ring(self) -> StageRing | None:
        try:
            return StageRing(self.device)
        except TransportUnavailable as error:
            log.info("kv_stage_without_ring", reason=str(error), consequence="KV goes to and from a kvstore more slowly")
            return None

    def gather(self, pool: torch.Tensor, blocks: Sequence[int], slot: Slot) -> torch.Tensor:
        """Copy blocks to a slot; return it as uint8 [len(blocks), block_bytes] in host memory."""
        from common.ops.kv.block_copy import gather_blocks

        shape = len(blocks), pool.shape[1]
        host = slot.host[: shape[0] * shape[1]].view(shape)
        with self._copying(slot, "read", host.nbytes):
            if shape[1] >= DIRECT_BYTES:
                for block, row, count in runs(blocks, range(len(blocks))):
                    host[row : row + count].copy_(pool[block : block + count], non_blocking=True)
            else:
                staged = slot.device[: host.nbytes].view(shape)
                gather_blocks(pool, _ids(slot, blocks), staged, max_programs=_PROGRAMS)
                host.copy_(staged, non_blocking=True)
        return host

    def scatter(self, slot: Slot, pool: torch.Tensor, blocks: Sequence[int]) -> None:
        """Copy the beginning of a slot to blocks."""
        from common.ops.kv.block_copy import scatter_blocks

        shape = len(blocks), pool.shape[1]
        host = slot.host[: shape[0] * shape[1]].view(shape)
        with self._copying(slot, "write", host.nbytes):
            if shape[1] >= DIRECT_BYTES:
                for block, row, count in runs(blocks, range(len(blocks))):
                    pool[block : block + count].copy_(host[row : row + count], non_blocking=True)
            else:
                staged = slot.device[: host.nbytes].view(shape)
                staged.copy_(host, non_blocking=True)
                scatter_blocks(staged, pool, _ids(slot, blocks), max_programs=_PROGRAMS)

    def check(self) -> None:
        """Take a test pattern to blocks of each pool and back, before any step runs. No request waits for a compiler then.

        The blocks have the content that they had. Where large blocks come back damaged from the ring, or it fails, it is not
        used.

        :raises TransportUnavailable: the GPU failed, or something else came back.
        """
        try:
            self._check()
        except Exception as error:  # a ring that does not compile, for instance
            if self._large is None:
                raise
            log.warning("kv_stage_without_ring", reason=str(error), consequence="KV goes to and from a kvstore more slowly")
            self._large = None
            self._check()
        if self._large is not None:
            self._large.check_pinned([group.pool for group in self.groups if group.block_bytes >= DIRECT_BYTES])

    def _check(self) -> None:
        for group in self.groups:
            blocks = sorted({group.num_blocks - 1, 0}, reverse=True)
            content = np.concatenate(group.read(blocks, _copied))
            pattern, found = np.random.default_rng(0).integers(0, 256, content.shape, np.uint8), np.empty_like(content)
            rows = range(len(blocks))
            try:
                num_written = group.write(blocks, CopyIn(pattern, rows, checksums_of(pattern, rows)))
                group.read(blocks, CopyOut(found, rows))
                damaged = num_written < len(blocks) or (found != pattern).any()
                damaged = damaged or (np.concatenate(group.read(blocks, _copied)) != pattern).any()
            finally:
                group.write(blocks, _from(content))
            if damaged:
                raise TransportUnavailable("a test pattern came back damaged from the GPU")

    def close(self) -> None:
        """Wait for what is being copied, and end the threads. Harmless twice."""
        self.threads.close()

    def give_up(self) -> None:
        """The GPU hangs, and the process is about to end: wait for no copy any more."""
        self.threads.give_up()
        if self.pinned is not None:
            self.pinned.give_up()

    @contextmanager
    def _copying(self, slot: Slot, operation: Operation, num_bytes: int) -> Iterator[None]:
        """What is launched inside, in a stream of the slot, has ended when this has, also if an error is raised.

        :raises TransportUnavailable: the GPU failed.
        """
        import torch

        stream, began_at = slot.streams.get(operation), time.perf_counter()
        try:
            with ended([stream]), torch.inference_mode(), torch.cuda.stream(stream):
                yield
        except TransportUnavailable:
            if self.transfers is not None:
                self.transfers.failed("device", operation, TransportUnavailable.code)
            raise
        if self.transfers is not None:
            self.transfers.copied("device", operation, num_bytes, time.perf_counter() - began_at)


class StagedBlocks:
    """A pool of a `HostStage`, uint8 [num_blocks, block_bytes]: see `BlockMemory`."""

    def __init__(self, stage: HostStage, pool: torch.Tensor) -> None:
        self.num_blocks, self.block_bytes = pool.shape
        self.num_at_once = max(stage.num_slots * stage.slot_bytes, AT_ONCE_BYTES) // self.block_bytes
        self.stage = stage
        self.pool = pool

    @property
    def pinned(self) -> PinnedMemory | None:
        """See `BlockMemory`."""
        return self.stage.pinned

    def read(self, blocks: Sequence[int], take: Take[T]) -> list[T]:
        """See `BlockMemory.read`."""
        whole: object = take
        large = self.stage.large(self.pool, blocks, whole) if isinstance(whole, CopyOut) else None
        if large is not None:
            return [cast("T", large.checksums)]

        def copy(slot: Slot, part: range) -> T:
            host = self.stage.gather(self.pool, blocks[part.start : part.stop], slot)
            return take(host.numpy(), range(len(part)), part)

        return self.stage.threads.in_parts(len(blocks), self.stage.slot_bytes // self.block_bytes, copy, "read")

    def write(self, blocks: Sequence[int], fill: Fill) -> int:
        """See `BlockMemory.write`."""
        large = self.stage.large(self.pool, blocks, fill) if isinstance(fill, CopyIn) else None
        if large is not None:
            return large.num_good

        def copy(slot: Slot, part: range) -> int:
            rows = slot.host[: len(part) * self.block_bytes].view(len(part), self.block_bytes).numpy()
            num_good = fill(rows, range(len(part)), part)
            if num_good:
                self.stage.scatter(slot, self.pool, blocks[part.start : part.start + num_good])
            return num_good

        written, size = 0, self.stage.slot_bytes // self.block_bytes
        for num_good in self.stage.threads.in_parts(len(blocks), size, copy, "write"):
            written += num_good
            if num_good < size:
                break
        return written


def _ids(slot: Slot, blocks: Sequence[int]) -> torch.Tensor:
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


def open_stage(pools: Sequence[torch.Tensor], stage_mb: int, *, pins: bool = True) -> HostStage | None:
    """Return a stage for a GPU's pools that was checked; None without one. `pins`: see `HostStage`.

    Where the system refuses the memory, or anything else fails, a line in the log says so, and the worker goes on without a
    kvstore.
    """
    if not stage_mb:
        return None
    try:
        stage = HostStage(pools, stage_mb * _MIB, pins=pins)
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
