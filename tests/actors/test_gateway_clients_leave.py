"""A client that cancels, stalls or runs out of time frees whoever works for it."""

from __future__ import annotations

import anyio
import pytest

from common.protocol import errors
from tests.actors.gateway_site import LONG, SHORT, Double, Site, read, read_some, site

pytestmark = pytest.mark.virtual_time


async def cancel_when(at: Site, holds: Double | None) -> None:
    stream = at.generate(LONG, max_tokens=10_000)
    if holds is not None:
        await at.until(lambda: holds.held)
    stream.cancel()
    with pytest.raises(errors.Cancelled):
        await read(stream)
    stream.cancel()
    await at.nothing_held()


async def test_a_cancel_frees_the_prefill_worker() -> None:
    async with site() as at:
        at.prefill[0].prefill_s = 5.0
        await cancel_when(at, at.prefill[0])


async def test_a_cancel_frees_the_decode_worker() -> None:
    async with site() as at:
        await cancel_when(at, at.decode[0])


async def test_a_cancel_frees_the_queue() -> None:
    async with site(prefill=0) as at:
        at.decode[0].credits = 0
        await anyio.sleep(0.15)
        await cancel_when(at, None)
        assert at.core.dispatcher.num_waiting == 0


async def test_a_cancel_while_the_task_is_on_its_way_frees_the_worker_that_takes_it() -> None:
    async with site() as at:
        await cancel_when(at, None)
        await anyio.sleep(0.1)
        await at.nothing_held()


async def test_a_deadline_frees_whoever_has_the_request() -> None:
    async with site() as at:
        at.prefill[0].prefill_s = 5.0
        with pytest.raises(errors.DeadlineExceeded):
            await read(at.generate(LONG, deadline_s=0.2))
        with pytest.raises(errors.DeadlineExceeded):
            await read(at.generate(SHORT, deadline_s=0.2, max_tokens=10_000))
        at.decode[0].credits = 0
        await anyio.sleep(0.15)
        with pytest.raises(errors.DeadlineExceeded):
            await read(at.generate(SHORT, deadline_s=0.2))
        await at.nothing_held()


async def test_a_reader_that_stalls_is_cut_off() -> None:
    async with site(slow_reader_timeout_s=0.3) as at:
        stream = at.generate(LONG, max_tokens=10_000)
        await read_some(stream, 1)
        await at.until(lambda: not at.core.dispatcher.requests)
        await at.nothing_held()
        with pytest.raises(errors.Cancelled):
            await read(stream)
