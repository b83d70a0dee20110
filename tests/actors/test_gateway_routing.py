"""The gateway gives each request to a worker with room, through prefill or straight to decode, and leaves nothing behind."""

from __future__ import annotations

import anyio
import pytest

from common.protocol import errors
from common.protocol.capacity import Capacity
from tests.actors.gateway_site import LONG, SHORT, expected, many, read, read_some, site

pytestmark = pytest.mark.virtual_time

# -- the way it should go


async def test_long_prompts_go_through_prefill_and_short_ones_straight_to_decode() -> None:
    async with site() as at:
        assert await read(at.generate(LONG)) == expected(LONG, 32)
        assert await read(at.generate(SHORT)) == expected(SHORT, 32)
        assert len(at.prefill[0].tasks) == 1
        assert len(at.decode[0].tasks) == 2
        await at.nothing_held()


async def test_without_prefill_workers_everything_is_served() -> None:
    async with site(prefill=0) as at:
        assert await read(at.generate(LONG)) == expected(LONG, 32)
        await at.nothing_held()


async def test_many_streams_at_once_are_kept_apart_and_spread() -> None:
    async with site(prefill=2, decode=2) as at:
        await many(at, 40)
        tasks = [len(double.tasks) for double in at.decode]
        assert min(tasks) >= 12
        await at.nothing_held()


async def test_a_request_that_ends_with_its_first_token_never_reaches_decode() -> None:
    async with site() as at:
        assert await read(at.generate(LONG, max_tokens=1)) == expected(LONG, 1)
        await at.nothing_held()
        assert not at.decode[0].tasks


async def test_holders_are_renewed_while_they_hold_and_no_longer() -> None:
    async with site(lease_s=0.4) as at:
        at.decode[0].step_s = 0.02
        stream = at.generate(LONG, max_tokens=60)
        await read(stream)
        await at.nothing_held()
        assert at.decode[0].renewed
        at.decode[0].renewed.clear()
        await anyio.sleep(0.3)
        assert not at.decode[0].renewed


async def test_what_a_worker_says_between_two_heartbeats_of_the_gateway_counts_at_once() -> None:
    async with site(prefill=0, decode=1, heartbeat_s=0.3) as at:
        double = at.decode[0]
        await anyio.sleep(0.31)
        for backlog in (5000, 0, 700):
            double.said = {"capacity": Capacity(100, backlog, 0.0, 8)}
            double.announce()
            await anyio.sleep(0.01)
            assert at.core.router.decode.members[double.ref.id].backlog == backlog
        assert await read(at.generate(LONG)) == expected(LONG, 32)
        await at.nothing_held()


# -- workers say no


async def test_a_request_rejected_everywhere_waits_until_credits_return() -> None:
    async with site(prefill=1, decode=2) as at:
        for double in at.workers:
            double.refuse = "out_of_credits"
        stream = at.generate(LONG)
        await at.until(lambda: len(at.prefill[0].tasks) >= 2)
        await at.until(lambda: at.core.dispatcher.num_waiting == 1)
        for double in at.workers:
            double.refuse = ""
        assert await read(stream) == expected(LONG, 32)
        await at.nothing_held()


async def test_more_requests_than_credits_are_served_in_order() -> None:
    async with site(prefill=0) as at:
        at.decode[0].credits = 2
        await anyio.sleep(0.1)
        await many(at, 12, max_tokens=8)
        first_tokens = [generation.tokens[:1] for generation in at.decode[0].tasks if generation.attempt == 1]
        assert first_tokens == sorted(first_tokens)
        await at.nothing_held()


async def test_a_full_queue_refuses_at_once_and_frees_its_place_again() -> None:
    async with site(prefill=0, max_queue=2) as at:
        at.decode[0].credits = 0
        await anyio.sleep(0.15)
        waiting = [at.generate(SHORT) for _ in range(2)]
        with pytest.raises(errors.Overloaded):
            at.generate(SHORT)
        waiting[0].cancel()
        waiting.append(at.generate(SHORT))
        at.decode[0].credits = 64
        for stream in waiting[1:]:
            assert await read(stream) == expected(SHORT, 32)
        await at.nothing_held()


async def test_the_same_id_twice_is_refused_until_the_first_has_ended() -> None:
    async with site(prefill=0) as at:
        first = at.generate(SHORT, id="mine")
        with pytest.raises(errors.DuplicateRequest):
            at.generate(SHORT, id="mine")
        assert await read(first) == expected(SHORT, 32)
        assert await read(at.generate(LONG, id="mine")) == expected(LONG, 32)


async def test_a_worker_that_does_not_answer_is_avoided_and_freed() -> None:
    async with site(prefill=0, decode=2) as at:
        at.decode[0].mute = True
        streams = [at.generate([number, *SHORT]) for number in range(4)]
        for number, stream in enumerate(streams):
            assert await read(stream) == expected([number, *SHORT], 32)
        await at.nothing_held()


async def test_no_decode_worker_for_longer_than_the_grace_is_a_typed_error() -> None:
    async with site(prefill=0, no_workers_grace_s=0.3) as at:
        await at.kill(at.decode[0])
        await at.until(lambda: not at.core.router.hopeful)
        with pytest.raises(errors.NoWorkers):
            await read(at.generate(SHORT))
        await at.nothing_held()


async def test_a_worker_that_always_fails_ends_in_a_typed_error_not_a_loop() -> None:
    async with site(prefill=0) as at:
        at.decode[0].refuse = "internal_error"
        with anyio.fail_after(5.0), pytest.raises(errors.InternalError):
            await read(at.generate(SHORT))
        assert len(at.decode[0].tasks) == 4
        await at.nothing_held()


# -- handoff


async def test_a_refused_handoff_goes_to_another_decode_worker() -> None:
    async with site(decode=2) as at:
        at.decode[0].refuse = "out_of_blocks"
        for number in range(6):
            prompt = [number, *LONG]
            assert await read(at.generate(prompt)) == expected(prompt, 32)
        assert any(not double.refuse and double.tasks for double in at.decode)
        assert at.core.dispatcher.stats.retries == 0  # the KV was used where it was
        await at.nothing_held()


async def test_a_planned_decode_worker_that_dies_is_replaced_without_computing_the_prompt_again() -> None:
    async with site(decode=2) as at:
        at.prefill[0].prefill_s = 0.2
        stream = at.generate(LONG)
        await at.until(lambda: at.prefill[0].held)
        (request,) = at.core.dispatcher.requests.values()
        planned = request.decode
        await at.kill(next(double for double in at.decode if double.ref == planned))
        assert await read(stream) == expected(LONG, 32)
        assert len(at.prefill[0].tasks) == 1
        await at.nothing_held()


async def test_a_handoff_nobody_can_take_now_waits_for_credits() -> None:
    async with site() as at:
        at.decode[0].refuse = "out_of_credits"
        stream = at.generate(LONG)
        assert await read_some(stream, 1) == expected(LONG, 1)
        await at.until(lambda: len(at.decode[0].tasks) >= 2)
        at.decode[0].refuse = ""
        assert await read(stream) == expected(LONG, 32)[1:]
        assert len(at.prefill[0].tasks) == 1
        await at.nothing_held()
