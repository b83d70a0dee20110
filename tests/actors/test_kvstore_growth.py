"""A store with much memory takes some before it is needed, never past its capacity, and goes on where there is none."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from common.protocol.errors import ConfigError
from common.transfer.segment import Segment
from services.kvstore import growth
from services.kvstore.arena import Arena
from services.kvstore.arenas import Arenas
from services.kvstore.growth import Growth

BLOCK = 4 * os.sysconf("SC_PAGESIZE")
CAPACITY = 16 * BLOCK
CHAIN = [b"%02d" % i for i in range(32)]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.fixture(autouse=True)
def small_amounts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "MIN_CAPACITY_BYTES", CAPACITY)
    monkeypatch.setattr(growth, "AHEAD_BYTES", 6 * BLOCK)
    monkeypatch.setattr(growth, "STEP_BYTES", 4 * BLOCK)


@asynccontextmanager
async def growing(folder: Path, capacity: int = CAPACITY) -> AsyncIterator[tuple[Arenas, Growth]]:
    arenas = Arenas(str(folder), "s", capacity_bytes=capacity, max_arenas=4, clock=lambda: 100.0, on_evicted=lambda _: None)
    made = Growth(arenas)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(made.run)
        yield arenas, made
        tasks.cancel_scope.cancel()
    for arena in arenas.values():
        arena.index.check()
        assert not arena.index.num_growing
    arenas.close()


def put(arenas: Arenas, made: Growth, model: str, chain: list[bytes]) -> Arena:
    arena = arenas.of(model, BLOCK)
    granted = arena.reserve(chain)
    arena.index.commit([slot for _, slot in granted], [0] * len(granted))
    made.granted(arena)
    return arena


async def settled(arenas: Arenas) -> None:
    """Wait until no thread takes memory, and some time more."""
    idle = 0
    while idle < 20:
        await anyio.sleep(0.005)
        idle = 0 if any(arena.index.num_growing for arena in arenas.values()) else idle + 1


async def test_memory_is_there_before_it_is_needed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with growing(folder) as (arenas, made):
        arena = put(arenas, made, "m", CHAIN[:2])
        await settled(arenas)
        assert (arena.index.num_spare, arena.memory_bytes) == (6, 8 * BLOCK)
        assert arena.segment.memory_bytes == arena._table_bytes + 8 * BLOCK, "and really is"
        monkeypatch.setattr(Segment, "back", lambda *_: pytest.fail("memory was taken for a question"))
        assert len(arena.reserve(CHAIN[:8])) == 6


async def test_it_stops_at_the_capacity_and_what_others_need_they_get(folder: Path) -> None:
    async with growing(folder) as (arenas, made):
        first = put(arenas, made, "m", CHAIN[:12])
        await settled(arenas)
        assert (first.index.num_spare, arenas.free_bytes) == (4, 0)
        second = put(arenas, made, "n", CHAIN[:4])
        assert (second.index.num_readable, first.index.num_readable, first.index.num_spare) == (4, 12, 0)
        await settled(arenas)
        assert arenas.memory_bytes == CAPACITY


async def test_a_small_store_takes_none(folder: Path) -> None:
    async with growing(folder, CAPACITY - BLOCK) as (arenas, made):
        arena = put(arenas, made, "m", CHAIN[:2])
        await settled(arenas)
        assert arena.index.num_spare == 0


async def test_where_there_is_no_memory_it_goes_on_with_what_it_has(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill, calls = Segment.fill, list[int]()

    def failing(segment: Segment, block: int, content: bytes) -> None:
        calls.append(block)
        if len(calls) > 2:
            raise ConfigError("injected: no memory")
        fill(segment, block, content)

    monkeypatch.setattr(Segment, "fill", failing)
    async with growing(folder) as (arenas, made):
        arena = put(arenas, made, "m", CHAIN[:2])
        await settled(arenas)
        assert (len(calls), arena.index.num_spare, arena.memory_bytes) == (3, 2, 4 * BLOCK)
        assert arenas.free_bytes == 0, "for a while"
        assert len(arena.reserve(CHAIN[:4])) == 2


async def test_an_arena_that_is_dropped_is_let_go(folder: Path) -> None:
    async with growing(folder) as (arenas, made):
        arena = put(arenas, made, "m", CHAIN[:2])
        arenas.tidy(1e9, 1.0)
        assert arena.fingerprint not in arenas
        await settled(arenas)
        assert arenas.memory_bytes == 0


async def test_an_arena_that_grows_is_not_dropped(folder: Path) -> None:
    async with growing(folder) as (arenas, _):
        arena = arenas.of("m", BLOCK)
        slot = arena.index.begin_growth()
        assert slot is not None and not arena.is_idle
        arenas.tidy(1e9, 1.0)
        assert "m" in arenas
        arena.index.end_growth(slot, has_memory=False)
        assert arena.is_idle
