"""The store gives up the block of least worth that nothing builds on: by recency, by how often it was found, by its cost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.kvstore.eviction import EvictionClock, LeafOrder
from services.kvstore.owners import Owners


def chain(order: LeafOrder, *hashes: bytes) -> None:
    for parent, block_hash in zip((b"", *hashes), hashes, strict=False):
        order.add(block_hash, parent)


def drained(order: LeafOrder) -> list[bytes]:
    found = []
    while (block_hash := order.pop()) is not None:
        found.append(block_hash)
    return found


def test_a_chain_goes_tail_first():
    order = LeafOrder()
    chain(order, b"a", b"b", b"c")
    assert drained(order) == [b"c", b"b", b"a"]


def test_the_oldest_leaf_goes_first():
    order = LeafOrder()
    chain(order, b"a")
    chain(order, b"b")
    chain(order, b"c")
    order.use([b"a"])
    assert drained(order) == [b"b", b"c", b"a"]


def test_a_shared_prefix_outlives_all_that_builds_on_it():
    order = LeafOrder()
    chain(order, b"system", b"one")
    order.add(b"two", b"system")
    chain(order, b"other")
    assert drained(order) == [b"one", b"two", b"system", b"other"]


def test_what_is_held_stays_and_so_does_what_it_builds_on():
    order = LeafOrder()
    chain(order, b"a", b"b")
    order.hold(b"b")
    order.hold(b"b")
    assert order.pop() is None
    order.let_go(b"b")
    assert order.pop() is None
    order.let_go(b"b")
    assert drained(order) == [b"b", b"a"]


def test_a_removed_block_frees_its_parent_and_may_come_back_under_its_children():
    order = LeafOrder()
    chain(order, b"a", b"b", b"c")
    order.remove(b"b")
    assert order.pop() == b"a", "its child is gone"
    order.add(b"b", b"a")
    assert drained(order) == [b"c", b"b"], "c was there all the time"


def test_touching_one_block_for_ever_takes_no_memory():
    order = LeafOrder()
    chain(order, b"a", b"b")
    for _ in range(10_000):
        order.use([b"b"])
    assert len(order._heaps[b""]) < 200
    assert drained(order) == [b"b", b"a"]


def test_what_was_found_outlives_as_many_turnovers_of_what_came_once():
    order = LeafOrder()
    chain(order, b"found")
    order.use([b"found"])
    order.use([b"found"])
    for turnover in range(2):
        for i in range(4):
            chain(order, b"%d-%d" % (turnover, i))
        assert [order.pop() for _ in range(4)] == [b"%d-%d" % (turnover, i) for i in range(4)]
    chain(order, b"last")
    assert order.pop() == b"found", "nobody has asked for it since"


def test_a_prefix_that_was_popular_once_does_not_stay_for_ever():
    order = LeafOrder()
    chain(order, b"popular")
    for _ in range(1000):
        order.use([b"popular"])
    turnovers = 0
    while b"popular" in order._blocks:
        chain(order, b"%d" % turnovers)
        order.pop()
        turnovers += 1
    assert turnovers < 10


def test_what_takes_longer_to_compute_is_worth_more_within_limits():
    clock = EvictionClock()
    cheap, dear, unknown = (LeafOrder(clock, block_bytes=100) for _ in range(3))
    cheap.measured(1.0)
    dear.measured(4.0)
    for order in (cheap, dear, unknown):
        chain(order, b"a")
    assert [order.rank_of(b"a").worth for order in (cheap, unknown, dear)] == [0.5, 1.0, 2.0]
    dear.measured(1e9)
    dear.touch(b"a")
    assert dear.rank_of(b"a").worth == 4.0
    dear.close()
    cheap.touch(b"a")
    assert cheap.rank_of(b"a").worth == 1.0, "alone, its cost is the mean"


def test_a_speed_that_wavers_leaves_blocks_in_the_order_of_their_use():
    clock = EvictionClock()
    order, other = LeafOrder(clock), LeafOrder(clock)
    other.measured(1.0)
    for i, seconds in enumerate((1.0, 1.4, 0.8, 1.1, 0.7, 1.3)):
        order.measured(seconds)
        chain(order, b"%d" % i)
    assert drained(order) == [b"%d" % i for i in range(6)]


def test_an_owners_blocks_are_evicted_apart():
    time = [0.0]
    owners = Owners(lambda: time[0], active_s=60.0)
    order = LeafOrder(owners=owners, block_bytes=10)
    order.add(b"a1", b"", b"a")
    order.add(b"b1", b"", b"b")
    order.add(b"b2", b"", b"b")
    assert owners._bytes[b"b"] == 20
    assert owners.first_to_go(40, b"a", 10) is None, "nobody has more than its share"
    assert owners.first_to_go(30, b"a", 10) == {b"a", b"b"}, "it would have more than its share itself"
    owners.weigh(b"a", 3.0)
    assert owners.first_to_go(40, b"a", 10) == {b"b"}
    assert owners.first_to_go(40, b"c", 10) == {b"b"}, "a newcomer has a share"
    assert order.pop({b"b"}) == b"b1"
    assert owners._bytes[b"b"] == 10
    time[0] = 61.0
    assert owners.first_to_go(1000, b"c", 10) == {b"a", b"b"}, "what nobody has used for long goes first"
    order.close()
    assert owners._bytes == {}


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 4)), max_size=120))
def test_random_histories_evict_the_candidate_of_least_worth(history: list[tuple[int, int]]):
    order, number, level = LeafOrder(), 0, 0.0
    worth: dict[bytes, tuple[float, int]] = {}
    hits: dict[bytes, int] = {}
    parents: dict[bytes, bytes] = {}
    held: set[bytes] = set()
    for which, action in history:
        block_hash, parent = b"%d" % which, b"%d" % (which // 2) if which > 1 else b""
        if action == 0 and block_hash not in worth:
            order.add(block_hash, parent)
            hits[block_hash], parents[block_hash] = 0, parent
        elif action == 1 and block_hash in worth:
            order.touch(block_hash)
        elif action == 4 and block_hash in worth:
            order.use([block_hash])
            hits[block_hash] += 1
        elif action == 2 and block_hash in worth:
            (order.let_go if block_hash in held else order.hold)(block_hash)
            held ^= {block_hash}
            continue
        elif action == 3:
            candidates = [known for known in worth if known not in held and known not in parents.values()]
            expected = min(candidates, key=worth.__getitem__, default=None)
            assert order.pop() == expected
            if expected is not None:
                level = max(level, worth.pop(expected)[0])
                del parents[expected]
            continue
        else:
            continue
        number += 1
        worth[block_hash] = level + 1 + min(hits[block_hash], 7), number
    assert len(order) == len(worth)
