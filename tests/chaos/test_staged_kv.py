"""KV that passes through a stage to kvstores and back, as that of GPUs does: no wrong token, and every block comes back."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio
import pytest

from common.cache.retention import Retention
from common.worker.actor import EngineWorker
from tests.chaos.world import World
from tests.fixtures import virtual_time

Story = Callable[[World], Coroutine[Any, Any, None]]
WINDOWS: list[tuple[tuple[Retention, int], ...]] = [(), ((Retention(chunk=12), 24), (Retention(window=6), 64))]


def play(shm_dir: Path, story: Story, windows: tuple[tuple[Retention, int], ...] = ()) -> None:
    """Start a world of one worker of each role, let it settle, play the story, and check every promise at the end."""

    async def main() -> None:
        async with anyio.create_task_group() as task_group:
            world = World(task_group, shm_dir, windows=windows, staged=True)
            for role in ("kvstore", "prefill", "decode", "gateway"):
                await world.start(role)
            await anyio.sleep(3)
            await story(world)
            await world.all_ended()
            world.check_outcomes()
            await world.clean(within_s=7)
            for process in world.processes.values():
                stage = process.actor.engine.stage if isinstance(process.actor, EngineWorker) else None
                assert stage is None or stage.num_free_slots == stage.num_slots
            await world.end()
            task_group.cancel_scope.cancel()

    virtual_time.run(main)
    assert not list(shm_dir.iterdir()), "a segment was left behind"


def prompt(length: int, start: int = 3) -> list[int]:
    return [3 + (start + 7 * i) % 900 for i in range(length)]


def copied(world: World, operation: str) -> int:
    """Bytes between devices and stages, of all workers."""
    workers = [process.actor for process in world.processes.values() if isinstance(process.actor, EngineWorker)]
    paths = [path for worker in workers for path in worker.kv.transfers.totals()]
    return sum(path.bytes for path in paths if (path.path, path.operation) == ("device", operation))


@pytest.mark.parametrize("windows", WINDOWS)
def test_a_new_worker_finds_prefixes_of_one_that_was_killed(tmp_path: Path, windows: tuple[tuple[Retention, int], ...]) -> None:
    async def story(world: World) -> None:
        for length in (70, 33, 150):
            world.submit(prompt(length, length), max_tokens=20)
        await world.all_ended()
        await anyio.sleep(1)
        assert copied(world, "read") and not copied(world, "write")
        for role in ("prefill", "decode"):
            await world.kill(world.alive(role)[0])
            await world.start(role)  # pyright: ignore[reportArgumentType]
        await anyio.sleep(3)
        again = [world.submit(prompt(length, length), max_tokens=20) for length in (70, 33, 150)]
        await world.all_ended()
        assert [outcome.cached_tokens for outcome in again] == [68, 32, 148]
        assert copied(world, "write")

    play(tmp_path, story, windows)


@pytest.mark.parametrize("role", ["prefill", "decode", "kvstore"])
@pytest.mark.parametrize("after_s", [0.004, 0.05, 0.3])
def test_a_killed_process_changes_no_token(tmp_path: Path, role: str, after_s: float) -> None:
    """Also amid copies: those that have begun end before the worker's memory goes."""

    async def story(world: World) -> None:
        for index in range(3):
            world.submit(prompt(90, index), max_tokens=10)
        await world.all_ended()
        for worker in ("prefill", "decode"):
            await world.start(worker)  # pyright: ignore[reportArgumentType]
        await world.start("kvstore")
        await anyio.sleep(3)
        for index in range(6):
            world.submit(prompt(90 + index, index % 3), max_tokens=30)
        await anyio.sleep(after_s)
        await world.kill(world.alive(role)[0])
        await world.all_ended(within_s=20)
        assert all(outcome.finish == "length" for outcome in world.outcomes)

    play(tmp_path, story)


def test_a_stage_that_fails_is_a_miss(tmp_path: Path) -> None:
    """The GPU refuses to copy: prompts are computed."""

    async def story(world: World) -> None:
        world.submit(prompt(90), max_tokens=10)
        await world.all_ended()
        for role in ("prefill", "decode"):
            await world.kill(world.alive(role)[0])
            await world.start(role)  # pyright: ignore[reportArgumentType]
        await anyio.sleep(3)
        for process in world.processes.values():
            if isinstance(process.actor, EngineWorker):
                assert process.actor.engine.stage is not None
                process.actor.engine.stage.close()
        outcome = world.submit(prompt(90), max_tokens=10)
        await world.all_ended()
        assert outcome.finish == "length" and not outcome.cached_tokens

    play(tmp_path, story)
