"""KV that is promised before its step has run, in virtual time: whatever happens to the step, tokens are right and blocks come
back. A block that is copied too early, or that a failed step has left, shows up as a wrong token.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from common.engine.plan import StepPlan, StepResult
from common.engine.simulated.runner import SimulatedRunner
from common.protocol.handles import GroupBlocks
from common.protocol.messages import KvReady, ReleaseLease
from common.protocol.stream_messages import KvPart, KvPromise, KvWatched, KvWithdrawn
from common.transfer.shm import ShmTransport
from common.transfer.transfer import Transfer
from services.decode.actor import DecodeActor
from services.decode.kv_reader import KvReader
from services.prefill.actor import PrefillActor
from tests.chaos.test_cache_groups import WINDOWS, play, prompt
from tests.chaos.test_kv_seen import actors, records
from tests.chaos.test_kv_streams import BLOCK_BYTES, Groups, _is, heard, made, streamed, streaming, until
from tests.chaos.world import BLOCK_TOKENS, World
from tests.fixtures.slow import pairs_quick

ALL_GROUPS: list[Groups] = [(), *WINDOWS]


@pytest.fixture(autouse=True)
def _progress_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode workers read the word in shared memory as those of one host do, and wait for it in virtual time."""
    copied = Transfer._copied

    def progress_of(self: ShmTransport, host: str, segment: str, fingerprint: str) -> Callable[[], int]:
        found = self._segments.get(segment, fingerprint)
        return lambda: int(found.progress[0])

    async def patiently(self: Transfer) -> int:
        after = self._after
        with anyio.CancelScope(shield=True):
            while after is not None and after.ran() < after.step and not after.told.is_set():
                await anyio.sleep(0.001)
        self._after = None
        return await copied(self)

    monkeypatch.setattr(ShmTransport, "progress_of", progress_of)
    monkeypatch.setattr(Transfer, "_copied", patiently)


def waits(decode: DecodeActor) -> bool:
    """Whether a copy is under way that waits for a step."""
    transfers = [one.transfer for one in decode.arrivals._arrivals.values() if one.transfer is not None]
    return any(one._after is not None and one._after.ran() < one._after.step for one in transfers)


def fail_once(monkeypatch: pytest.MonkeyPatch, when: Callable[[StepPlan], bool]) -> list[int]:
    """Let the first step for which `when` holds fail once it has written half of what it should; return the steps that did."""
    failed, run = list[int](), SimulatedRunner.execute

    def execute(self: SimulatedRunner, plan: StepPlan) -> StepResult:
        if not failed and when(plan):
            failed.append(plan.step)
            row = plan.rows[0]
            self._hashes.reshape(self.num_blocks, -1)[row.blocks[row.start // BLOCK_TOKENS]] = 255
            raise RuntimeError("injected: the step failed")
        return run(self, plan)

    monkeypatch.setattr(SimulatedRunner, "execute", execute)
    return failed


@pytest.mark.parametrize("windows", ALL_GROUPS)
@pytest.mark.parametrize("run_ahead", [1, 2])
def test_promised_kv_is_copied_without_a_part(tmp_path: Path, windows: Groups, run_ahead: int) -> None:
    async def story(world: World) -> None:
        parts, promises, ready = heard(world, KvPart), heard(world, KvPromise), heard(world, KvReady)
        watched = heard(world, KvWatched)
        world.submit(prompt(200), max_tokens=8)
        await world.all_ended()
        assert len(promises) == 13 and not parts
        assert [promise.part.start for promise in promises] == list(range(0, 52, 4))
        assert all(promise.step > 0 for promise in promises)
        assert len(watched) == 1 and ready[0].stream == promises[0].part.stream
        assert streamed(world) > 0 and (windows or streamed(world) >= 48 * BLOCK_BYTES), "the last is under way, perhaps"
        told = records(world, "request-1")["prefill"].events
        assert len([event for event in told if event.name == "part"]) > 0

    play(tmp_path, story, windows, run_ahead=run_ahead)


@pytest.mark.parametrize("windows", ALL_GROUPS)
@pytest.mark.parametrize("length", [197, 198, 199])
def test_a_last_block_that_is_not_full_is_promised_with_the_others(
    tmp_path: Path, windows: Groups, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled: list[int] = []
    copy = KvReader._copy_missing

    async def seen(self: KvReader, *given: Any) -> int:
        pulled.append(await copy(self, *given))
        return pulled[-1]

    monkeypatch.setattr(KvReader, "_copy_missing", seen)

    async def story(world: World) -> None:
        promises = heard(world, KvPromise)
        world.submit(prompt(length), max_tokens=12)
        await world.all_ended()
        assert {group.end for group in promises[-1].part.groups} == {length}
        assert len(promises[-1].part.hashes) == length % 16 // BLOCK_TOKENS, "it has no hash"
        assert windows or set(pulled) == {0}, "nothing is left to be pulled behind KvReady"

    play(tmp_path, story, windows)


@pytest.mark.parametrize("changes", [{"end": 3}, {"end": 23}, {"is_part": True}])
def test_a_last_block_that_is_wrong_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    async def story(world: World) -> None:
        (prefill,), (decode,) = actors(world, PrefillActor), actors(world, DecodeActor)
        end, is_part = changes.get("end", 18), changes.get("is_part", False)
        blocks = list(range(-(-end // BLOCK_TOKENS)))
        groups = [GroupBlocks(0, blocks, prefill.pool.groups[0].pool.generations_of(blocks), 0, end)]
        part = made(prefill, 1, hashes=[bytes([i] * 16) for i in range(4)], groups=groups)
        prefill.send(decode.ref, part if is_part else KvPromise(part=part, step=1, due_us=0))
        await anyio.sleep(0.1)
        assert not len(decode.arrivals)
        prefill.send(decode.ref, KvPromise(part=made(prefill, 2), step=1 << 40, due_us=0))
        await anyio.sleep(0.1)
        assert len(decode.arrivals) == 1, "one that is right"
        prefill.send(decode.ref, KvWithdrawn(owner=prefill.ref, streams=["stream-2"]))

    play(tmp_path, story, ())


@pytest.mark.parametrize("run_ahead", [1, 2])
@pytest.mark.parametrize("at", [48, 192])
@pytest.mark.parametrize("is_told", [True, False])
def test_of_a_step_that_fails_nothing_is_used(
    tmp_path: Path, run_ahead: int, at: int, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """is_told: whether the decode worker hears that the stream is over; it must not matter."""
    failed = fail_once(monkeypatch, lambda plan: any(row.start == at and len(row.tokens) > 1 for row in plan.rows))

    async def story(world: World) -> None:
        ready, withdrawn = heard(world, KvReady), heard(world, KvWithdrawn)
        if not is_told:
            world.broker.drop(lambda message: _is(message, KvWithdrawn))
        world.submit(prompt(200), max_tokens=8)
        await until(lambda: bool(failed))
        await world.all_ended()
        assert [one.stream for one in ready] == [""], "all of it is pulled behind KvReady"
        assert withdrawn
        (decode,) = actors(world, DecodeActor)
        if not is_told:
            decode.arrivals.clear()

    play(tmp_path, story, (), run_ahead=run_ahead)


@pytest.mark.parametrize("windows", ALL_GROUPS)
def test_a_word_that_nobody_writes_costs_no_time_behind_kv_ready(tmp_path: Path, windows: Groups) -> None:
    async def story(world: World) -> None:
        (prefill,) = actors(world, PrefillActor)
        prefill._threads.ran = lambda plan: None
        ready = heard(world, KvReady)
        outcome = world.submit(prompt(200), max_tokens=8)
        await until(lambda: bool(ready))
        begun = anyio.current_time()
        await world.all_ended()
        assert outcome.finish == "length" and anyio.current_time() - begun < 1.0

    play(tmp_path, story, windows)


def test_a_decode_worker_that_is_not_heard_to_watch_gets_parts(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.broker.drop(lambda message: _is(message, KvWatched))
        parts = heard(world, KvPart)
        world.submit(prompt(200), max_tokens=8)
        await world.all_ended()
        assert len(parts) == 13 and streamed(world) >= 48 * BLOCK_BYTES

    play(tmp_path, story, ())


@pytest.mark.parametrize("windows", ALL_GROUPS)
@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_a_worker_that_dies_while_a_step_is_waited_for_changes_no_token(tmp_path: Path, windows: Groups, who: str) -> None:
    async def story(world: World) -> None:
        await world.start(who)  # pyright: ignore[reportArgumentType]
        await anyio.sleep(3)
        world.submit(prompt(200), max_tokens=8)
        decode = await streaming(world)
        await until(lambda: waits(decode))
        owner = next(iter(decode.arrivals._arrivals.values())).owner
        await world.kill(owner.id if who == "prefill" else decode.ref.id)
        await world.all_ended()

    play(tmp_path, story, windows)


@pytest.mark.parametrize("what", ["cancelled", "drained", "lease ended", "fenced"])
def test_a_stream_that_ends_while_a_step_is_waited_for_keeps_nothing(tmp_path: Path, what: str) -> None:
    async def story(world: World) -> None:
        await world.start("decode")
        await anyio.sleep(3)
        world.submit(prompt(200), max_tokens=8, cancel_after_s=0.1 if what == "cancelled" else None)
        decode = await streaming(world)
        await until(lambda: waits(decode))
        (prefill,) = actors(world, PrefillActor)
        arrival = next(iter(decode.arrivals._arrivals.values()))
        if what == "drained":
            await world.terminate(decode.ref.id)
        elif what == "lease ended":
            decode.send(prefill.ref, ReleaseLease(leases=[arrival.lease]))
        elif what == "fenced":
            prefill._begin_anew(prefill.ref.epoch)
        await world.all_ended()

    play(tmp_path, story, ())


@pytest.mark.parametrize("windows", ALL_GROUPS)
@pytest.mark.parametrize("num_blocks", [64, 72, 96])
def test_a_small_pool_serves_all_whatever_is_promised(tmp_path: Path, windows: Groups, num_blocks: int) -> None:
    async def story(world: World) -> None:
        for index in range(12):
            world.submit(prompt(60 + 12 * index, 31 * index), max_tokens=30)
        await world.all_ended()
        assert all(outcome.finish == "length" for outcome in world.outcomes)

    play(tmp_path, story, windows, num_blocks=num_blocks)


@pytest.mark.parametrize(("windows", "every", "run_ahead"), pairs_quick(ALL_GROUPS, [2, 3, 5], [1, 2]))
def test_messages_that_are_lost_change_no_token(tmp_path: Path, windows: Groups, every: int, run_ahead: int) -> None:
    async def story(world: World) -> None:
        lost = (KvPart, KvPromise, KvWatched, KvWithdrawn)
        world.broker.drop(lambda message: _is(message, *lost) and world.dice.randrange(every) == 0)
        for index in range(10):
            cancel_after_s = 0.02 * index if index % 4 == 3 else None
            world.submit(prompt(40 + 16 * index, 31 * index), max_tokens=10, cancel_after_s=cancel_after_s)
            await anyio.sleep(0.05)
        await world.all_ended()
        await anyio.sleep(40)  # streams whose end was lost

    play(tmp_path, story, windows, run_ahead=run_ahead)
