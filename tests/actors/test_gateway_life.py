"""The gateway itself: when it is ready, how it drains, what it does after it was stopped, and what its metrics say."""

from __future__ import annotations

import anyio
import pytest

from common.engine.shares import MAX_PRIORITY
from common.protocol import errors
from services.gateway.actor import GatewayActor
from services.gateway.config import GatewayConfig
from tests.actors.gateway_site import LONG, MODEL, SHORT, expected, many, read, read_some, site

pytestmark = pytest.mark.virtual_time


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
        assert at.gateway.cores[0].obstacle.startswith("decode-")
        at.decode[0].mute = False
        await at.until(lambda: at.gateway.ready)
        assert not at.gateway.cores[0].obstacle


async def test_a_canary_has_the_first_turn_at_its_worker() -> None:
    """Behind a long prompt it would miss its deadline, and a worker that is busy would be quarantined."""
    async with site(canary=True) as at:
        await at.until(lambda: at.gateway.ready)
        by_prefill = at.prefill[0].tasks
        handed_off = {canary.request for canary in by_prefill}
        direct = [canary for canary in at.decode[0].tasks if canary.request not in handed_off]
        assert [canary.priority for canary in (*by_prefill, *direct)] == [-MAX_PRIORITY, -MAX_PRIORITY]


async def test_a_canary_for_a_worker_that_is_lost_ends_at_once() -> None:
    """At its deadline, much later, it would count against the worker's next life."""
    async with site(prefill=0, decode=2, canary=True, canary_interval_s=0.2) as at:
        members, canary = at.core.router.decode.members, at.core.canary
        await at.until(lambda: at.gateway.ready and len(members) == 2)
        key, lost = next((key, worker) for key, worker in members.items() if worker.ref == at.decode[0].ref)
        await at.kill(at.decode[0])
        await at.until(lambda: key not in members)
        # the canary is sent between the loss and the next heartbeat
        await at.until(lambda: members.setdefault(key, lost) and lost.ref in canary._singing)
        members.pop(key, None)
        await anyio.sleep(0.5)
        assert lost.ref not in canary._singing and not at.core.dispatcher.num_waiting and not canary.failure


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


async def test_a_gateway_that_was_stopped_goes_on_with_every_stream() -> None:
    async with site(decode=2) as at:
        streams = {number: at.generate([number, *LONG], max_tokens=300) for number in range(6)}
        begun = {number: await read_some(stream, 2) for number, stream in streams.items()}
        epoch = at.gateway.ref.epoch
        at.gateway._last_beat -= 10.0  # as after SIGSTOP
        await at.until(lambda: at.gateway.ref.epoch > epoch)
        for number, stream in streams.items():
            assert begun[number] + await read(stream) == expected([number, *LONG], 300)
        assert all(generation.gateway.epoch > epoch for double in at.decode for generation in double.tasks[-1:])
        await at.nothing_held()
        assert await read(at.generate(SHORT)) == expected(SHORT, 32)


async def test_metrics_tell_of_queue_retries_and_lost_frames() -> None:
    async with site(decode=2) as at:
        async with anyio.create_task_group() as group:
            group.start_soon(many, at, 8)
            await at.until(lambda: at.decode[0].held)
            await at.kill(at.decode[0])
        text = at.gateway.metrics.render().decode()
    assert f'vllm:num_requests_waiting{{model_name="{MODEL}"}} 0.0' in text
    assert f'vllm:request_queue_time_seconds_bucket{{le="+Inf",model_name="{MODEL}"}}' in text
    assert "penstock_request_retries_total" in text
    assert "penstock_frames_dropped_total" in text


def test_settings_have_sane_defaults() -> None:
    config = GatewayConfig()
    assert config.http_port == 8000
    assert config.max_deadline_s >= config.default_deadline_s
    assert GatewayActor.role == "gateway"
