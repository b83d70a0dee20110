"""A model whose cache has a group that keeps a window: hand-offs, deaths, migrations and kvstores, as with one group."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio
import pytest

from common.cache.retention import KEEP_ALL, Retention
from common.protocol.messages import KvReady
from common.worker.actor import EngineWorker
from services.decode.actor import DecodeActor
from services.kvstore.actor import KvstoreActor
from services.prefill.actor import PrefillActor
from tests.chaos.world import MAX_CONTEXT, World
from tests.fixtures import virtual_time

Story = Callable[[World], Coroutine[Any, Any, None]]
ROLES = ("kvstore", "draft", "prefill", "decode", "gateway")
WINDOWS = [((Retention(window=10), 96),), ((Retention(chunk=16), 96), (Retention(window=7), 96))]


def play(
    shm_dir: Path,
    story: Story,
    windows: tuple[tuple[Retention, int], ...],
    *,
    run_ahead: int = 1,
    keeps: Retention = KEEP_ALL,
    num_blocks: int = 256,
) -> None:
    async def main() -> None:
        async with anyio.create_task_group() as task_group:
            world = World(task_group, shm_dir, windows=windows, run_ahead=run_ahead, keeps=keeps, num_blocks=num_blocks)
            for role in ROLES:
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


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("run_ahead", [1, 2])
def test_a_hand_off_sends_a_windows_tail(
    tmp_path: Path, windows: tuple[tuple[Retention, int], ...], run_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed: list[KvReady] = []
    make = PrefillActor.kv_ready

    def seen(self: PrefillActor, *args: Any) -> KvReady:
        handed.append(make(self, *args))
        return handed[-1]

    monkeypatch.setattr(PrefillActor, "kv_ready", seen)

    async def story(world: World) -> None:
        for length in (1, 4, 15, 16, 17, 61, 100):
            world.submit(prompt(length, length), max_tokens=20)
        await world.all_ended()
        assert all(outcome.finish == "length" for outcome in world.outcomes)
        decode = next(p.actor for p in world.processes.values() if isinstance(p.actor, DecodeActor))
        usage = decode.presence("ready").kv
        assert len(usage.groups) == 1 + len(windows) and sum(group.total for group in usage.groups) == usage.total

    play(tmp_path, story, windows, run_ahead=run_ahead)
    longest = max((ready.handle for ready in handed), key=lambda handle: handle.num_tokens)
    assert longest.num_tokens == 100 and len(longest.groups[0].blocks) == 25
    for group, (retention, _) in zip(longest.groups[1:], windows, strict=True):
        assert group.start == retention.first_token(100) // 4 * 4
        assert len(group.blocks) == 25 - group.start // 4 <= 3


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("role", ["prefill", "decode", "kvstore"])
@pytest.mark.parametrize("after_s", [0.05, 0.6])
def test_a_killed_worker_does_not_change_the_stream(
    tmp_path: Path, windows: tuple[tuple[Retention, int], ...], role: str, after_s: float
) -> None:
    async def story(world: World) -> None:
        await world.start(role)  # pyright: ignore[reportArgumentType]
        await anyio.sleep(3)
        for index in range(6):
            world.submit(prompt(30, index), max_tokens=60)
        await anyio.sleep(after_s)
        await world.kill(world.alive(role)[0])
        await world.all_ended(within_s=20)
        assert all(outcome.finish == "length" for outcome in world.outcomes)

    play(tmp_path, story, windows)


ALL_WINDOWS = [(), ((Retention(window=7), 40),)]
"""Groups beside a first one that keeps a window, too: all layers have windows, as in Mistral 7B v0.1."""


@pytest.mark.parametrize(
    ("keeps", "windows"),
    [*((KEEP_ALL, windows) for windows in WINDOWS), *((Retention(window=18), windows) for windows in ALL_WINDOWS)],
)
def test_a_prefix_comes_back_from_the_kvstore_with_its_windows_tail(
    tmp_path: Path, keeps: Retention, windows: tuple[tuple[Retention, int], ...]
) -> None:
    """A conversation goes on after all engines were replaced: its first turns are in the kvstore alone."""

    async def story(world: World) -> None:
        first = world.submit(prompt(70), max_tokens=1)
        await world.all_ended()
        await anyio.sleep(1)
        store = next(p.actor for p in world.processes.values() if isinstance(p.actor, KvstoreActor))
        assert len(store.arenas) == 1 + len(windows)
        for role in ("prefill", "decode"):
            old = world.alive(role)
            await world.start(role)
            await anyio.sleep(3)
            for name in old:
                await world.terminate(name)
        again = world.submit([*first.prompt, *first.tokens, *prompt(20, 5)], max_tokens=5)
        await world.all_ended()
        assert again.cached_tokens == 68

    play(tmp_path, story, windows, keeps=keeps)


@pytest.mark.parametrize(("computed_by", "max_tokens"), [("prefill", 1), ("decode", 1), ("decode", 40)])
@pytest.mark.parametrize("length", [71, 72, 73])
@pytest.mark.parametrize(
    ("keeps", "windows"), [*((KEEP_ALL, windows) for windows in WINDOWS), (Retention(window=18), ALL_WINDOWS[1])]
)
def test_a_prompt_comes_back_from_the_kvstore_whatever_its_length(
    tmp_path: Path,
    keeps: Retention,
    windows: tuple[tuple[Retention, int], ...],
    length: int,
    computed_by: str,
    max_tokens: int,
) -> None:
    """Its last token is computed anew: of 72 tokens 17 blocks count, and the tails at their end must be there."""

    async def story(world: World) -> None:
        if computed_by == "decode":
            await world.terminate(world.alive("prefill")[0])
            await anyio.sleep(3)
        world.submit(prompt(length), max_tokens=max_tokens)
        await world.all_ended()
        await anyio.sleep(1)
        for role in ("prefill", "decode"):
            old = world.alive(role)
            await world.start(role)
            await anyio.sleep(3)
            for name in old:
                await world.terminate(name)
        again = world.submit(prompt(length), max_tokens=5)
        await world.all_ended()
        assert again.cached_tokens == (length - 1) // 4 * 4

    play(tmp_path, story, windows, keeps=keeps)


def test_a_handle_of_another_shape_is_refused(tmp_path: Path) -> None:
    """A tail that is too short would be read as if all were there."""

    async def story(world: World) -> None:
        make = PrefillActor.kv_ready

        def short(self: PrefillActor, *args: Any) -> KvReady:
            ready = make(self, *args)
            group = ready.handle.groups[1]
            ready.handle.groups[1] = type(group)(1, group.blocks[1:], group.generations[1:], group.start + 4, group.end)
            return ready

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PrefillActor, "kv_ready", short)
            outcome = world.submit(prompt(30), max_tokens=5, deadline_s=20)
            await world.all_ended()
        assert outcome.tokens == outcome.expected[: len(outcome.tokens)]

    play(tmp_path, story, WINDOWS[0])


@pytest.mark.parametrize("windows", ALL_WINDOWS)
@pytest.mark.parametrize("run_ahead", [1, 2])
def test_windows_alone_hold_sequences_of_any_length(
    tmp_path: Path, windows: tuple[tuple[Retention, int], ...], run_ahead: int
) -> None:
    """14 blocks are 56 tokens; the sequences have 120 to 160, are handed off, lose their workers, and go on."""

    async def story(world: World) -> None:
        await world.start("decode")
        await anyio.sleep(3)
        for index in range(5):
            world.submit(prompt(100 + 4 * index, index), max_tokens=20 + 5 * index)
        await anyio.sleep(0.05)
        await world.kill(world.alive("decode")[0])
        await world.start("prefill")
        await anyio.sleep(0.05)
        await world.kill(world.alive("prefill")[0])
        await world.all_ended(within_s=30)
        assert all(outcome.finish == "length" for outcome in world.outcomes), [o.error for o in world.outcomes]
        for process in world.processes.values():
            if isinstance(process.actor, EngineWorker):
                assert process.actor.presence("ready").kv.total == 14 + sum(blocks for _, blocks in windows)
                assert process.actor.cache.longest_sequence > MAX_CONTEXT

    play(tmp_path, story, windows, run_ahead=run_ahead, keeps=Retention(window=18), num_blocks=14)
