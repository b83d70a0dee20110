"""Decode workers whose engines look up what they verify, among all others, in virtual time: the stream stays the same when
workers die, sequences move, and draft workers propose as well."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from common.engine.engine import Engine
from services.decode.actor import DecodeActor
from services.decode.speculation_counters import SpeculationCounters
from tests.chaos.test_one_world import prompt
from tests.chaos.world import World
from tests.fixtures import virtual_time
from tests.unit.looking_up import LookingUpRunner


class LookingUpWorld(World):
    def _open_engine(self, segment_name: str, on_progress: Callable[[int, int], None]) -> Engine:
        engine = super()._open_engine(segment_name, on_progress)
        engine.runner.__class__ = LookingUpRunner
        engine.looks_up = True
        return engine

    def looked_up(self) -> list[SpeculationCounters]:
        actors = [self.processes[name].actor for name in self.alive("decode")]
        return [actor.proposers.by_source["lookup"] for actor in actors if isinstance(actor, DecodeActor)]


@pytest.mark.parametrize("run_ahead", [1, 2])
@pytest.mark.parametrize("after_s", [0.05, 0.6])
def test_a_killed_worker_does_not_change_the_stream(tmp_path: Path, run_ahead: int, after_s: float) -> None:
    async def main() -> None:
        async with anyio.create_task_group() as task_group:
            world = LookingUpWorld(task_group, tmp_path, run_ahead=run_ahead)
            for role in ("kvstore", "draft", "prefill", "decode", "decode", "gateway"):
                await world.start(role)
            await anyio.sleep(3)
            for index in range(8):
                world.submit(prompt(30, index), max_tokens=80)
            await anyio.sleep(after_s)
            await world.kill(world.alive("decode")[0])
            await world.all_ended(within_s=20)
            world.check_outcomes()
            assert all(outcome.finish == "length" for outcome in world.outcomes)
            world.submit(prompt(30, 9), max_tokens=150)
            await world.all_ended()
            world.check_outcomes()
            (counters,) = world.looked_up()
            assert counters.num_draft_tokens > 0
            await world.clean(within_s=7)
            await world.end()
            task_group.cancel_scope.cancel()

    virtual_time.run(main)


def test_a_worker_that_is_short_of_blocks_gives_the_same_text(tmp_path: Path) -> None:
    async def main() -> None:
        async with anyio.create_task_group() as task_group:
            world = LookingUpWorld(task_group, tmp_path, run_ahead=2, num_blocks=40)
            for role in ("decode", "gateway"):
                await world.start(role)
            await anyio.sleep(3)
            for index in range(6):
                world.submit(prompt(5, index), max_tokens=60)
            await world.all_ended(within_s=60)
            world.check_outcomes()
            assert all(outcome.finish == "length" for outcome in world.outcomes)
            actor = world.processes[world.alive("decode")[0]].actor
            assert isinstance(actor, DecodeActor)
            assert actor.scheduler.num_preemptions > 0
            await world.end()
            task_group.cancel_scope.cancel()

    virtual_time.run(main)
