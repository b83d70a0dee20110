"""A gateway's objective for first tokens reaches the steps of decode workers, in virtual time."""

from __future__ import annotations

import math
from pathlib import Path

import anyio
import pytest

from services.decode.actor import DecodeActor
from tests.chaos.test_one_world import prompt
from tests.chaos.world import World
from tests.fixtures import virtual_time


@pytest.mark.parametrize("objective_ms", [0.0, 800.0])
def test_steps_know_how_fast_prompts_are_needed(tmp_path: Path, objective_ms: float) -> None:
    needed: list[float] = []

    async def main() -> None:
        async with anyio.create_task_group() as task_group:
            world = World(task_group, tmp_path, objective_ms=objective_ms)
            for role in ("decode", "gateway"):
                await world.start(role)
            await anyio.sleep(3)
            actor = world.processes[world.alive("decode")[0]].actor
            assert isinstance(actor, DecodeActor)
            limit = actor.scheduler.prompt_limit

            def recorded(rows: int, budget: int, needed_per_s: float) -> int:
                needed.append(needed_per_s)
                return limit(rows, budget, needed_per_s)

            actor.scheduler.prompt_limit = recorded
            world.submit(prompt(60, 1), max_tokens=4)
            await world.all_ended()
            world.check_outcomes()
            await world.end()
            task_group.cancel_scope.cancel()

    virtual_time.run(main)
    assert len(needed) > 1, "the prompt has several parts"
    if objective_ms:
        assert needed[0] == pytest.approx(60 / 0.8, rel=0.2)
    else:
        assert set(needed) == {math.inf}
