"""A world of real workers and gateways, what workers hold, and what gateways know of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import numpy as np

from common.cache.contents import HASH_TYPE
from common.protocol.handles import WorkerRef
from common.runtime.bus import BusMessage
from common.worker.actor import EngineWorker
from services.gateway.actor import GatewayActor
from services.gateway.kv_index import KvIndex
from tests.chaos.test_one_world import Story, play, prompt
from tests.chaos.world import World

POOLS = ("prefill", "prefill", "decode", "gateway")
SOON_S = 3.0
LENGTH = 64


def tells(story: Story, tmp_path: Path, **more: Any) -> None:
    play(tmp_path, story, roles=POOLS, **more)


def worker(world: World, name: str) -> EngineWorker:
    actor = world.processes[name].actor
    assert isinstance(actor, EngineWorker)
    return actor


def workers(world: World) -> list[EngineWorker]:
    return [worker(world, name) for role in ("prefill", "decode") for name in world.alive(role)]


def gateways(world: World) -> list[GatewayActor]:
    actors = [world.processes[name].actor for name in world.alive("gateway")]
    return [actor for actor in actors if isinstance(actor, GatewayActor)]


def index(world: World) -> KvIndex:
    return gateways(world)[0].cores[0].router.prefixes.index


def known(gateway: GatewayActor) -> dict[WorkerRef, list[set[int]]]:
    """What a gateway knows of each worker, by cache group."""
    found = gateway.cores[0].router.prefixes.index
    return {ref: [set(group) for group in one.blocks.groups] for ref, one in found._workers.items() if one.blocks is not None}


def held(world: World) -> dict[WorkerRef, list[set[int]]]:
    """What workers hold."""
    return {
        actor.ref: [
            set(np.frombuffer(group.pool.contents.all(), HASH_TYPE).tolist())
            for group in actor.pool.groups
            if group.pool.contents is not None
        ]
        for actor in workers(world)
    }


async def ask(world: World, *starts: int, length: int = LENGTH) -> list[int]:
    """Ask for some prompts, one after the other; return how many tokens of each were cached."""
    cached: list[int] = []
    for start in starts:
        outcome = world.submit(prompt(length, start), max_tokens=4)
        await world.all_ended()
        assert outcome.error is None
        cached.append(outcome.cached_tokens)
    return cached


async def agree(world: World, within_s: float = SOON_S) -> None:
    """Every gateway comes to know exactly what workers hold."""
    with anyio.fail_after(within_s):
        while any(known(gateway) != held(world) for gateway in gateways(world)):
            await anyio.sleep(0.05)


def is_told(message: BusMessage) -> bool:
    return ".int.kv." in message.subject
