"""Copies that wait for a step: they begin when it has run, and no thread waits for ever."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import anyio
import numpy as np
import pytest

from common.protocol.errors import Cancelled, TransportUnavailable
from common.transfer import awaited
from common.transfer.awaited import Awaited
from common.transfer.base import LocalBlocks, RemoteBlocks
from common.transfer.transfer import MAX_AWAITING, Pulling, Transfer


class Prepared(Pulling):
    """Notes what is got ready, what is copied by that, and what is read without."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def read(self, source: RemoteBlocks, into: np.ndarray, into_blocks: Sequence[int]) -> int:
        self.said.append("read")
        return len(into_blocks)

    def begin(self, source: RemoteBlocks, into: np.ndarray, into_blocks: Sequence[int]) -> Callable[[], int] | None:
        self.said.append("begun")
        return None

    def prepare(self, source: RemoteBlocks, into: np.ndarray, into_blocks: Sequence[int]) -> Callable[[], int] | None:
        self.said.append("ready")

        def copy() -> int:
            self.said.append("copied")
            return len(into_blocks)

        return copy


def pull(transport: Pulling, after: Awaited | None) -> Transfer:
    source = RemoteBlocks("host", "prefill-1", "m", [0, 1], [0, 0])
    return transport.pull(source, LocalBlocks(np.zeros((2, 8), np.uint8), [0, 1]), after)


def waiting(ran: Callable[[], int], step: int = 5, due_s: float = 0.0) -> Awaited:
    return Awaited(step, ran, time.perf_counter() + due_s)


@pytest.mark.parametrize("due_s", [-1.0, 0.0, 0.03])
def test_the_word_ends_the_wait_whenever_it_was_expected(due_s: float) -> None:
    looked = iter([4] * 20)
    after = waiting(lambda: next(looked, 5), due_s=due_s)
    after.wait()
    assert next(looked, None) is None, "it was looked at until it said so"


def test_a_message_ends_the_wait_at_once() -> None:
    after = waiting(lambda: 4, due_s=1000.0)
    after.told.set()
    begun = time.perf_counter()
    after.wait()
    assert time.perf_counter() - begun < 5


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(awaited, "PATIENCE_S", 0.02)
    with pytest.raises(TransportUnavailable, match="step 5"):
        waiting(lambda: 4).wait()


async def test_what_can_be_got_ready_is_before_the_step_has_run() -> None:
    transport, ran = Prepared(), [4]
    transfer = pull(transport, waiting(lambda: ran[0]))
    async with anyio.create_task_group() as group:
        group.start_soon(_awaiting, transfer)
        with anyio.fail_after(10):
            while not transport.said:
                await anyio.sleep(0.001)
        await anyio.sleep(0.01)
        assert transport.said == ["ready"]
        ran[0] = 6
    assert transport.said == ["ready", "copied"] and transfer.num_blocks == 2
    facts = dict(transfer.facts())
    assert facts["queued_us"] >= 10_000 > facts["copy_us"], "waiting is no copying"


async def test_hurrying_ends_the_wait_and_stopping_copies_nothing() -> None:
    for stops in (False, True):
        transport = Prepared()
        transfer = pull(transport, waiting(lambda: 0, due_s=1000.0))
        async with anyio.create_task_group() as group:
            group.start_soon(_given_up if stops else _awaiting, transfer)
            with anyio.fail_after(10):
                while not transport.said:
                    await anyio.sleep(0.001)
            transfer.stop() if stops else transfer.hurry()
        assert transport.said == (["ready"] if stops else ["ready", "copied"])


async def test_those_that_wait_keep_nobody_from_copying() -> None:
    transport = Prepared()
    waiting_ones = [pull(transport, waiting(lambda: 0, due_s=1000.0)) for _ in range(MAX_AWAITING)]
    async with anyio.create_task_group() as group:
        for transfer in waiting_ones:
            group.start_soon(_awaiting, transfer)
        with anyio.fail_after(10):
            while len(transport.said) < MAX_AWAITING:
                await anyio.sleep(0.001)
            await pull(transport, None)
        for transfer in waiting_ones:
            transfer.hurry()


async def _awaiting(transfer: Transfer) -> None:
    await transfer


async def _given_up(transfer: Transfer) -> None:
    with pytest.raises(Cancelled):
        await transfer
