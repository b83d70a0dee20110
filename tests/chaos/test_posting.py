"""Decode workers whose steps take what draft workers posted when they begin, in virtual time: the stream stays the same when
workers of both kinds die."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from common.engine.engine import Engine
from services.decode.actor import DecodeActor
from tests.chaos.test_one_world import prompt
from tests.chaos.world import World
from tests.fixtures import virtual_time
from tests.unit.taking_posts import TakingRunner


class PostingWorld(World):
    """`runners`: of its decode workers, and others."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.runners: list[TakingRunner] = []
        super().__init__(*args, **kwargs)

    def _open_engine(self, segment_name: str, on_progress: Callable[[int, int], None]) -> Engine:
        engine = super()._open_engine(segment_name, on_progress)
        engine.runner.__class__ = TakingRunner
        assert isinstance(engine.runner, TakingRunner)
        engine.board = engine.runner.board
        self.runners.append(engine.runner)
        return engine


@pytest.mark.parametrize("killed", ["draft", "decode"])
@pytest.mark.parametrize(("after_s", "at_hand"), [(0.05, False), (0.6, False), (0.6, True)])
def test_a_killed_worker_does_not_change_the_stream(tmp_path: Path, killed: str, after_s: float, at_hand: bool) -> None:
    async def main() -> None:
        async with anyio.create_task_group() as task_group:
            world = PostingWorld(task_group, tmp_path, run_ahead=2)
            for role in ("kvstore", "draft", "draft", "prefill", "decode", "decode", "gateway"):
                await world.start(role)
            await anyio.sleep(3)
            found: list[bool] = []
            for name in world.alive("decode") if at_hand else ():  # as beside a GPU, on a machine with enough cores
                actor = world.processes[name].actor
                assert isinstance(actor, DecodeActor)
                actor.loop.at_hand = lambda plan, asked=actor.is_at_hand: found.append(asked(plan)) or found[-1]
            for index in range(8):
                world.submit(prompt(30, index), max_tokens=80)
            await anyio.sleep(after_s)
            await world.kill(world.alive(killed)[0])
            await world.all_ended(within_s=20)
            world.check_outcomes()
            assert all(outcome.finish == "length" for outcome in world.outcomes)
            world.submit(prompt(30, 9), max_tokens=150)
            await world.all_ended()
            world.check_outcomes()
            actors = [world.processes[name].actor for name in world.alive("decode")]
            books = [actor.proposers for actor in actors if isinstance(actor, DecodeActor)]
            assert sum(runner.num_posted for runner in world.runners) > 100
            assert any(found) == at_hand
            for one in books:
                assert one.posting is not None
                assert not one.posting._posted, "every slot was given back"
            await world.clean(within_s=7)
            await world.end()
            task_group.cancel_scope.cancel()

    virtual_time.run(main)
