"""What is counted of KV adds up, with real actors in virtual time: hand-offs, failures, deaths, preemption, kvstores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import anyio
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.engine.simulated.runner import BYTES_PER_TOKEN
from common.protocol.errors import StaleHandle, TransportUnavailable
from common.protocol.explain_messages import WorkerRecord
from common.protocol.kv_messages import KvTraffic
from common.runtime.actor import Actor
from common.transfer.base import RemoteBlocks
from common.transfer.paths import KvPath
from common.transfer.transfer import Pulling
from common.worker.actor import EngineWorker
from services.decode.actor import DecodeActor
from services.prefill.actor import PrefillActor
from tests.chaos.test_cache_groups import WINDOWS, play, prompt
from tests.chaos.world import BLOCK_TOKENS, World


class Failing(Pulling):
    """A transport over which nothing can be read."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def path_of(self, source: RemoteBlocks) -> KvPath:
        return "shm"

    def read(self, source: RemoteBlocks, into: np.ndarray, into_blocks: Sequence[int]) -> int:
        raise self.error


T = TypeVar("T", bound=Actor)


def actors(world: World, kind: type[T]) -> list[T]:
    return [process.actor for process in world.processes.values() if isinstance(process.actor, kind)]


def traffic(world: World, kind: type[EngineWorker]) -> KvTraffic:
    (actor,) = actors(world, kind)
    return actor.presence("ready").traffic


def value(actor: Actor, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels."""
    families = text_string_to_metric_families(actor.metrics.render().decode())
    samples = (sample for family in families for sample in family.samples)
    return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())


def records(world: World, request: str) -> dict[str, WorkerRecord]:
    """What each worker remembers of a request, by its role; of the latest attempt."""
    found: dict[str, WorkerRecord] = {}
    for actor in actors(world, EngineWorker):
        held = next((one for one in actor.held.values() if one.request.startswith(f"{request}/")), None)
        names = {name for name, _ in actor.traces._ended if name.startswith(f"{request}/")} | {held.request if held else ""}
        for name in names - {""}:
            for record in actor.traces.explain(name, held).records:
                found[actor.role] = record
    return found


@pytest.mark.parametrize("windows", [(), *WINDOWS])
def test_what_is_handed_off_is_received_or_was_there(tmp_path: Path, windows: tuple[Any, ...]) -> None:
    async def story(world: World) -> None:
        for number, length in enumerate((33, 61, 100)):
            world.submit(prompt(length, 100 * number), max_tokens=8)
        await world.all_ended()
        world.submit(prompt(200, 200), max_tokens=8)  # its first half is in both workers' caches
        await world.all_ended()
        decode, prefill = traffic(world, DecodeActor), traffic(world, PrefillActor)
        assert decode.received_tokens + decode.cached_tokens == 33 + 61 + 100 + 200
        assert decode.cached_tokens >= 96 and prefill.own_tokens >= 96
        assert decode.recomputed_tokens == prefill.recomputed_tokens == 0
        (path,) = decode.paths[:1]
        assert (path.path, path.operation, path.bytes, path.failures) == ("shm", "read", decode.received_bytes, 0)
        if not windows:
            blocks = sum(-(-length // BLOCK_TOKENS) for length in (33, 61, 100)) + (200 - 100) // BLOCK_TOKENS
            assert decode.received_bytes == blocks * BLOCK_TOKENS * BYTES_PER_TOKEN
        assert prefill.looked_up_tokens == 33 + 61 + 100 + 200
        record = records(world, "request-3")["decode"]
        (pulled,) = [event for event in record.events if event.name == "pull"]
        assert (pulled.num_tokens, record.recomputed_tokens) == (100, 0) and pulled.num_bytes > 0
        (actor,) = actors(world, DecodeActor)
        for group in range(1 + len(windows)):
            states = {s: value(actor, "penstock_kv_blocks", group=str(group), state=s) for s in ("free", "cached", "owned")}
            assert sum(states.values()) == (96 if group else 256)

    play(tmp_path, story, windows)


def test_what_a_head_wants_computed_again_is_told_apart(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        (decode,) = actors(world, DecodeActor)
        decode.scheduler.recompute = lambda sequence: 20
        world.submit(prompt(61), max_tokens=8)
        await world.all_ended()
        said = traffic(world, DecodeActor)
        assert (said.received_tokens, said.recomputed_tokens) == (61, 19), "the first token of the answer has no KV yet"
        assert (said.drafted_tokens, said.preempted_tokens) == (19, 0)
        assert value(decode, "penstock_kv_recomputed_tokens_total", reason="drafted") == 19
        events = records(world, "request-1")["decode"].events
        steps = [(event.name, event.num_tokens) for event in events if event.name in ("chunk", "first step")]
        assert steps == [("chunk", 16), ("first step", 4)]

    play(tmp_path, story, ())


@pytest.mark.parametrize("windows", [(), WINDOWS[0]])
@pytest.mark.parametrize("error", [StaleHandle("reused"), TransportUnavailable("no way")])
def test_a_hand_off_that_brings_nothing_shows_as_recomputed(tmp_path: Path, windows: tuple[Any, ...], error: Any) -> None:
    async def story(world: World) -> None:
        (decode,) = actors(world, DecodeActor)
        decode.transport._transport = Failing(error)
        world.submit(prompt(61), max_tokens=8)
        await world.all_ended()
        said = traffic(world, DecodeActor)
        assert (said.received_tokens, said.received_bytes, said.recomputed_tokens) == (0, 0, 61)
        assert value(decode, "penstock_kv_recomputed_tokens_total", reason=error.code) == 61
        assert value(decode, "penstock_kv_handoffs_total", outcome=error.code) == 1
        failed = value(decode, "penstock_kv_transfer_failures_total", path="shm", operation="read", reason=error.code)
        assert failed == 2, "the stream's first copy, and what was tried again behind KvReady"
        record = records(world, "request-1")["decode"]
        assert record.recomputed_tokens == 61
        assert [event.error for event in record.events if event.name == "pull"] == [error.code]

    play(tmp_path, story, windows)


def test_what_moves_after_a_kill_shows_as_recomputed(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await world.start("decode")
        await anyio.sleep(3)
        prefill = actors(world, PrefillActor)[0]
        for number in range(4):
            world.submit(prompt(40, 100 * number), max_tokens=100)
        await anyio.sleep(0.6)
        moved = len(actors(world, DecodeActor)[0].held)
        generated = min(len(outcome.tokens) for outcome in world.outcomes)
        await world.kill(world.alive("decode")[0])
        await world.all_ended(within_s=20)
        # prompts are in the prefill worker's cache; what was generated was with the dead worker alone
        again = value(prefill, "penstock_kv_recomputed_tokens_total", reason="moved")
        again += sum(value(d, "penstock_kv_recomputed_tokens_total", reason="moved") for d in actors(world, DecodeActor))
        assert moved and generated > 0 and again > 0

    play(tmp_path, story, ())


def test_who_loses_its_blocks_shows_as_recomputed(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        for number in range(5):
            world.submit(prompt(20, 100 * number), max_tokens=60)
        await world.all_ended()
        (decode,) = actors(world, DecodeActor)
        assert decode.scheduler.num_preemptions > 0
        assert value(decode, "penstock_kv_recomputed_tokens_total", reason="preempted") > 0
        preempted = [
            event
            for number in range(1, 6)
            for event in records(world, f"request-{number}")["decode"].events
            if event.name == "preempted"
        ]
        assert len(preempted) == decode.scheduler.num_preemptions
        lost = sum(dict(event.facts)["recomputed_tokens"] for event in preempted)
        assert lost == traffic(world, DecodeActor).recomputed_tokens == traffic(world, DecodeActor).preempted_tokens

    play(tmp_path, story, (), num_blocks=64)


@pytest.mark.parametrize("windows", [(), WINDOWS[0]])
def test_a_new_worker_finds_prefixes_in_the_kvstore_and_says_so(tmp_path: Path, windows: tuple[Any, ...]) -> None:
    async def story(world: World) -> None:
        world.submit(prompt(70), max_tokens=1)
        await world.all_ended()
        await anyio.sleep(1)
        for role in ("prefill", "decode"):
            await world.kill(world.alive(role)[0])
            await world.start(role)  # pyright: ignore[reportArgumentType]
        await anyio.sleep(3)
        outcome = world.submit(prompt(70), max_tokens=1)
        await world.all_ended()
        assert outcome.cached_tokens >= 64
        said = traffic(world, PrefillActor)
        assert (said.looked_up_tokens, said.own_tokens, said.disk_tokens) == (70, 0, 0)
        assert said.memory_tokens == outcome.cached_tokens
        record = records(world, "request-2")["prefill"]
        assert [peer.role for peer in record.peers] == ["kvstore"]
        (copied,) = [event for event in record.events if event.name == "prefix"]
        assert copied.num_tokens == said.memory_tokens and copied.num_bytes > 0
        assert sum(path.bytes for path in said.paths if path.path == "kvstore" and path.operation == "read") == copied.num_bytes

    play(tmp_path, story, windows)
