"""Gateways know what workers' prefix caches hold, whatever becomes of messages, workers, gateways and the bus. Real actors and
simulated engines on the in-memory bus, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from common.cache.prefix import hash_chain
from common.cache.retention import Retention
from common.protocol import messages, subjects
from common.protocol import tokens as token_bytes
from common.protocol.kv_events import KvEvents, KvLayout, KvSnapshotRequest
from common.protocol.messages import Rejected
from common.runtime.bus import BusMessage
from common.worker import kv_events as publisher
from services.gateway.prompt_chain import ChainCache, Prompt
from tests.actors.kv_events_site import LENGTH, POOLS, SOON_S, agree, ask, gateways, index, is_told, known, tells, workers
from tests.chaos import test_cache_groups
from tests.chaos.test_one_world import prompt
from tests.chaos.world import World


def test_a_gateway_knows_what_its_workers_hold_also_when_they_evict(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        for round_of_prompts in range(4):
            await ask(world, *range(round_of_prompts * 5, round_of_prompts * 5 + 5))
            await agree(world)
        assert index(world).num_gaps == 0 and index(world).num_snapshots == 0
        evicted = sum(actor.kv_events._hashes._value.get() for actor in workers(world)) - index(world).num_blocks
        assert evicted > 100, "nothing was evicted"

    tells(story, tmp_path, num_blocks=64)


def test_messages_are_coalesced(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        heard: list[BusMessage] = []
        bus = world.broker.connect("listener")
        await bus.subscribe(subjects.any_kv_events(), heard.append)
        for start in range(8):
            world.submit(prompt(LENGTH, start), max_tokens=4)
        await world.all_ended()
        await agree(world)
        told = [messages.decode(message.data) for message in heard]
        with_changes = [one for one in told if isinstance(one, KvEvents) and one.stored]
        assert sum(len(part) // 8 for one in with_changes for part in one.stored) >= 8 * LENGTH // 4
        assert len(with_changes) <= 24
        await bus.close()

    tells(story, tmp_path)


@pytest.mark.parametrize("lose_every", [1, 2, 3])
def test_lost_messages_are_made_up_for(tmp_path: Path, lose_every: int) -> None:
    async def story(world: World) -> None:
        await ask(world, 1)
        await agree(world)
        count = iter(range(10**6))
        undo = world.broker.drop(lambda message: is_told(message) and next(count) % lose_every == 0)
        await ask(world, 2, 3, 4, 5)
        undo()
        await agree(world)
        assert index(world).num_gaps > 0 and index(world).num_snapshots > 0
        assert index(world).num_covered == 3

    tells(story, tmp_path)


def test_repeated_messages_change_nothing(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        bus = world.broker.connect("echo")
        seen: set[bytes] = set()

        def echo(message: BusMessage) -> None:
            if message.data not in seen:
                seen.add(message.data)
                world.task_group.start_soon(bus.publish, message.subject, message.data)

        await bus.subscribe(subjects.any_kv_events(), echo)
        await ask(world, *range(6))
        await agree(world)
        assert index(world).num_gaps == 0
        await bus.close()

    tells(story, tmp_path)


def test_gateways_agree_without_talking(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await ask(world, *range(4))
        for _ in range(2):
            await world.start("gateway")
        await anyio.sleep(2)
        await ask(world, *range(2, 8))
        await agree(world)
        assert len(gateways(world)) == 3

    tells(story, tmp_path)


def test_a_worker_that_dies_takes_its_blocks_along_and_one_that_begins_anew_tells_all(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await ask(world, *range(4))
        await agree(world)
        victim = world.alive("prefill")[0]
        await world.kill(victim)
        await anyio.sleep(SOON_S)
        await agree(world)
        assert index(world).num_covered == 2
        await world.start("prefill", name=victim)
        await anyio.sleep(SOON_S)
        await ask(world, 1, 2)
        await agree(world)
        assert index(world).num_covered == 3

    tells(story, tmp_path)


def test_a_fenced_worker_is_heard_under_its_new_epoch_alone(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await ask(world, *range(4))
        await agree(world)
        fenced = workers(world)[0]
        before = fenced.ref
        fenced._begin_anew(before.epoch)
        world.gateway.send(
            subjects.kv_events(before.role, before.id), KvEvents(worker=before, number=99, layout=fenced.kv_events.layout)
        )
        await anyio.sleep(SOON_S)
        await agree(world)
        assert fenced.ref in known(world.gateway) and before not in known(world.gateway)
        await ask(world, 1, 9)
        await agree(world)

    tells(story, tmp_path)


def test_the_bus_may_go_away_and_return(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await ask(world, *range(3))
        await agree(world)
        for start in (20, 30):
            world.submit(prompt(LENGTH, start), max_tokens=4)
        await anyio.sleep(0.02)
        world.broker.stop()
        await anyio.sleep(4)
        world.broker.start()
        await world.all_ended()
        await anyio.sleep(2)
        await agree(world)
        await ask(world, 40, 50)
        await agree(world)

    tells(story, tmp_path)


def test_a_worker_of_a_version_that_tells_nothing_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(self: publisher.KvEventPublisher, *args: Any, **settings: Any) -> None:
        made(self, *args, **(settings | {"backlog": 0}))

    made = publisher.KvEventPublisher.__init__
    monkeypatch.setattr(publisher.KvEventPublisher, "__init__", silent)

    async def story(world: World) -> None:
        await ask(world, *range(6))
        await anyio.sleep(30)
        assert index(world).num_covered == 0 and index(world).num_events == 0
        assert min(await ask(world, *range(6))) >= LENGTH - 4
        answer = await world.gateway.ask(workers(world)[0].ref, KvSnapshotRequest(), 1.0)
        assert isinstance(answer, Rejected) and answer.code == "not_found"

    tells(story, tmp_path)


def test_nonsense_and_what_is_said_in_anothers_name_are_counted_and_ignored(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await ask(world, *range(3))
        await agree(world)
        gateway, victim, bus = world.gateway, workers(world)[0], world.broker.connect("liar")
        subject = subjects.kv_events("prefill", victim.ref.id)
        number, layout = victim.kv_events.number + 1, victim.kv_events.layout
        lie = KvEvents(worker=victim.ref, number=number, layout=layout, removed=[b"x" * 80])
        before = gateway.metrics.messages_undecodable._value.get()
        await bus.publish(subjects.kv_events("prefill", "somebody"), messages.encode(lie))
        await bus.publish(subject, b"nonsense")
        await bus.publish(subject, messages.encode(Rejected(worker=victim.ref, code="x", message="")))
        await anyio.sleep(0.2)
        assert gateway.metrics.messages_undecodable._value.get() - before == 3
        await agree(world, 0.1)
        layout = KvLayout("simulated", 0, [])
        await bus.publish(subject, messages.encode(msgspec.structs.replace(lie, layout=layout)))
        await anyio.sleep(0.2)
        assert index(world).num_malformed == 1
        await ask(world, 7, 8)
        await agree(world)
        await bus.close()

    tells(story, tmp_path)


def test_metrics_tell_of_all_this(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        await ask(world, *range(3))
        await agree(world)
        page, told = world.gateway.metrics.render().decode(), workers(world)[0].metrics.render().decode()
        blocks = index(world).num_blocks
        assert f'penstock_kv_index_blocks{{model_name="simulated"}} {float(blocks)}' in page
        assert 'penstock_kv_index_workers{model_name="simulated"} 3.0' in page
        for name in ("kv_events_received", "kv_event_gaps", "kv_events_malformed", "kv_snapshots_received", "kv_event_bytes"):
            assert f"penstock_{name}_total" in page
        for name in ("kv_events_sent", "kv_event_blocks", "kv_event_overflows", "kv_snapshots_sent"):
            assert f"penstock_{name}_total" in told

    tells(story, tmp_path)


def test_with_zero_retention_there_is_nothing_to_tell(tmp_path: Path) -> None:
    heard: list[BusMessage] = []

    def hears(world: World) -> Callable[[BusMessage], bool]:
        return lambda message: bool(is_told(message) and heard.append(message))

    async def story(world: World) -> None:
        world.broker.drop(hears(world))
        for name in (*world.alive("prefill"), *world.alive("decode"), *world.alive("gateway")):
            await world.kill(name)
        world.zero_retention = True
        for role in POOLS:
            await world.start(role)  # pyright: ignore[reportArgumentType]
        await anyio.sleep(3)
        heard.clear()
        await ask(world, 1, 2)
        await anyio.sleep(SOON_S)
        assert not heard and not index(world).max_blocks

    tells(story, tmp_path)


@pytest.mark.parametrize("windows", test_cache_groups.WINDOWS)
def test_of_a_model_with_windows_what_a_worker_could_reuse_is_what_counts(
    tmp_path: Path, windows: tuple[tuple[Retention, int], ...]
) -> None:
    async def story(world: World) -> None:
        await ask(world, *range(10))
        await agree(world)
        router = world.gateway.cores[0].router
        for start in range(10):
            packed = token_bytes.pack(prompt(LENGTH, start))
            found = router.prefixes.index.match(Prompt(packed, b"", ChainCache()))
            hashes = hash_chain(prompt(LENGTH - 1, start), 4, fingerprint="simulated", salt=b"")
            for actor in workers(world):
                expected = 4 * len(actor.pool.match(hashes)[0])
                assert found.get(router._workers[actor.ref].serial, 0) == expected
        assert sum(len(groups[1]) for groups in known(world.gateway).values()) > 0

    test_cache_groups.play(tmp_path, story, windows)
