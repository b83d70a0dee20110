"""What happens when one thing goes wrong, in virtual time: each test is a promise to a client or to an operator."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio
import pytest

from common.engine.plan import RunnerLost, StepPlan, StepResult
from common.worker.actor import EngineWorker
from tests.chaos.world import World
from tests.fixtures import virtual_time

Story = Callable[[World], Coroutine[Any, Any, None]]
ROLES = ("kvstore", "draft", "prefill", "decode", "gateway")


def play(shm_dir: Path, story: Story, *, num_blocks: int = 256, roles: tuple[str, ...] = ROLES) -> None:
    """Start a world of one worker of each role, let it settle, play the story, and check every promise at the end."""

    async def main() -> None:
        async with anyio.create_task_group() as task_group:
            world = World(task_group, shm_dir, num_blocks=num_blocks)
            for role in roles:
                await world.start(role)  # pyright: ignore[reportArgumentType]
            await anyio.sleep(3)
            await story(world)
            await world.all_ended()
            world.check_outcomes()
            await world.clean(within_s=7)
            await world.end()
            task_group.cancel_scope.cancel()

    virtual_time.run(main)
    assert not list(shm_dir.iterdir()), "a segment was left behind"


def prompt(length: int, start: int = 3) -> list[int]:
    return [3 + (start + 7 * i) % 900 for i in range(length)]


def test_every_length_of_prompt_goes_through_the_whole_pipeline(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        for length in (1, 2, 4, 5, 15, 16, 17, 40, 100):
            world.submit(prompt(length, length), max_tokens=20)
            await world.all_ended()
        assert all(outcome.finish == "length" for outcome in world.outcomes)

    play(tmp_path, story)


def test_a_ragged_batch_gets_the_same_tokens_as_each_alone(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        for index in range(20):
            world.submit(prompt(3 + 5 * (index % 4), index), max_tokens=1 + 3 * index)
            await anyio.sleep(0.05)
        await world.all_ended()
        assert all(outcome.finish == "length" for outcome in world.outcomes)

    play(tmp_path, story)


@pytest.mark.parametrize("role", ["prefill", "decode", "draft", "kvstore"])
@pytest.mark.parametrize("after_s", [0.05, 0.3, 0.6, 1.2])
def test_a_killed_worker_does_not_change_the_stream(tmp_path: Path, role: str, after_s: float) -> None:
    async def story(world: World) -> None:
        await world.start(role)  # pyright: ignore[reportArgumentType]
        await anyio.sleep(3)
        for index in range(6):
            world.submit(prompt(30, index), max_tokens=60)
        await anyio.sleep(after_s)
        await world.kill(world.alive(role)[0])
        await world.all_ended(within_s=20)
        assert all(outcome.finish == "length" for outcome in world.outcomes)

    play(tmp_path, story)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_whose_device_is_lost_ends_and_its_streams_go_on(tmp_path: Path, role: str) -> None:
    async def story(world: World) -> None:
        await world.start(role)  # pyright: ignore[reportArgumentType]
        await anyio.sleep(3)
        for index in range(6):
            world.submit(prompt(30, index), max_tokens=60)
        await anyio.sleep(0.3)
        lost = world.alive(role)[0]
        actor = world.processes[lost].actor
        assert isinstance(actor, EngineWorker)

        def fail(plan: StepPlan) -> StepResult:
            raise RunnerLost("the device has gone")

        actor.engine.runner.execute = fail
        await world.all_ended(within_s=20)
        assert all(outcome.finish == "length" for outcome in world.outcomes)
        for index in range(4):  # new prompts, which every worker of the role gets some of
            world.submit(prompt(30, 100 + index), max_tokens=5)
        await world.all_ended(within_s=20)
        assert lost not in world.alive(role)

    play(tmp_path, story)


@pytest.mark.parametrize("role", ["prefill", "decode", "draft", "kvstore"])
def test_a_drained_worker_finishes_what_it_holds(tmp_path: Path, role: str) -> None:
    async def story(world: World) -> None:
        await world.start(role)  # pyright: ignore[reportArgumentType]
        await anyio.sleep(3)
        for index in range(6):
            world.submit(prompt(30, index), max_tokens=60)
        await anyio.sleep(0.5)
        await world.terminate(world.alive(role)[0])
        await world.all_ended(within_s=20)
        assert all(outcome.finish == "length" for outcome in world.outcomes)

    play(tmp_path, story)


@pytest.mark.parametrize("away_s", [0.05, 1.0, 8.0])
def test_a_restart_of_the_bus_neither_loses_nor_repeats_a_token(tmp_path: Path, away_s: float) -> None:
    async def story(world: World) -> None:
        for index in range(6):
            world.submit(prompt(30, index), max_tokens=60)
        for _ in range(3):
            await anyio.sleep(0.4)
            world.broker.stop()
            await anyio.sleep(away_s)
            world.broker.start()
        await world.all_ended(within_s=30)
        assert all(outcome.finish == "length" for outcome in world.outcomes)

    play(tmp_path, story)


def test_a_killed_gateway_leaves_nothing_behind_after_a_lease(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        for index in range(6):
            world.submit(prompt(30, index), max_tokens=2000, deadline_s=300)
        await anyio.sleep(0.5)
        await world.kill(world.alive("gateway")[0])
        await world.clean(within_s=6)
        for outcome in world.outcomes:
            outcome.ended = True

    play(tmp_path, story)


def test_a_gateway_that_hung_for_less_than_a_lease_goes_on(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        for index in range(6):
            world.submit(prompt(30, index), max_tokens=60)
        await anyio.sleep(0.5)
        epoch = world.gateway.ref.epoch
        world.gateway._last_beat -= 3
        await world.all_ended(within_s=20)
        assert all(outcome.finish == "length" for outcome in world.outcomes)
        assert world.gateway.ref.epoch == epoch

    play(tmp_path, story)


def test_a_gateway_that_was_stopped_for_longer_than_a_lease_goes_on_with_every_stream(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        for index in range(6):
            world.submit(prompt(30, index), max_tokens=60)
        await anyio.sleep(0.5)
        epoch = world.gateway.ref.epoch
        assert not all(outcome.ended for outcome in world.outcomes)
        world.gateway._last_beat -= 6
        await world.all_ended(within_s=10)
        assert world.gateway.ref.epoch > epoch
        assert [outcome.finish for outcome in world.outcomes] == ["length"] * 6
        world.check_outcomes()
        world.submit(prompt(30), max_tokens=10)
        await world.all_ended(within_s=5)
        assert world.outcomes[-1].finish == "length"

    play(tmp_path, story)


def test_cancels_and_deadlines_give_everything_back_within_a_second(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        for index in range(24):
            world.submit(prompt(20 + 5 * (index % 5), index), max_tokens=150, cancel_after_s=0.03 * index)
        await anyio.sleep(0.9)
        await world.clean(within_s=1)
        for index in range(12):
            world.submit(prompt(30, index), max_tokens=150, deadline_s=0.05 + 0.07 * index)
        await anyio.sleep(1)
        await world.clean(within_s=1)

    play(tmp_path, story)


def test_a_pool_too_small_for_all_still_serves_all(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        for index in range(12):
            world.submit(prompt(24, index), max_tokens=50)
        await world.all_ended(within_s=120)
        assert all(outcome.finish == "length" for outcome in world.outcomes)

    play(tmp_path, story, num_blocks=24)


@pytest.mark.parametrize("large", [False, True], ids=["all too small", "one of two too small"])
def test_a_hand_off_that_a_decode_worker_can_never_hold_is_not_tried_again_and_again(tmp_path: Path, large: bool) -> None:
    """It ends where the context of decode workers does, or goes to one that has room; each token had an attempt of its own."""

    async def story(world: World) -> None:
        world.num_blocks = 24
        await world.start("decode")
        if large:
            world.num_blocks = 256
            await world.start("decode")
        await anyio.sleep(3)
        outcomes = [world.submit(prompt(120, index), max_tokens=20) for index in range(4)]
        await world.all_ended(within_s=10)
        assert [(outcome.error, outcome.finish) for outcome in outcomes] == [(None, "length")] * 4
        assert [len(outcome.tokens) for outcome in outcomes] == [20 if large else 1] * 4
        assert world.gateway.cores[0].dispatcher.stats.retries == 0

    play(tmp_path, story, roles=("prefill", "gateway"))
