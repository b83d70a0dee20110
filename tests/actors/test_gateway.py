"""The gateway keeps every stream going, ends every request typed, and leaves nothing behind, whatever its workers do."""

from __future__ import annotations

import anyio
import pytest

from common.protocol import errors
from common.protocol.messages import TokenFrame, TokenFrames
from services.gateway.actor import GatewayActor
from services.gateway.config import GatewayConfig
from tests.actors.gateway_site import Double, Site, expected, read, read_some, site

LONG = list(range(1, 40))
SHORT = [7, 8, 9]


async def many(at: Site, count: int, *, max_tokens: int = 64) -> None:
    """Run `count` requests of both kinds at once; each must give exactly its tokens."""

    async def one(number: int) -> None:
        prompt = [number, *(LONG if number % 2 else SHORT)]
        assert await read(at.generate(prompt, max_tokens=max_tokens)) == expected(prompt, max_tokens)

    async with anyio.create_task_group() as group:
        for number in range(count):
            group.start_soon(one, number)


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
        assert at.gateway.dispatcher.stats.resumes > 0
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


# -- workers say no


async def test_a_request_rejected_everywhere_waits_until_credits_return() -> None:
    async with site(prefill=1, decode=2) as at:
        for double in at.workers:
            double.refuse = "out_of_credits"
        stream = at.generate(LONG)
        await at.until(lambda: len(at.prefill[0].tasks) >= 2)
        await at.until(lambda: at.gateway.dispatcher.num_waiting == 1)
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
        await at.until(lambda: not at.gateway.router.hopeful)
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
        assert at.gateway.dispatcher.stats.retries == 0  # the KV was used where it was
        await at.nothing_held()


async def test_a_planned_decode_worker_that_dies_is_replaced_without_computing_the_prompt_again() -> None:
    async with site(decode=2) as at:
        at.prefill[0].prefill_s = 0.2
        stream = at.generate(LONG)
        await at.until(lambda: at.prefill[0].held)
        (request,) = at.gateway.dispatcher.requests.values()
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


# -- frames get lost


async def test_lost_frames_are_fetched_and_the_stream_has_no_gap() -> None:
    async with site() as at:
        for double in at.workers:
            count = iter(range(10**6))
            double.lose = lambda frame, count=count: next(count) % 7 == 3
        await many(at, 10, max_tokens=40)
        assert at.gateway.dispatcher.stats.fetches > 0
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


# -- clients leave


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
        assert at.gateway.dispatcher.num_waiting == 0


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
        await at.until(lambda: not at.gateway.dispatcher.requests)
        await at.nothing_held()
        with pytest.raises(errors.Cancelled):
            await read(stream)


# -- the bus goes away


async def test_a_bus_restart_leaves_no_gap_and_loses_nobody() -> None:
    async with site(prefill=1, decode=2, no_workers_grace_s=0.2) as at:
        async with anyio.create_task_group() as group:
            group.start_soon(
                many,
                at,
                12,
            )
            await at.until(lambda: any(len(double.held) > 3 for double in at.decode))
            at.broker.stop()
            await anyio.sleep(1.0)  # longer than dead_after_s and the grace
            assert len(at.gateway.dispatcher.requests) > 0
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


# -- the gateway itself


async def test_ready_means_that_a_request_went_through_every_path() -> None:
    async with site(canary=True) as at:
        await at.until(lambda: at.gateway.ready)
        assert len(at.prefill[0].tasks) == 1
        assert len(at.decode[0].tasks) == 2
        await at.nothing_held()


async def test_not_ready_while_requests_fail() -> None:
    async with site(prefill=0, canary=True, canary_timeout_s=0.3) as at:
        at.decode[0].mute = True
        await anyio.sleep(0.6)
        assert not at.gateway.ready


async def test_not_ready_without_decode_workers_or_bus_and_ready_again_with_them() -> None:
    async with site(prefill=0, canary=True) as at:
        await at.until(lambda: at.gateway.ready)
        at.broker.stop()
        assert not at.gateway.ready
        at.broker.start()
        await at.until(lambda: at.gateway.ready)
        await at.kill(at.decode[0])
        await at.until(lambda: not at.gateway.ready)
        await at.add("decode")
        await at.until(lambda: at.gateway.ready)


async def test_a_drain_refuses_the_new_and_lets_streams_finish() -> None:
    async with site() as at:
        stream = at.generate(LONG, max_tokens=60)
        await read_some(stream, 1)
        at.gateway.begin_drain()
        with pytest.raises(errors.ShuttingDown):
            at.generate(SHORT)
        assert (await read(stream))[-1] == expected(LONG, 60)[-1]
        await at.until(lambda: not at.gateway.running)
        await at.nothing_held()


async def test_a_drain_that_takes_too_long_ends_streams_typed_and_frees_workers() -> None:
    async with site(drain_timeout_s=2.2) as at:
        stream = at.generate(LONG, max_tokens=100_000)
        await read_some(stream, 1)
        at.gateway.begin_drain()
        with pytest.raises(errors.ShuttingDown):
            await read(stream)
        await at.nothing_held()


async def test_a_gateway_that_was_stopped_fails_its_requests_typed() -> None:
    async with site() as at:
        stream = at.generate(LONG, max_tokens=100_000)
        await read_some(stream, 1)
        epoch = at.gateway.ref.epoch
        at.gateway._last_beat -= 10.0  # as after SIGSTOP
        with pytest.raises(errors.InternalError):
            await read(stream)
        await at.until(lambda: at.gateway.ref.epoch > epoch)
        await at.nothing_held()
        assert await read(at.generate(SHORT)) == expected(SHORT, 32)


async def test_metrics_tell_of_queue_retries_and_lost_frames() -> None:
    async with site(decode=2) as at:
        async with anyio.create_task_group() as group:
            group.start_soon(many, at, 8)
            await at.until(lambda: at.decode[0].held)
            await at.kill(at.decode[0])
        text = at.gateway.metrics.render().decode()
    assert "vllm:num_requests_waiting 0.0" in text
    assert 'vllm:request_queue_time_seconds_bucket{le="+Inf"}' in text
    assert "penstock_request_retries_total" in text
    assert "penstock_frames_dropped_total" in text


def test_settings_have_sane_defaults() -> None:
    config = GatewayConfig()
    assert config.http_port == 8000
    assert config.max_deadline_s >= config.default_deadline_s
    assert GatewayActor.role == "gateway"
