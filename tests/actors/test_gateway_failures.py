"""The gateway keeps every stream going, without a gap, whatever its workers and the bus do."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from common.protocol import errors
from common.protocol.messages import TokenFrame, TokenFrames
from tests.actors.gateway_site import LONG, SHORT, expected, many, read, read_some, site

pytestmark = pytest.mark.virtual_time

# -- workers die


async def test_a_prefill_worker_killed_before_its_first_token_is_replaced() -> None:
    async with site(prefill=2) as at:
        for double in at.prefill:
            double.mute = True
            double.prefill_s = 0.2
        stream = at.generate(LONG)
        for double in at.prefill:
            double.mute = False
        await at.until(lambda: any(double.held for double in at.prefill))
        await at.kill(next(double for double in at.prefill if double.held))
        with anyio.fail_after(3.0):
            assert await read(stream) == expected(LONG, 32)
        await at.nothing_held()


async def test_a_prefill_worker_killed_between_first_token_and_handoff_is_replaced() -> None:
    async with site(prefill=2) as at:
        for double in at.prefill:
            double.before_handoff_s = 0.3
        stream = at.generate(LONG)
        assert await read_some(stream, 1) == expected(LONG, 1)
        await at.kill(next(double for double in at.prefill if double.held))
        with anyio.fail_after(3.0):
            assert await read(stream) == expected(LONG, 32)[1:]
        await at.nothing_held()


async def test_a_killed_decode_worker_does_not_change_the_streams() -> None:
    async with site(prefill=1, decode=2) as at:
        async with anyio.create_task_group() as group:
            group.start_soon(many, at, 24)
            await at.until(lambda: len(at.decode[0].held) >= 8)
            await anyio.sleep(0.05)
            await at.kill(at.decode[0])
        assert at.core.dispatcher.stats.resumes > 0
        await at.nothing_held()


async def test_a_silent_worker_is_given_up_and_its_late_frames_are_fenced() -> None:
    async with site(prefill=0, decode=2) as at:
        stream = at.generate(LONG, max_tokens=200)
        got = await read_some(stream, 5)
        victim = next(double for double in at.decode if double.held)
        (held,) = victim.held.values()
        at.broker.cut(victim.memory_bus)
        got += await read_some(stream, 20)
        at.broker.heal(victim.memory_bus)
        late = TokenFrame(held.generation.request, held.generation.attempt, len(got), [666, 666])
        victim.send(at.gateway.ref, TokenFrames(worker=victim.ref, frames=[late]))
        assert got + await read(stream) == expected(LONG, 200)
        await at.nothing_held()


async def test_the_only_worker_dies_and_the_stream_waits_for_the_next() -> None:
    async with site(prefill=0) as at:
        stream = at.generate(LONG, max_tokens=200)
        got = await read_some(stream, 5)
        await at.kill(at.decode[0])
        await anyio.sleep(0.3)
        await at.add("decode")
        assert got + await read(stream) == expected(LONG, 200)
        await at.nothing_held()


async def test_a_draining_worker_gets_nothing_new_and_finishes_what_it_has() -> None:
    async with site(prefill=0, decode=2) as at:
        streams = [at.generate([number, *SHORT], max_tokens=60) for number in range(8)]
        await at.until(lambda: all(double.held for double in at.decode))
        leaving = at.decode[0]
        leaving.begin_drain()
        await anyio.sleep(0.1)
        before = len(leaving.tasks)
        more = [at.generate([100 + number, *SHORT], max_tokens=20) for number in range(8)]
        for number, stream in enumerate(streams):
            assert await read(stream) == expected([number, *SHORT], 60)
        for number, stream in enumerate(more):
            assert await read(stream) == expected([100 + number, *SHORT], 20)
        assert len(leaving.tasks) == before
        await at.nothing_held()


async def test_a_worker_that_joins_takes_load_within_two_seconds() -> None:
    async with site(prefill=0) as at:
        at.decode[0].step_s = 0.02
        async with anyio.create_task_group() as group:
            group.start_soon(many, at, 16)
            await anyio.sleep(0.1)
            await at.add("decode")
            await anyio.sleep(0.3)
            group.start_soon(many, at, 4)
        assert len(at.decode[1].tasks) >= 4


# -- frames get lost


async def test_lost_frames_are_fetched_and_the_stream_has_no_gap() -> None:
    async with site() as at:
        for double in at.workers:
            count = iter(range(10**6))
            double.lose = lambda frame, count=count: next(count) % 7 == 3
        await many(at, 10, max_tokens=40)
        assert at.core.dispatcher.stats.fetches > 0
        await at.nothing_held()


async def test_a_lost_last_frame_is_fetched() -> None:
    async with site(prefill=0) as at:
        dropped: list[TokenFrame] = []

        def lose_first_end(frame: TokenFrame) -> bool:
            if frame.finish is not None and not dropped:
                dropped.append(frame)
                return True
            return False

        at.decode[0].lose = lose_first_end
        with anyio.fail_after(3.0):
            assert await read(at.generate(SHORT)) == expected(SHORT, 32)
        assert dropped
        await at.nothing_held()


async def test_a_worker_that_forgot_the_request_says_so_twice_and_the_stream_goes_on_elsewhere() -> None:
    async with site(prefill=0, decode=2, lease_s=1.2, stall_s=5.0) as at:
        stream = at.generate(LONG, max_tokens=300)
        got = await read_some(stream, 3)
        next(double for double in at.decode if double.held).held.clear()
        with anyio.fail_after(5.0):
            assert got + await read(stream) == expected(LONG, 300)
        await at.nothing_held()


async def test_a_worker_whose_engine_hangs_is_left() -> None:
    async with site(prefill=0, decode=2) as at:
        stream = at.generate(LONG, max_tokens=100)
        got = await read_some(stream, 3)
        next(double for double in at.decode if double.held).mute = True
        with anyio.fail_after(5.0):
            assert got + await read(stream) == expected(LONG, 100)
        for double in at.decode:
            double.mute = False
        await at.nothing_held()


# -- the bus goes away


async def test_a_bus_restart_leaves_no_gap_and_loses_nobody() -> None:
    async with site(prefill=1, decode=2, no_workers_grace_s=0.2) as at:
        async with anyio.create_task_group() as group:
            group.start_soon(many, at, 12)
            await at.until(lambda: any(len(double.held) > 3 for double in at.decode))
            at.broker.stop()
            await anyio.sleep(1.0)  # longer than dead_after_s and the grace
            assert len(at.core.dispatcher.requests) > 0
            at.broker.start()
        await at.nothing_held()


async def test_requests_that_come_while_the_bus_is_away_wait_for_it() -> None:
    async with site() as at:
        at.broker.stop()
        stream = at.generate(LONG)
        await anyio.sleep(0.3)
        at.broker.start()
        assert await read(stream) == expected(LONG, 32)
        with pytest.raises(errors.DeadlineExceeded):
            at.broker.stop()
            await read(at.generate(LONG, deadline_s=0.2))
        at.broker.start()
        await at.nothing_held()


async def test_a_tenant_is_charged_once_for_what_a_lost_worker_costs() -> None:
    async with site(prefill=0, decode=2) as at:
        charges: list[float] = []
        waiting: Any = at.core.placement._waiting
        for name in ("charge", "correct"):
            original = getattr(waiting, name)

            def spy(tenant: str, tokens: float, weight: float, original: Any = original) -> None:
                charges.append(tokens)
                original(tenant, tokens, weight)

            setattr(waiting, name, spy)
        stream = at.generate(LONG, max_tokens=60)
        got = await read_some(stream, 20)
        await at.kill(next(worker for worker in at.decode if worker.held))
        assert got + await read(stream) == expected(LONG, 60)
        assert sum(charges) == len(LONG) + 60


async def test_who_must_run_alone_gets_a_worker_while_none_is_ever_idle() -> None:
    async with site(prefill=0, decode=2) as at:
        running = True

        async def client(number: int) -> None:
            while running:
                prompt = [number, *LONG]
                count = 100 + 17 * number  # they end one by one
                assert await read(at.generate(prompt, max_tokens=count)) == expected(prompt, count)

        async with anyio.create_task_group() as crowd:
            for number in range(8):
                crowd.start_soon(client, number)
            await at.until(lambda: all(worker.held for worker in at.decode))
            requests = at.core.dispatcher.requests
            for losses in (1, 2):  # who loses the first before a token runs on the second alone, and loses that, too
                worker = await at.add("decode", credits=1)
                worker.step_s = 1000.0  # no token comes from there
                await at.until(lambda worker=worker: worker.held)
                await at.kill(worker)
                await at.until(lambda losses=losses: any(request.losses.count == losses for request in requests.values()))
            assert any(request.must_be_alone for request in requests.values())
            await at.until(lambda: not any(request.must_be_alone for request in requests.values()), 20.0)
            running = False
        await at.nothing_held()


async def test_who_has_been_silent_for_a_while_gets_nothing_new_while_others_have_room() -> None:
    async with site(prefill=0, decode=2) as at:
        silent = at.decode[0]
        at.broker.drop(lambda message: silent.ref.id in message.subject)  # neither heartbeats nor questions go through
        await anyio.sleep(0.2)
        assert at.core.router.knows(silent.ref), "it is not known to be dead"
        streams = [at.generate([number, *SHORT]) for number in range(8)]
        assert [request.decode for request in at.core.dispatcher.requests.values()] == [at.decode[1].ref] * 8
        for number, stream in enumerate(streams):
            assert await read(stream) == expected([number, *SHORT], 32)
