"""With `zero_retention` no KV is found by a later request or left in shared memory, and tokens stay right whatever dies."""

from __future__ import annotations

from pathlib import Path

import anyio
import numpy as np

from common.worker.actor import EngineWorker
from services.decode.actor import DecodeActor
from services.decode.lookup import Lookup
from tests.chaos.test_one_world import prompt
from tests.chaos.world import World
from tests.fixtures import virtual_time


def left_over(world: World) -> int:
    """Bytes of KV that are not zero, in all pools."""
    actors = [process.actor for process in world.processes.values() if isinstance(process.actor, EngineWorker)]
    return sum(int(np.count_nonzero(actor.engine.segment.blocks)) for actor in actors)


def remembered(world: World) -> int:
    """Tokens of ended answers that decode workers can look up."""
    actors = [process.actor for process in world.processes.values() if isinstance(process.actor, DecodeActor)]
    lookups = [drafter for actor in actors for drafter in actor.proposers.drafters if isinstance(drafter, Lookup)]
    assert len(lookups) == len(actors) > 0
    return sum(len(lookup.recent) for lookup in lookups if lookup.recent is not None)


async def everyone(world: World) -> None:
    for role in ("kvstore", "prefill", "prefill", "decode", "decode", "gateway"):
        await world.start(role)
    await anyio.sleep(3)


def test_nothing_of_a_request_is_found_again_or_left(tmp_path: Path) -> None:
    found: dict[bool, tuple[int, int, int]] = {}

    async def main(*, zero_retention: bool) -> None:
        async with anyio.create_task_group() as task_group:
            world = World(task_group, tmp_path, zero_retention=zero_retention)
            await everyone(world)
            cached = 0
            for _ in range(6):
                outcome = world.submit(prompt(60), max_tokens=12)
                await world.all_ended()
                await anyio.sleep(1)
                cached += outcome.cached_tokens
            await world.clean(within_s=7)
            world.check_outcomes()
            found[zero_retention] = cached, left_over(world), remembered(world)
            await world.end()
            task_group.cancel_scope.cancel()

    virtual_time.run(lambda: main(zero_retention=False))
    virtual_time.run(lambda: main(zero_retention=True))
    assert found[True] == (0, 0, 0)
    assert all(count > 0 for count in found[False]), "the test would not notice"


def test_tokens_stay_right_while_workers_die_and_nothing_is_left(tmp_path: Path) -> None:
    async def main() -> None:
        async with anyio.create_task_group() as task_group:
            world = World(task_group, tmp_path, zero_retention=True, seed=7)
            await everyone(world)
            for index in range(40):
                length = 1 + 7 * (index % 12)
                cancel_after_s = 0.3 if index % 9 == 8 else None
                world.submit(prompt(length, index % 5), max_tokens=1 + 3 * (index % 10), cancel_after_s=cancel_after_s)
                await anyio.sleep(0.05)
                if index in (12, 25):
                    role = "decode" if index == 12 else "prefill"
                    await world.kill(world.alive(role)[0])
                    await world.start(role)
            await world.all_ended()
            world.check_outcomes()
            assert sum(outcome.finish == "length" for outcome in world.outcomes) >= 35
            await world.clean(within_s=7)
            assert left_over(world) == 0
            await world.end()
            task_group.cancel_scope.cancel()

    virtual_time.run(main)
