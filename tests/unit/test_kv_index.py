"""A gateway's index holds what workers hold, whatever becomes of the messages in which they tell it."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import msgspec
import pytest

from common.protocol.errors import ProtocolError
from common.protocol.kv_events import KvEvents, KvLayout
from services.gateway import kv_index
from services.gateway.worker_blocks import Arriving
from tests.unit.kv_told import LAYOUT, answer, hashes, held, index, ref, snapshot, tokens, told

PROMPT = tokens(16 * 8 + 1)
CHAIN = hashes(PROMPT)


# -- messages that come as they should


def test_what_was_stored_is_found_and_what_was_removed_is_not() -> None:
    at = index()
    at.apply(told(1, CHAIN[:6]), 0)
    assert held(at) == {0: 6 * 16}
    at.apply(told(2, [], CHAIN[4:6]), 0)
    assert held(at) == {0: 4 * 16}
    at.apply(told(3, CHAIN[4:8], CHAIN[:1]), 0)
    assert held(at) == {}
    assert at.num_blocks == 7 and at.num_gaps == 0 and not at.wanted(1)


def test_a_worker_that_has_stored_nothing_yet_is_covered_by_its_first_sign() -> None:
    at = index()
    at.apply(told(0), 0)
    assert at.covers(0) and held(at) == {} and not at.wanted(1)
    at.apply(told(1, CHAIN), 0)
    assert held(at) == {0: 128}


def test_each_worker_has_blocks_of_its_own() -> None:
    at = index(ref(1), ref(2), ref(3))
    at.apply(told(1, CHAIN[:2]), 0)
    at.apply(told(1, CHAIN[:7], worker=ref(2)), 0)
    at.apply(told(1, hashes(tokens(64, 5)), worker=ref(3)), 0)
    assert held(at) == {0: 32, 1: 112}


def test_the_block_of_the_last_token_does_not_count_since_that_token_is_computed() -> None:
    at = index()
    at.apply(told(1, CHAIN), 0)
    assert held(at, PROMPT[:128]) == {0: 112}
    assert held(at, PROMPT[:129]) == {0: 128}
    assert held(at, PROMPT[:16]) == held(at, PROMPT[:1]) == held(at, []) == {}


def test_a_tenant_finds_nothing_of_another_one() -> None:
    at = index()
    at.apply(told(1, hashes(PROMPT, salt=b"acme")), 0)
    assert held(at, salt=b"acme") == {0: 128}
    assert held(at) == held(at, salt=b"zoo") == {}


def test_workers_of_another_layout_have_hashes_of_their_own() -> None:
    at = index(ref(1), ref(2), ref(3))
    at.apply(told(1, CHAIN), 0)
    other = KvLayout("g", 16, [(0, 0)])
    at.apply(told(1, hashes(PROMPT, fingerprint="g")[:3], worker=ref(2), layout=other), 0)
    at.apply(told(1, hashes(PROMPT, block_tokens=32), worker=ref(3), layout=KvLayout("f", 32, [(0, 0)])), 0)
    assert held(at) == {0: 128, 1: 48, 2: 128}


def test_a_process_that_goes_on_under_another_layout_holds_nothing_of_before() -> None:
    at = index()
    at.apply(told(1, CHAIN), 0)
    at.apply(told(2, hashes(PROMPT, fingerprint="g"), layout=KvLayout("g", 16, [(0, 0)])), 0)
    assert held(at) == {} and at.wanted(0) == [ref()]


# -- messages that do not


def test_a_repeated_message_changes_nothing() -> None:
    at = index()
    for events in (told(1, CHAIN), told(2, [], CHAIN[4:]), told(1, CHAIN), told(2, [], CHAIN[4:]), told(2)):
        at.apply(events, 0)
    assert held(at) == {0: 64} and at.num_gaps == 0 and not at.wanted(1)


def test_after_a_lost_message_a_snapshot_is_wanted_and_what_came_meanwhile_is_applied_behind_it() -> None:
    at = index()
    at.apply(told(1, CHAIN[:2]), 0)
    at.apply(told(3, CHAIN[4:5]), 0)
    at.apply(told(4, CHAIN[5:6]), 0)
    assert held(at) == {0: 32}, "what is known is believed meanwhile"
    assert at.wanted(0) == [ref()] and at.num_gaps == 1
    answer(at, CHAIN[:5], 3, 0)  # it has the message 3, and not 4
    assert held(at) == {0: 96} and not at.wanted(1)
    at.apply(told(5, CHAIN[6:7]), 0)
    assert held(at) == {0: 112}


def test_the_loss_of_the_last_message_is_noticed_when_its_number_is_repeated() -> None:
    at = index()
    at.apply(told(1, CHAIN[:2]), 0)
    at.apply(told(2), 0)
    assert at.wanted(0) == [ref()]
    answer(at, CHAIN, 2, 0)
    assert held(at) == {0: 128}
    at.apply(told(2), 0)
    assert not at.wanted(1)


def test_a_gateway_that_starts_asks_for_a_snapshot() -> None:
    at = index()
    at.apply(told(57, CHAIN[7:8]), 0)
    assert not at.covers(0) and at.wanted(0) == [ref()]
    at.apply(told(58, [], CHAIN[7:8]), 0)
    answer(at, CHAIN, 57, 0)
    assert held(at) == {0: 112}


def test_a_snapshot_that_is_too_old_is_asked_for_again() -> None:
    at = index()
    at.apply(told(5, CHAIN[:1]), 0)
    arriving = at.begin(ref())
    assert arriving is not None and arriving.number == 4
    at.apply(told(9, CHAIN[7:8]), 0)  # 6 to 8 are lost while the snapshot is under way
    arriving.add(snapshot(5, CHAIN[:3]))
    at.finish(ref(), arriving, 0)
    assert not at.covers(0)
    assert at.wanted(1) == [ref()]
    answer(at, CHAIN[:7], 8, 1)
    assert held(at) == {0: 128}


def test_messages_in_the_wrong_order_cost_a_snapshot_and_nothing_else() -> None:
    at = index()
    for number in (1, 3, 2, 4):
        at.apply(told(number, CHAIN[number - 1 : number]), 0)
    assert at.wanted(0) == [ref()]
    answer(at, CHAIN[:4], 4, 0)
    at.apply(told(5, CHAIN[4:5]), 0)
    assert held(at) == {0: 80}


def test_other_lives_of_a_worker_are_not_listened_to() -> None:
    at = index(ref(epoch=2))
    at.apply(told(1, CHAIN, worker=ref(epoch=1)), 0)
    at.apply(told(1, CHAIN, worker=ref(epoch=3)), 0)
    at.apply(told(1, CHAIN, worker=ref(9)), 0)
    assert held(at) == {} and at.num_blocks == 0


def test_a_worker_that_dies_or_begins_anew_takes_its_blocks_along() -> None:
    at = index(ref(1), ref(2))
    at.apply(told(1, CHAIN), 0)
    at.apply(told(1, CHAIN[:1], worker=ref(2)), 0)
    at.left(ref(1))
    at.left(ref(1))
    assert held(at) == {1: 16} and at.num_blocks == 1
    at.joined(ref(1, epoch=2), 2)
    at.apply(told(1, CHAIN), 0)  # of the life that is over
    assert held(at) == {1: 16}
    at.apply(told(7, CHAIN[:4], worker=ref(1, epoch=2)), 0)  # a process that was fenced goes on counting
    answer(at, CHAIN[:3], 7, 0, worker=ref(1, epoch=2))
    assert held(at) == {1: 16, 2: 48}


MALFORMED: list[dict[str, Any]] = [
    {"layout": KvLayout("f", 0, [(0, 0)])},
    {"layout": KvLayout("f", 16, [])},
    {"layout": KvLayout("f", 16, [(-1, 0)])},
    {"layout": KvLayout("f", 1 << 40, [(0, 0)])},
    {"stored": [b"1234567"]},
    {"removed": [b"12345678", b"12345678"]},
]


@pytest.mark.parametrize("wrong", MALFORMED)
def test_a_message_that_makes_no_sense_is_a_lost_message(wrong: dict[str, Any]) -> None:
    at = index()
    at.apply(told(1, CHAIN[:4]), 0)
    at.apply(msgspec.structs.replace(told(2, CHAIN[4:5]), **wrong), 0)
    assert at.num_malformed == 1 and held(at) == {0: 64}
    at.apply(told(3, CHAIN[5:6]), 0)
    assert at.wanted(0) == [ref()]
    answer(at, CHAIN[:6], 3, 0)
    assert held(at) == {0: 96}


def test_a_message_that_makes_no_sense_is_survived_behind_a_snapshot_too() -> None:
    at = index()
    at.apply(told(5, CHAIN[:1]), 0)
    at.apply(KvEvents(worker=ref(), number=6, layout=LAYOUT, stored=[b"123" * 5]), 0)
    answer(at, CHAIN[:4], 5, 0)
    assert held(at) == {0: 64} and at.num_malformed == 1
    at.apply(told(7, CHAIN[4:5]), 0)
    assert at.wanted(0) == [ref()]


# -- snapshots


def test_a_snapshot_comes_in_parts_that_may_end_anywhere() -> None:
    layout = KvLayout("f", 16, [(0, 0), (32, 0)])
    everything = [*CHAIN, *CHAIN[2:8]]
    for size in (1, 3, 5, 8, 14):
        at = index()
        at.apply(told(9, [1], layout=layout), 0)
        arriving = at.begin(ref())
        assert arriving is not None
        while not arriving.is_complete:
            part = everything[arriving.offset : arriving.offset + size]
            arriving.add(snapshot(9, part, offset=arriving.offset, counts=[8, 6], layout=layout))
        at.finish(ref(), arriving, 0)
        assert at.num_blocks == 14
        assert held(at) == {0: 128}


@pytest.mark.parametrize(
    "part",
    [
        snapshot(3, CHAIN),
        snapshot(5, CHAIN, offset=2),
        snapshot(5, CHAIN, counts=[4]),
        snapshot(5, CHAIN, counts=[8, 8]),
        snapshot(5, CHAIN, counts=[-1]),
        snapshot(5, [], counts=[8]),
        snapshot(5, CHAIN, hashes=b"123"),
        snapshot(5, CHAIN, layout=KvLayout("f", 0, [(0, 0)])),
    ],
)
def test_a_part_that_makes_no_sense_is_refused(part: Any) -> None:
    with pytest.raises(ProtocolError):
        Arriving(5, 1000).add(part)
    halfway = Arriving(5, 1000)
    halfway.add(snapshot(5, CHAIN[:4], counts=[8]))
    for wrong in (snapshot(6, CHAIN[4:], offset=4), snapshot(5, CHAIN[4:], offset=3), snapshot(5, [], offset=4)):
        with pytest.raises(ProtocolError):
            halfway.add(wrong)


def test_only_one_snapshot_of_a_worker_is_under_way_and_a_failed_one_is_retried_more_and_more_seldom() -> None:
    at = index()
    at.apply(told(5, CHAIN[:1]), 0)
    assert at.begin(ref()) is not None
    assert at.begin(ref()) is None and at.wanted(100) == []
    now, waits = 0.0, []
    for _ in range(8):
        at.fail(ref(), now)
        wait = next(seconds for seconds in range(100) if at.wanted(now + seconds))
        waits.append(wait)
        now += wait
        assert at.begin(ref()) is not None
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30]
    at.left(ref())
    at.fail(ref(), now)
    at.finish(ref(), Arriving(1, 1), now)
    assert at.begin(ref()) is None


def test_what_a_worker_held_before_a_gap_is_not_believed_for_ever() -> None:
    at = index()
    at.apply(told(1, CHAIN), 0)
    at.apply(told(5, CHAIN[:1]), 0)
    at.wanted(kv_index.STALE_S)
    assert at.covers(0)
    at.wanted(kv_index.STALE_S + 1)
    assert not at.covers(0) and at.num_blocks == 0 and held(at) == {}
    answer(at, CHAIN[:4], 5, 20)
    assert held(at) == {0: 64}


def test_what_waits_for_a_snapshot_is_bounded() -> None:
    at, big = index(), list(range(1, 40_001))
    at.apply(told(9, [1]), 0)
    for number in range(10, 40):
        at.apply(told(number, big), 0)
    worker = at._workers[ref()]
    assert worker.num_kept <= kv_index.MAX_KEPT_HASHES and len(worker.kept) <= 4
    assert worker.needs + len(worker.kept) == 39


# -- bounds


def test_a_worker_that_does_not_fit_is_left_out_whole_and_asked_again_later() -> None:
    at = index(ref(1), ref(2), max_blocks=10)
    at.apply(told(1, CHAIN[:4]), 0)
    at.apply(told(1, CHAIN, worker=ref(2)), 0)
    assert held(at) == {0: 64} and at.num_blocks == 4 and at.num_too_large == 1
    at.apply(told(2, hashes(tokens(33, 3)), worker=ref(2)), 1)
    assert at.wanted(1) == [] and not at._workers[ref(2)].kept
    assert at.wanted(31) == [ref(2)]
    arriving = at.begin(ref(2))
    assert arriving is not None
    arriving.add(snapshot(2, CHAIN[:7], worker=ref(2), counts=[2000]))
    assert arriving.is_too_large
    at.finish(ref(2), arriving, 31)
    assert at.num_too_large == 1 and at.wanted(32) == []
    at.left(ref(1))
    answer(at, CHAIN, 2, 61, worker=ref(2))
    assert held(at) == {1: 128} and at.num_too_large == 0


def test_an_index_without_room_holds_nothing() -> None:
    at = index(max_blocks=0)
    at.apply(told(1, CHAIN), 0)
    at.apply(told(5, CHAIN), 0)
    assert held(at) == {} and at.wanted(10) == []


def test_a_block_takes_less_than_a_hundred_bytes() -> None:
    dice, at = random.Random(1), index(*(ref(number) for number in range(4)), max_blocks=1 << 20)
    messages = [
        told(number, [dice.getrandbits(60) for _ in range(10_000)], worker=ref(worker))
        for worker in range(4)
        for number in range(1, 6)
    ]
    tracemalloc.start()
    try:
        for events in messages:
            at.apply(events, 0)
        assert tracemalloc.get_traced_memory()[0] / at.num_blocks < 100
    finally:
        tracemalloc.stop()
    assert at.num_blocks == 200_000


def test_of_many_workers_with_a_prefix_some_are_followed_others_each_time() -> None:
    refs = [ref(number) for number in range(100)]
    at = index(*refs)
    for worker in refs:
        at.apply(told(1, CHAIN[:4], worker=worker), 0)
    seen: set[int] = set()
    for _ in range(8):
        found = held(at)
        assert len(found) == kv_index.MAX_FOLLOWED and set(found.values()) == {64}
        seen |= found.keys()
    assert len(seen) == 100
