"""A transfer: what it says while it runs, and that nothing is written once it has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import anyio
import numpy as np
import pytest

from common.protocol.errors import Cancelled, StaleHandle, TransportUnavailable
from common.runtime.metrics import Metrics
from common.transfer.base import LocalBlocks, RemoteBlocks
from common.transfer.measured import MeasuredTransport, TransferCounts
from common.transfer.memory import Faults, MemoryFabric, MemoryTransport
from common.transfer.paths import KvPath
from common.transfer.transfer import Pulling, Transfer
from tests.waiting import until

BLOCK_BYTES = 64
NUM_BLOCKS = 10


class Gated(Pulling):
    """A read waits until it is let through, and then writes."""

    slice_bytes = 4 * BLOCK_BYTES

    def __init__(self) -> None:
        self.began, self.go_on = threading.Semaphore(0), threading.Semaphore(0)
        self.seen: list[RemoteBlocks] = []

    def path_of(self, source: RemoteBlocks) -> KvPath:
        return "memory"

    def read(self, source: RemoteBlocks, into: np.ndarray, into_blocks: Sequence[int]) -> int:
        self.seen.append(source)
        self.began.release()
        assert self.go_on.acquire(timeout=30)
        into[list(into_blocks)] = 1
        return len(into_blocks) * into.shape[1]


def blocks(count: int = NUM_BLOCKS) -> tuple[RemoteBlocks, LocalBlocks]:
    source = RemoteBlocks("host", "prefill-1", "m", list(range(count)), list(range(100, 100 + count)), list(range(count)))
    return source, LocalBlocks(np.zeros((NUM_BLOCKS, BLOCK_BYTES), np.uint8), list(range(count))[::-1])


async def reached(gated: Gated) -> None:
    with anyio.fail_after(30):
        await anyio.to_thread.run_sync(lambda: gated.began.acquire(timeout=30))


async def test_it_copies_slice_by_slice_and_says_how_far_it_is() -> None:
    gated = Gated()
    source, target = blocks()
    transfer = gated.pull(source, target)
    assert (transfer.num_blocks, transfer.num_bytes, transfer.is_cancelled) == (0, 0, False)
    copied: list[int] = []

    async def own() -> None:
        copied.append(await transfer)

    async with anyio.create_task_group() as group:
        group.start_soon(own)
        for done in (0, 4, 8):
            await reached(gated)
            assert (transfer.num_blocks, transfer.num_bytes) == (done, done * BLOCK_BYTES)
            gated.go_on.release()
    assert copied == [NUM_BLOCKS * BLOCK_BYTES] == [transfer.num_bytes]
    assert [list(part.blocks) for part in gated.seen] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [list(part.generations) for part in gated.seen][2] == [108, 109] and list(gated.seen[2].checksums) == [8, 9]
    assert target.memory.all()


async def test_cancel_returns_once_nothing_is_written_any_more() -> None:
    gated = Gated()
    source, target = blocks()
    transfer = gated.pull(source, target)
    ended: list[str] = []

    async def own() -> None:
        with pytest.raises(Cancelled):
            await transfer
        ended.append("awaited")

    async def cancel() -> None:
        await transfer.cancel()
        assert target.memory[list(target.blocks[:4])].all(), "the slice that had begun was written before"
        ended.append("cancelled")

    async with anyio.create_task_group() as group:
        group.start_soon(own)
        await reached(gated)
        group.start_soon(cancel)
        await until(lambda: transfer.is_cancelled)
        assert not ended
        gated.go_on.release()
    assert sorted(ended) == ["awaited", "cancelled"]
    assert len(gated.seen) == 1 and transfer.num_blocks == 4
    assert not target.memory[list(target.blocks[4:])].any()
    await transfer.cancel()


async def test_a_transfer_cancelled_before_it_began_copies_nothing() -> None:
    gated = Gated()
    transfer = gated.pull(*blocks())
    await transfer.cancel()
    with pytest.raises(Cancelled):
        await transfer
    assert not gated.seen


async def test_a_task_that_is_cancelled_leaves_once_the_copy_has_ended() -> None:
    gated = Gated()
    source, target = blocks(4)
    transfer = gated.pull(source, target)
    left = anyio.Event()

    async def own(scope: anyio.CancelScope) -> None:
        try:
            with scope:
                await transfer
        finally:
            left.set()

    async with anyio.create_task_group() as group:
        scope = anyio.CancelScope()
        group.start_soon(own, scope)
        await reached(gated)
        scope.cancel()
        await anyio.wait_all_tasks_blocked()
        assert not left.is_set()
        gated.go_on.release()
    assert target.memory[list(target.blocks)].all()


@pytest.mark.parametrize("faults", [Faults(fail_every=1), Faults(stale_every=1), Faults(truncate_every=1)])
async def test_an_error_of_the_transport_is_the_transfers(faults: Faults) -> None:
    fabric = MemoryFabric()
    fabric.add("host", "prefill-1", "m", np.ones((NUM_BLOCKS, BLOCK_BYTES), np.uint8), np.arange(100, 110, dtype=np.uint64))
    transfer = MemoryTransport(fabric, faults).pull(*blocks())
    with pytest.raises((TransportUnavailable, StaleHandle)):
        await transfer
    assert transfer.num_blocks == transfer.num_bytes == 0
    await transfer.cancel()


async def test_a_transfer_counts_as_one_copy_and_one_given_up_as_no_failure() -> None:
    counts = TransferCounts(Metrics(role="decode"))
    gated = Gated()
    measured = MeasuredTransport(gated, counts)
    gated.go_on.release(3)
    assert await measured.pull(*blocks()) == NUM_BLOCKS * BLOCK_BYTES
    (total,) = counts.totals()
    assert (total.bytes, total.copies, total.failures) == (NUM_BLOCKS * BLOCK_BYTES, 1, 0)
    given_up: list[Transfer] = [measured.pull(*blocks())]
    await given_up[0].cancel()
    with pytest.raises(Cancelled):
        await given_up[0]
    (total,) = counts.totals()
    assert (total.bytes, total.failures) == (NUM_BLOCKS * BLOCK_BYTES, 0)


async def test_nothing_to_copy_is_copied_at_once() -> None:
    assert await Gated().pull(*blocks(0)) == 0
    begins = Begins()
    assert await begins.pull(*blocks(0)) == 0 and not begins.events, "nobody would end it"


class Begins(Gated):
    """The first slice begins without a thread. `events`: what happened, in order."""

    def __init__(self, *, can: bool = True) -> None:
        super().__init__()
        self.events: list[str] = []
        self.can = can

    def begin(self, source: RemoteBlocks, into: np.ndarray, into_blocks: Sequence[int]) -> Callable[[], int] | None:
        if not self.can:
            return None
        self.events.append(f"begun {len(source.blocks)}")

        def end() -> int:
            self.events.append("ended")
            into[list(into_blocks)] = 1
            return len(into_blocks) * into.shape[1]

        return end


@pytest.mark.parametrize("measured", [False, True])
async def test_a_copy_begins_in_the_turn_that_awaits_it(measured: bool) -> None:
    begins = Begins()
    begins.go_on.release(2)
    counts = TransferCounts(Metrics(role="decode"))
    source, target = blocks()
    transfer = (MeasuredTransport(begins, counts) if measured else begins).pull(source, target)

    async def copy() -> None:
        assert await transfer == NUM_BLOCKS * BLOCK_BYTES

    async def other() -> None:
        begins.events.append("another task")

    async with anyio.create_task_group() as group:
        group.start_soon(copy)
        group.start_soon(other)
    assert begins.events[0] == "begun 4" and set(begins.events[1:]) == {"another task", "ended"}
    assert [len(seen.blocks) for seen in begins.seen] == [4, 2], "the other slices are read"
    assert (target.memory == 1).all() and dict(transfer.facts())["queued_us"] == 0
    assert [total.bytes for total in counts.totals()] == ([NUM_BLOCKS * BLOCK_BYTES] if measured else [])


async def test_what_has_begun_is_ended_even_if_nobody_wants_it_any_more() -> None:
    begins = Begins()
    transfer = begins.pull(*blocks())
    with anyio.CancelScope() as scope:
        scope.cancel()
        with pytest.raises(Cancelled):
            transfer._begin, begin = (lambda *given: (transfer.stop(), begin(*given))[1]), transfer._begin
            await transfer
    assert begins.events == ["begun 4", "ended"] and transfer.num_blocks == 4
    stopped = begins.pull(*blocks())
    stopped.stop()
    with pytest.raises(Cancelled):
        await stopped
    assert begins.events == ["begun 4", "ended"], "nothing begins"


async def test_what_cannot_begin_at_once_is_read() -> None:
    begins = Begins(can=False)
    begins.go_on.release(3)
    assert await begins.pull(*blocks()) == NUM_BLOCKS * BLOCK_BYTES
    assert [len(seen.blocks) for seen in begins.seen] == [4, 4, 2]
