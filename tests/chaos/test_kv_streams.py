"""KV that leaves while its prompt is computed, in virtual time: whatever happens to it, tokens are right and blocks come back.

A prefill worker computes 16 tokens a step here, and a step takes 20 ms: a prompt of 200 tokens is streamed for a quarter of a
second. Any block that is taken for another one shows up as a wrong token.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

import anyio
import msgspec
import pytest

from common.cache.grouped_pool import Arrived
from common.cache.retention import Retention
from common.engine.simulated.runner import BYTES_PER_TOKEN
from common.protocol import messages
from common.protocol.errors import OutOfCredits, StaleHandle, TransportUnavailable
from common.protocol.handles import GroupBlocks
from common.protocol.messages import Cancel, KvReady, Message, ReleaseLease, RenewLeases
from common.protocol.stream_messages import KvPart, KvWithdrawn
from common.runtime.bus import BusMessage
from common.transfer.awaited import Awaited
from common.transfer.blocks import LocalBlocks, RemoteBlocks
from common.transfer.transfer import Transfer
from services.decode.actor import DecodeActor
from services.decode.arrival import MAX_TOLD, Arrival
from services.decode.arrivals import SILENT_S, Arrivals
from services.decode.kv_reader import KvReader
from services.prefill import streams
from services.prefill.actor import PrefillActor
from services.prefill.streams import Streams
from tests.chaos.test_cache_groups import WINDOWS, play, prompt
from tests.chaos.test_kv_seen import actors, records, traffic, value
from tests.chaos.world import BLOCK_TOKENS, World
from tests.fixtures.slow import pairs_quick
from tests.waiting import until

Groups = tuple[tuple[Retention, int], ...]
ALL_GROUPS: list[Groups] = [(), *WINDOWS]
BLOCK_BYTES = BLOCK_TOKENS * BYTES_PER_TOKEN
Sent = TypeVar("Sent", bound=Message)


def heard(world: World, kind: type[Sent]) -> list[Sent]:
    """Return a list to which every message of this kind is added that is sent from now on."""
    seen: list[Sent] = []

    def look(message: BusMessage) -> bool:
        if _is(message, kind):
            decoded = messages.decode(message.data)
            if isinstance(decoded, kind):
                seen.append(decoded)
        return False

    world.broker.drop(look)
    return seen


def streamed(world: World) -> float:
    return sum(value(decode, "penstock_kv_streamed_bytes_total") for decode in actors(world, DecodeActor))


async def streaming(world: World, parts: int = 3) -> DecodeActor:
    """Wait until some parts of a prompt have arrived; return the decode worker."""
    found: list[DecodeActor] = []

    def look() -> bool:
        found[:] = [
            decode
            for decode in actors(world, DecodeActor)
            if any(one.num_parts >= parts for one in decode.arrivals._arrivals.values())
        ]
        return bool(found)

    await until(look)
    return found[0]


COPY_S = [0.003, 0.05, 0.2]


@pytest.fixture(params=COPY_S)
def copy_s(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    """Each copy of a stream takes so long, writes at its very end and can't be stopped. Copies behind KvReady may take less."""
    dice, is_behind, copy = random.Random(7), ContextVar("is_behind", default=False), KvReader._copy

    async def behind(self: KvReader, *arguments: Any) -> int:
        is_behind.set(True)
        return await copy(self, *arguments)

    async def late(self: Transfer) -> int:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(dice.choice([0.001, request.param]) if is_behind.get() else request.param)
        return self._copy()

    monkeypatch.setattr(KvReader, "_copy", behind)
    monkeypatch.setattr(Transfer, "_run", late)
    monkeypatch.setattr(Transfer, "stop", lambda self: None)
    return request.param


# -- what it is for


@pytest.mark.parametrize("windows", ALL_GROUPS)
@pytest.mark.parametrize("run_ahead", [1, 2])
def test_all_but_the_last_chunks_kv_arrives_before_the_prompt_is_computed(
    tmp_path: Path, windows: Groups, run_ahead: int
) -> None:
    async def story(world: World) -> None:
        parts, ready = heard(world, KvPart), heard(world, KvReady)
        world.submit(prompt(200), max_tokens=8)
        await world.all_ended()
        assert len(parts) == 13, "12 chunks of 16 tokens, and one of 8"
        assert [part.start for part in parts] == list(range(0, 52, 4))
        assert [len(part.hashes) for part in parts] == [4] * 12 + [2]
        assert b"".join(part.tokens for part in parts) == ready[0].generation.tokens[: 4 * 200]
        assert {ready[0].stream} == {part.stream for part in parts} and ready[0].handle.lease == parts[0].lease
        named = {group.group: dict(zip(group.blocks, group.generations, strict=True)) for group in ready[0].handle.groups}
        for part in parts:
            for group in part.groups:
                told = dict(zip(group.blocks, group.generations, strict=True))
                assert told.items() <= named[group.group].items(), "a window's part would have fallen out again"
        said = traffic(world, DecodeActor)
        assert said.received_tokens == 200 and said.recomputed_tokens == 0
        assert said.received_bytes == sum(len(group.blocks) for group in ready[0].handle.groups) * BLOCK_BYTES
        assert sum(path.bytes for path in said.paths if path.path == "shm") == said.received_bytes, "nothing is copied twice"
        at_the_end = sum(2 for _ in ready[0].handle.groups) + sum(len(group.blocks) for group in parts[-2].groups)
        early = streamed(world)
        assert said.received_bytes - at_the_end * BLOCK_BYTES <= early < said.received_bytes
        told = records(world, "request-1")
        assert len([event for event in told["prefill"].events if event.name == "part"]) == 13
        (pulled,) = [event for event in told["decode"].events if event.name == "pull"]
        facts = dict(pulled.facts)
        assert (facts["streamed_bytes"], facts["streamed_parts"]) == (early, 13)
        assert facts.keys() >= {"admission_us", "queued_us", "copy_us"}, "how long the rest took, and where"
        copies = [event for event in told["decode"].events if event.name == "part"]
        assert 0 < len(copies) <= MAX_TOLD and {event.peer for event in copies} == {pulled.peer}
        assert all(dict(event.facts).keys() == {"queued_us", "copy_us"} for event in copies)
        assert (pulled.num_tokens, pulled.num_bytes) == (200, said.received_bytes)

    play(tmp_path, story, windows, run_ahead=run_ahead)


@pytest.mark.parametrize("windows", ALL_GROUPS)
@pytest.mark.parametrize("run_ahead", [1, 2])
def test_what_is_still_being_copied_when_the_prompt_is_computed_is_copied_once(
    tmp_path: Path, windows: Groups, run_ahead: int, copy_s: float
) -> None:
    async def story(world: World) -> None:
        for index in range(4):
            world.submit(prompt(150 + 10 * index, 100 * index), max_tokens=20)
        await world.all_ended()
        said = traffic(world, DecodeActor)
        assert said.received_tokens == 150 + 160 + 170 + 180 and said.recomputed_tokens == 0
        assert sum(path.bytes for path in said.paths if path.path == "shm") == said.received_bytes
        assert all(outcome.finish == "length" for outcome in world.outcomes)

    play(tmp_path, story, windows, run_ahead=run_ahead)


def test_a_model_with_windows_alone_sends_only_the_final_tail(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        parts, ready = heard(world, KvPart), heard(world, KvReady)
        world.submit(prompt(200), max_tokens=8)
        await world.all_ended()
        assert [(part.start, len(part.hashes)) for part in parts] == [(0, 48)] or parts[0].groups[0].start >= 180
        assert set(parts[-1].groups[0].blocks) <= set(ready[0].handle.groups[0].blocks)
        assert streamed(world) > 0

    play(tmp_path, story, (), keeps=Retention(window=18))


def test_a_short_prompt_of_one_chunk_is_handed_off_as_a_whole(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        parts, ready = heard(world, KvPart), heard(world, KvReady)
        world.submit(prompt(200, 50), max_tokens=1)  # ends at prefill
        await world.all_ended()
        assert not parts and not ready
        (prefill,) = actors(world, PrefillActor)
        prefill.scheduler.token_budget = 256
        world.submit(prompt(200), max_tokens=8)
        await world.all_ended()
        assert not parts and [one.stream for one in ready] == [""]

    play(tmp_path, story, ())


def test_a_long_prompt_of_one_chunk_is_copied_while_kv_ready_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MIN_ONLY_PART_TOKENS", 200)
    taken: list[int] = []
    take = Arrivals.take

    def watch(self: Arrivals, arrival: Arrival, arrived: Arrived) -> None:
        taken.append(sum(map(len, arrived)))
        take(self, arrival, arrived)

    monkeypatch.setattr(Arrivals, "take", watch)

    async def story(world: World) -> None:
        parts, ready = heard(world, KvPart), heard(world, KvReady)
        (prefill,) = actors(world, PrefillActor)
        prefill.scheduler.token_budget = 256
        world.submit(prompt(202), max_tokens=8)
        await world.all_ended()
        world.submit(prompt(150, 50), max_tokens=8)
        await world.all_ended()
        assert [len(part.hashes) for part in parts] == [50] and [one.stream for one in ready] == [parts[0].stream, ""]
        assert 0 < taken[0] <= 50, "copies had begun when KvReady was taken up"
        said = traffic(world, DecodeActor)
        assert said.received_tokens == 352 and said.recomputed_tokens == 0
        assert said.received_bytes == (51 + 38) * BLOCK_BYTES
        assert sum(path.bytes for path in said.paths if path.path == "shm") == said.received_bytes, "nothing is copied twice"

    play(tmp_path, story, ())


def test_the_last_part_begins_to_be_copied_before_kv_ready_is_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come together, or nearly so."""
    taken: list[tuple[int, int]] = []
    take = Arrivals.take

    def watch(self: Arrivals, arrival: Arrival, arrived: Arrived) -> None:
        taken.append((sum(map(len, arrived)), len(arrival.prompt.hashes)))
        take(self, arrival, arrived)

    monkeypatch.setattr(Arrivals, "take", watch)

    async def story(world: World) -> None:
        decode = actors(world, DecodeActor)[0]
        handle, kept = decode.handle, list[tuple[Message, str]]()

        def together(message: Message, reply: str) -> None:
            if isinstance(message, KvPart) and message.start == 12:
                kept.append((message, reply))
            else:
                for part, its_reply in kept if isinstance(message, KvReady) else ():
                    handle(part, its_reply)
                handle(message, reply)

        monkeypatch.setattr(decode, "handle", together)
        world.submit(prompt(56), max_tokens=8)
        await world.all_ended()
        assert taken == [(14, 14)], "blocks that are here or being copied, and blocks whose tokens were read"

    play(tmp_path, story, ())


def test_what_the_decode_worker_has_itself_is_not_copied(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.submit(prompt(100), max_tokens=8)
        await world.all_ended()
        for actor in actors(world, PrefillActor):
            actor.pool.groups[0].pool.drop_cached()
        for name in world.alive("kvstore"):
            await world.kill(name)
        before = traffic(world, DecodeActor)
        world.submit(prompt(200), max_tokens=8)
        await world.all_ended()
        after = traffic(world, DecodeActor)
        assert after.received_bytes - before.received_bytes == 25 * BLOCK_BYTES
        assert after.cached_tokens - before.cached_tokens == 100

    play(tmp_path, story, ())


# -- deaths


@pytest.mark.parametrize(("windows", "parts", "copy_s"), pairs_quick(ALL_GROUPS, [1, 6, 12], COPY_S), indirect=["copy_s"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_worker_that_dies_while_kv_is_streamed_changes_no_token(
    tmp_path: Path, windows: Groups, role: str, parts: int, how: str, copy_s: float
) -> None:
    async def story(world: World) -> None:
        await world.start(role)  # pyright: ignore[reportArgumentType]
        await anyio.sleep(3)
        for index in range(3):
            world.submit(prompt(200, 100 * index), max_tokens=20)
        decode = await streaming(world, parts)
        owners = {one.owner.id for one in decode.arrivals._arrivals.values()}
        victim = decode.ref.id if role == "decode" else sorted(owners)[0]
        if how == "killed":
            await world.kill(victim)
        else:
            world.processes[victim].actor._last_beat -= 10
        await world.all_ended(within_s=30)
        assert all(outcome.finish == "length" for outcome in world.outcomes)

    play(tmp_path, story, windows)


@pytest.mark.parametrize("windows", ALL_GROUPS)
def test_a_cancel_ends_the_stream_and_frees_both_sides(tmp_path: Path, windows: Groups, copy_s: float) -> None:
    async def story(world: World) -> None:
        for index in range(30):
            world.submit(prompt(200, 30 * index), max_tokens=20, cancel_after_s=0.013 * index)
            await world.all_ended()
            await world.clean(within_s=1)

    play(tmp_path, story, windows)


def test_a_cancel_frees_the_prefill_workers_blocks_though_the_decode_worker_says_nothing(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        outcome = world.submit(prompt(200), max_tokens=20, cancel_after_s=0.15)
        decode = await streaming(world)
        world.broker.drop(lambda message: _is(message, ReleaseLease, RenewLeases))
        (prefill,) = actors(world, PrefillActor)
        assert len(prefill.streams) == len(prefill.leases) == 1
        await until(lambda: outcome.ended)
        await until(lambda: not prefill.leases.keys(), within_s=0.5)
        assert not len(prefill.streams) and not len(decode.arrivals) and prefill.pool.usage().leased == 0

    play(tmp_path, story, ())


def test_a_lease_that_nobody_renews_ends_the_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(world: World) -> None:
        (prefill,), (decode,) = actors(world, PrefillActor), actors(world, DecodeActor)
        ready = heard(world, KvReady)
        undo = world.broker.drop(lambda message: _is(message, RenewLeases))
        outcome = world.submit(prompt(200), max_tokens=20)
        await streaming(world)
        with monkeypatch.context() as patch:
            patch.setattr(prefill.scheduler, "plan", lambda *_: None)  # the prompt waits for a long time
            await until(lambda: not prefill.leases.keys(), within_s=7)
            await until(lambda: not len(decode.arrivals), within_s=1)
        undo()
        prefill.wake()
        await world.all_ended()
        assert outcome.finish == "length" and ready[-1].stream == ""

    play(tmp_path, story, ())


@pytest.mark.parametrize("windows", ALL_GROUPS)
def test_a_draining_decode_worker_gives_streams_up_and_the_hand_off_goes_elsewhere_as_a_whole(
    tmp_path: Path, windows: Groups, copy_s: float
) -> None:
    async def story(world: World) -> None:
        await world.start("decode")
        await anyio.sleep(3)
        ready = heard(world, KvReady)
        world.submit(prompt(200), max_tokens=20)
        decode = await streaming(world)
        await world.terminate(decode.ref.id)
        await world.all_ended(within_s=20)
        assert world.outcomes[0].finish == "length"
        assert ready[-1].stream == "" and streamed(world) == 0

    play(tmp_path, story, windows)


@pytest.mark.parametrize("windows", ALL_GROUPS)
def test_a_refused_hand_off_withdraws_its_stream(tmp_path: Path, windows: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(world: World) -> None:
        await world.start("decode")
        await anyio.sleep(3)
        withdrawn, ready = heard(world, KvWithdrawn), heard(world, KvReady)
        world.submit(prompt(200), max_tokens=20)
        decode = await streaming(world)

        def refuse(*_: Any) -> None:
            raise OutOfCredits("injected")

        monkeypatch.setattr(decode.scheduler, "admit", refuse)
        await world.all_ended(within_s=20)
        assert world.outcomes[0].finish == "length"
        assert [one.streams for one in withdrawn] == [[ready[0].stream]]
        assert len(ready) >= 2 and ready[-1].stream == ""
        assert not len(decode.arrivals)

    play(tmp_path, story, windows)


# -- messages


def _is(message: BusMessage, *kinds: type[Message]) -> bool:
    return any(kind.__name__.encode() in message.data[:32] for kind in kinds)


@pytest.mark.parametrize("windows", ALL_GROUPS)
@pytest.mark.parametrize("every", [1, 2, 3])
def test_lost_parts_are_pulled_at_the_end(tmp_path: Path, windows: Groups, every: int) -> None:
    async def story(world: World) -> None:
        world.broker.drop(lambda message: _is(message, KvPart, KvWithdrawn) and world.dice.randrange(every) == 0)
        for index in range(6):
            world.submit(prompt(120 + 13 * index, 100 * index), max_tokens=20, cancel_after_s=None if index % 3 else 0.1)
            await anyio.sleep(0.03)
        await world.all_ended()
        assert all(outcome.finish == "length" for outcome in world.outcomes[1::3])
        if every == 1:
            assert streamed(world) == 0
        await world.clean(within_s=SILENT_S + 7)  # a lost KvWithdrawn: the lease is over, and nothing comes any more

    play(tmp_path, story, windows)


@pytest.mark.parametrize("windows", ALL_GROUPS)
def test_parts_may_come_twice_and_in_any_order_also_when_it_is_over(
    tmp_path: Path, windows: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = PrefillActor.send

    async def story(world: World) -> None:
        late: list[tuple[PrefillActor, Any, Message]] = []

        def shuffled(self: PrefillActor, to: Any, message: Message) -> None:
            if not isinstance(message, KvPart | KvWithdrawn):
                send(self, to, message)
                return
            late.append((self, to, message))
            for _ in range(2):
                again = late[world.dice.randrange(max(0, len(late) - 8), len(late))]
                send(*again)

        monkeypatch.setattr(PrefillActor, "send", shuffled)
        for index in range(8):
            world.submit(prompt(120 + 13 * index, 100 * index), max_tokens=20, cancel_after_s=None if index % 4 else 0.12)
            await anyio.sleep(0.05)
        await world.all_ended()
        for one in late:
            send(*one)  # of streams that are over: nothing begins anew
        await world.clean(within_s=SILENT_S + 7)
        assert streamed(world) > 0

    play(tmp_path, story, windows)


def test_a_part_that_comes_behind_its_end_begins_nothing(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        (prefill,), (decode,) = actors(world, PrefillActor), actors(world, DecodeActor)
        part = made(prefill, 1)
        prefill.send(decode.ref, KvWithdrawn(owner=prefill.ref, streams=[part.stream]))
        prefill.send(decode.ref, part)
        prefill.send(decode.ref, Cancel(requests=[("cancelled", 2)]))
        prefill.send(decode.ref, made(prefill, 2, request="cancelled", attempt=2))
        await anyio.sleep(0.1)
        assert not len(decode.arrivals)
        prefill.send(decode.ref, made(prefill, 3, request="cancelled", attempt=3))
        await anyio.sleep(0.1)
        assert len(decode.arrivals) == 1
        prefill.send(decode.ref, Cancel(requests=[("cancelled", 3)]))
        await anyio.sleep(0.1)
        assert not len(decode.arrivals)

    play(tmp_path, story, ())


def made(prefill: PrefillActor, number: int, **changes: Any) -> KvPart:
    """A part of a request that nobody knows, of blocks that exist."""
    blocks = [0, 1, 2]
    fields: dict[str, Any] = {
        "owner": prefill.ref,
        "request": f"nobodys-{number}",
        "attempt": 0,
        "stream": f"stream-{number}",
        "lease": f"lease-{number}",
        "fingerprint": "simulated",
        "start": 0,
        "hashes": [bytes([number, i] * 8) for i in range(3)],
        "groups": [GroupBlocks(0, blocks, prefill.pool.groups[0].pool.generations_of(blocks), 0, 12)],
    }
    return KvPart(**{**fields, **changes})


def test_a_stream_of_which_nothing_comes_any_more_is_given_up(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        (prefill,), (decode,) = actors(world, PrefillActor), actors(world, DecodeActor)
        prefill.send(decode.ref, made(prefill, 1))
        await anyio.sleep(SILENT_S - 5)
        assert len(decode.arrivals) == 1 and decode.pool.groups[0].pool.num_aside == 3
        await anyio.sleep(6)
        assert not len(decode.arrivals) and decode.pool.groups[0].pool.num_aside == 0

    play(tmp_path, story, ())


@pytest.mark.parametrize("windows", [(), WINDOWS[0]])
def test_parts_that_are_wrong_cost_nobody_anything(tmp_path: Path, windows: Groups) -> None:
    async def story(world: World) -> None:
        (prefill,), (decode,) = actors(world, PrefillActor), actors(world, DecodeActor)
        world.submit(prompt(150), max_tokens=60)
        good = made(prefill, 0).groups[0]
        stranger = type(prefill.ref)("prefill", "prefill-unknown", 1)
        wrong: list[dict[str, Any]] = [
            {"owner": stranger},
            {"owner": type(prefill.ref)("prefill", prefill.ref.id, prefill.ref.epoch - 1)},
            {"fingerprint": "another"},
            {"start": -1},
            {"start": 1 << 40},
            {"hashes": []},
            {"hashes": [b"short"] * 3},
            {"hashes": [bytes(16)] * 5000},
            {"tokens": bytes(3)},
            {"tokens": bytes(4 * 16)},
            {"groups": [good, good]},
            {"groups": [GroupBlocks(9, good.blocks, good.generations, 0, 12)]},
            {"groups": [GroupBlocks(-1, good.blocks, good.generations, 0, 12)]},
            {"groups": [GroupBlocks(0, good.blocks, good.generations, 0, 16)]},
            {"groups": [GroupBlocks(0, good.blocks, good.generations, 1, 13)]},
            {"groups": [GroupBlocks(0, good.blocks, good.generations, -12, 0)]},
            {"groups": [GroupBlocks(0, good.blocks, good.generations[:2], 0, 12)]},
            {"groups": [GroupBlocks(0, good.blocks, good.generations, 0, 12, [1])]},
        ]
        for number, changes in enumerate(wrong):
            prefill.send(decode.ref, made(prefill, number, **changes))
        await anyio.sleep(0.1)
        assert not [one for one in decode.arrivals._arrivals.values() if one.request.startswith("nobodys")]
        unreadable = [
            GroupBlocks(0, [0, 1, 1 << 30], good.generations, 0, 12),
            GroupBlocks(0, [0, -1, 2], good.generations, 0, 12),
            GroupBlocks(0, good.blocks, [1 << 40] * 3, 0, 12),
        ]
        for number, group in enumerate(unreadable):  # found out when they are copied
            prefill.send(decode.ref, made(prefill, 100 + number, groups=[group]))
        await anyio.sleep(0.1)
        assert decode.pool.groups[0].pool.num_aside <= 50
        prefill.send(decode.ref, KvWithdrawn(owner=prefill.ref, streams=[f"stream-{100 + n}" for n in range(3)]))
        prefill.send(decode.ref, KvWithdrawn(owner=stranger, streams=["stream-1", "never"]))
        await world.all_ended()
        assert world.outcomes[0].finish == "length"

    play(tmp_path, story, windows)


def test_streams_are_ended_by_their_owner_alone_and_are_bounded_in_number(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        (prefill,), (decode,) = actors(world, PrefillActor), actors(world, DecodeActor)
        for number in range(20):
            prefill.send(decode.ref, made(prefill, number))
        await anyio.sleep(0.1)
        assert len(decode.arrivals) == 8 == decode.scheduler.max_running
        stranger = type(prefill.ref)("prefill", "prefill-unknown", 1)
        prefill.send(decode.ref, KvWithdrawn(owner=stranger, streams=[f"stream-{n}" for n in range(20)]))
        await anyio.sleep(0.1)
        assert len(decode.arrivals) == 8
        prefill.send(decode.ref, KvWithdrawn(owner=prefill.ref, streams=[f"stream-{n}" for n in range(20)]))
        await anyio.sleep(0.1)
        assert not len(decode.arrivals) and not decode.pool.groups[0].pool.num_aside

    play(tmp_path, story, ())


def test_kv_of_other_tokens_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the parts say of their tokens is compared with the tokens that come with KvReady."""
    parts = Streams._parts

    def wrong(self: Streams, *args: Any) -> Any:
        for part in parts(self, *args):
            yield KvPart(
                **{name: getattr(part, name) for name in part.__struct_fields__ if name != "hashes"}, hashes=other(part)
            )

    def other(part: KvPart) -> list[bytes]:
        return [bytes(reversed(block_hash)) for block_hash in part.hashes]

    monkeypatch.setattr(Streams, "_parts", wrong)

    async def story(world: World) -> None:
        world.submit(prompt(200), max_tokens=20)
        await world.all_ended()
        assert world.outcomes[0].finish == "length"
        assert streamed(world) == 0 and traffic(world, DecodeActor).received_tokens == 200

    play(tmp_path, story, ())


@pytest.mark.parametrize("what", ["none", "of others", "out of the vocabulary", "salted"])
def test_tokens_that_come_with_parts_are_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """They save hashing once KvReady comes. What they claim wrongly is found out there, and costs nothing else."""
    parts = Streams._parts
    changes: dict[str, dict[str, bytes]] = {
        "none": {"tokens": b""},
        "of others": {"tokens": bytes(4 * 4 * BLOCK_TOKENS)},
        "out of the vocabulary": {"tokens": b"\xff" * 4 * 4 * BLOCK_TOKENS},
        "salted": {"salt": b"another tenant's"},
    }

    def wrong(self: Streams, *args: Any) -> Any:
        for part in parts(self, *args):
            yield msgspec.structs.replace(part, **changes[what])

    monkeypatch.setattr(Streams, "_parts", wrong)

    async def story(world: World) -> None:
        world.submit(prompt(200), max_tokens=20)
        await world.all_ended()
        assert world.outcomes[0].finish == "length" and streamed(world) > 0
        assert traffic(world, DecodeActor).recomputed_tokens == 0

    play(tmp_path, story, ())


# -- copies that fail, and memory


class Sometimes(Transfer):
    """Fails after it has written something."""

    error: Exception

    def _copy(self, first: Callable[[], int] | None = None) -> int:
        super()._copy(first)
        self.target.memory[list(self.target.blocks)] ^= 0xFF
        raise self.error


@pytest.mark.parametrize("windows", ALL_GROUPS)
@pytest.mark.parametrize("error", [StaleHandle("reused"), TransportUnavailable("no way")])
@pytest.mark.parametrize("nth", [0, 2, 3, 4, 5, 11])
def test_a_copy_that_fails_is_tried_again_behind_the_prompt(
    tmp_path: Path, windows: Groups, error: Exception, nth: int, copy_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(world: World) -> None:
        (decode,) = actors(world, DecodeActor)
        pull, count = decode.transport.pull, [0]

        def failing(source: RemoteBlocks, target: LocalBlocks, after: Awaited | None = None) -> Transfer:
            count[0] += 1
            if count[0] != nth + 1:
                return pull(source, target, after)
            transfer = Sometimes(decode.transport.read, source, target)
            transfer.error = error
            return transfer

        monkeypatch.setattr(decode.transport, "pull", failing)
        world.submit(prompt(200), max_tokens=20)
        await world.all_ended()
        said = traffic(world, DecodeActor)
        if not any(event.error for event in records(world, "request-1")["decode"].events):  # else it was the last copy
            assert (said.received_tokens, said.recomputed_tokens) == (200, 0)
        assert world.outcomes[0].finish == "length"

    play(tmp_path, story, windows)


@pytest.mark.parametrize(
    ("windows", "num_blocks", "copy_s"), pairs_quick(ALL_GROUPS, [64, 72, 96], COPY_S), indirect=["copy_s"]
)
def test_a_small_pool_serves_all_whatever_is_streamed(tmp_path: Path, windows: Groups, num_blocks: int, copy_s: float) -> None:
    async def story(world: World) -> None:
        await world.start("prefill")
        await anyio.sleep(3)
        for index in range(12):
            length = 6 if index % 3 == 0 else 90 + 12 * index
            world.submit(prompt(length, 70 * index), max_tokens=30)
            await anyio.sleep(0.02)
        await world.all_ended()
        assert all(outcome.finish == "length" for outcome in world.outcomes), [one.error for one in world.outcomes]

    play(tmp_path, story, windows, num_blocks=num_blocks)


def test_blocks_of_streams_are_given_up_before_a_sequence_is_refused_or_preempted(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        (prefill,), (decode,) = actors(world, PrefillActor), actors(world, DecodeActor)
        pool = decode.pool.groups[0].pool
        for number in range(8):
            count = 7
            blocks = list(range(count))
            generations = prefill.pool.groups[0].pool.generations_of(blocks)
            prefill.send(
                decode.ref,
                made(
                    prefill,
                    number,
                    hashes=[bytes([number, i] * 8) for i in range(count)],
                    groups=[GroupBlocks(0, blocks, generations, 0, count * BLOCK_TOKENS)],
                ),
            )
        await anyio.sleep(0.1)
        assert pool.num_aside == 56 and pool.usage().free == 8
        for index in range(4):
            world.submit(prompt(6, 70 * index), max_tokens=50)  # direct: computed at decode; 14 blocks each
        await world.all_ended()
        assert all(outcome.finish == "length" for outcome in world.outcomes)
        assert decode.scheduler.num_preemptions == 0 and pool.num_aside < 56
        prefill.send(decode.ref, KvWithdrawn(owner=prefill.ref, streams=[f"stream-{n}" for n in range(8)]))

    play(tmp_path, story, (), num_blocks=64)
