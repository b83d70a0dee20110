"""Large blocks between a kvstore's memory and a GPU without the interpreter: the calls of compiled code.

What they do, and why, is in `common/ops/kv/stage_ring_numba.py`; here are the addresses and handles that it needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from common.protocol.errors import TransportUnavailable
from common.transfer.checked_copies import CopyIn, CopyOut
from common.transfer.checksums import crc32_address
from common.transfer.cuda_driver import CudaDriver
from common.transfer.paths import Operation
from common.transfer.pinned_memory import PinnedMemory

if TYPE_CHECKING:
    import torch

DEPTH = 4
"""A thread's slots: the copy engine works on some of them, and the thread on another."""
ALIGNMENT_BYTES = 512
PIECE_BYTES = 1 << 20
"""Of a slot. Each costs a call of the driver and a wait for its event: on an H100's machine blocks came in at 14 GB/s in pieces
of 256 KiB, at 24 in pieces of 512 KiB, and at 26 of 2 MiB in an earlier state of the ring (docs/performance/kv.md)."""


@dataclass(frozen=True)
class Handles:
    """events: int64 [DEPTH], of one slot; streams: of each direction. All 0 on a CPU."""

    events: np.ndarray
    streams: dict[Operation, int]
    keeps: Sequence[Any] = ()
    """What the handles are of."""


@contextmanager
def ended(
    streams: Sequence[torch.cuda.Stream | None], launch_lock: AbstractContextManager[object] | None = None
) -> Iterator[None]:
    """Wait at the end for everything that was launched inside in these streams, also if an error is raised.

    launch_lock: held inside, and released before the wait. Threads that share streams then wait for their own launches only.

    :raises TransportUnavailable: the GPU failed.
    """
    import torch

    ends: list[torch.cuda.Event] = []
    try:
        try:
            with launch_lock or nullcontext():
                try:
                    yield
                finally:
                    for stream in streams:
                        if stream is not None:
                            end = torch.cuda.Event(blocking=True)
                            end.record(stream)
                            ends.append(end)
        finally:
            for end in ends:  # sleeps, as other threads have work for this core
                end.synchronize()
    except (RuntimeError, ValueError) as error:
        raise TransportUnavailable(f"copying between host and GPU failed: {error}") from error


@dataclass(slots=True, frozen=True)
class Slot:
    """host: uint8 [slot_bytes] in pinned memory.
    device: as much in the GPU's; [0] where all blocks are large.
    host_ids, device_ids: int64 [as many blocks as fit], likewise.
    streams: those that the slot uses; none on a CPU.
    handles: of them, for the ring; None without one.
    """

    host: torch.Tensor
    device: torch.Tensor
    host_ids: torch.Tensor
    device_ids: torch.Tensor
    streams: dict[Operation, torch.cuda.Stream]
    handles: Handles | None


class StageRing:
    """Copies between lent memory and a pool, in one call of each thread."""

    def __init__(self, device: torch.device) -> None:
        """Compile what copies, or load it: seconds where it was never compiled.

        :raises TransportUnavailable: there is no driver, or no code for this processor.
        """
        address = crc32_address()
        try:
            from common.ops.kv import stage_ring_numba
        except ImportError as error:
            raise TransportUnavailable(f"numba can't be imported: {error}") from error
        if not address:
            raise TransportUnavailable("ISA-L can't be called by address")
        self._code = stage_ring_numba
        self.driver = CudaDriver(device.index or 0) if device.type == "cuda" else None
        calls = self.driver.addresses() if self.driver is not None else stage_ring_numba.host_functions()
        self._functions = np.array([address, *calls], np.int64)
        self._compile()

    def handles(self, streams: dict[Operation, torch.cuda.Stream]) -> Handles:
        """Return those of a slot that uses these streams."""
        import torch

        if self.driver is None:
            return Handles(np.zeros(DEPTH, np.int64), {"read": 0, "write": 0})
        events = [torch.cuda.Event(blocking=True) for _ in range(DEPTH)]
        for event in events:
            event.record(streams["read"])  # makes it
        numbers = np.array([event.cuda_event for event in events], np.int64)
        return Handles(numbers, {operation: stream.cuda_stream for operation, stream in streams.items()}, events)

    def pinned_memory(self) -> PinnedMemory | None:
        """Return what pins memory for this ring's GPU; None on a CPU."""
        return PinnedMemory(self.driver.register, self.driver.unregister) if self.driver is not None else None

    def copy_each(self, targets: NDArray[np.int64], sources: NDArray[np.int64], num_bytes: int, stream: int) -> None:
        """Have the copy engine copy so many bytes from each address to another, in a stream.

        :raises TransportUnavailable: the driver failed. Some copies may have begun.
        """
        if self.driver is not None and self.driver.copy_batch(targets, sources, num_bytes, stream):
            return
        if self.driver is not None:
            self.driver.bind()
        if failed := self._code.copy_each(targets, sources, num_bytes, stream, self._functions):
            raise TransportUnavailable(f"copying between host and GPU failed: CUDA error {failed}")

    def call(self, pool: torch.Tensor, blocks: Sequence[int], copy: CopyIn | CopyOut, slot_bytes: int) -> RingCall:
        """Return the copy of blocks of a pool [num_blocks, block_bytes] into lent memory, or out of it, through slots of this
        size, as threads make it together."""
        return RingCall(self._code, self.driver, self._functions, pool, blocks, copy, slot_bytes)

    def _compile(self) -> None:
        """Make each call once, without anything to copy: a kvstore's grant would end while its first write compiles."""
        import torch

        pool, memory = torch.empty(0, ALIGNMENT_BYTES, dtype=torch.uint8), np.empty((0, ALIGNMENT_BYTES), np.uint8)
        slot = torch.empty(DEPTH, ALIGNMENT_BYTES, dtype=torch.uint8)
        handles = Handles(np.zeros(DEPTH, np.int64), {"read": 0, "write": 0})
        for copy in (CopyIn(memory, [], []), CopyOut(memory, [])):
            self.call(pool, [], copy, slot.nbytes).work(slot, handles, np.zeros(1, np.int64))
        self.copy_each(np.zeros(0, np.int64), np.zeros(0, np.int64), 0, 0)


class RingCall:
    """One copy, which any number of threads make together."""

    def __init__(
        self,
        code: Any,
        driver: CudaDriver | None,
        functions: np.ndarray,
        pool: torch.Tensor,
        blocks: Sequence[int],
        copy: CopyIn | CopyOut,
        slot_bytes: int,
    ) -> None:
        self._code, self._driver, self._functions, self._copy = code, driver, functions, copy
        self._piece_bytes = min(PIECE_BYTES, slot_bytes // DEPTH // ALIGNMENT_BYTES * ALIGNMENT_BYTES)
        self.num_blocks = len(blocks)
        self._state = code.new_state(len(blocks))
        sums = copy.checksums if isinstance(copy, CopyIn) else np.zeros(len(blocks), np.int64)
        self._checksums = np.array(sums, np.int64)
        memory, theirs = copy.memory, np.array(copy.blocks, np.int64)
        assert len(theirs) == len(self._checksums) == len(blocks) and memory.shape[1] == pool.shape[1]
        ids = np.array(blocks, np.int64)
        assert not len(ids) or (ids.min() >= 0 and ids.max() < len(pool) and theirs.min() >= 0 and theirs.max() < len(memory))
        places = memory.ctypes.data, memory.strides[0], theirs, self._checksums
        self._job = code.Job(*places, pool.data_ptr(), ids, pool.shape[1], self._piece_bytes)

    @property
    def more(self) -> bool:
        """Whether there is a block that no thread has taken."""
        left = int(self._state[self._code.NEXT]) < self.num_blocks
        return left and not self._failed and int(self._state[self._code.BAD]) == self.num_blocks

    @property
    def num_good(self) -> int:
        return int(self._state[self._code.BAD])

    @property
    def checksums(self) -> list[int]:
        return self._checksums.tolist()

    def work(self, host: torch.Tensor, handles: Handles, paused: np.ndarray) -> None:
        """Copy blocks through a slot, `host`, until none is left, or, out of the pool, until paused[0] is not 0.

        :raises TransportUnavailable: the driver failed, here or in another thread. Its streams may not be idle.
        """
        if self._driver is not None:
            self._driver.bind()
        slots = host.data_ptr() + np.arange(DEPTH, dtype=np.int64) * self._piece_bytes
        operation: Operation = "write" if isinstance(self._copy, CopyIn) else "read"
        lane = self._code.Lane(slots, handles.events, handles.streams[operation])
        if operation == "write":
            self._code.send_blocks(self._state, self._job, lane, self._functions)
        else:
            self._code.receive_blocks(self._state, self._job, lane, self._functions, paused)
        if self._failed:
            raise TransportUnavailable(f"copying between host and GPU failed: CUDA error {self._failed}")

    @property
    def _failed(self) -> int:
        return int(self._state[self._code.FAILED])
