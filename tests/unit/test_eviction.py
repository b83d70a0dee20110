"""The store gives up the least recently used block that nothing builds on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.kvstore.eviction import LeafLru


def chain(lru: LeafLru, *hashes: bytes) -> None:
    for parent, block_hash in zip((b"", *hashes), hashes, strict=False):
        lru.add(block_hash, parent)


def drained(lru: LeafLru) -> list[bytes]:
    order = []
    while (block_hash := lru.pop()) is not None:
        order.append(block_hash)
    return order


def test_a_chain_goes_tail_first():
    lru = LeafLru()
    chain(lru, b"a", b"b", b"c")
    assert drained(lru) == [b"c", b"b", b"a"]


def test_the_oldest_leaf_goes_first():
    lru = LeafLru()
    chain(lru, b"a")
    chain(lru, b"b")
    chain(lru, b"c")
    lru.use(b"a")
    assert drained(lru) == [b"b", b"c", b"a"]


def test_a_shared_prefix_outlives_all_that_builds_on_it():
    lru = LeafLru()
    chain(lru, b"system", b"one")
    lru.add(b"two", b"system")
    chain(lru, b"other")
    assert drained(lru) == [b"one", b"two", b"system", b"other"]


def test_what_is_held_stays_and_so_does_what_it_builds_on():
    lru = LeafLru()
    chain(lru, b"a", b"b")
    lru.hold(b"b")
    lru.hold(b"b")
    assert lru.pop() is None
    lru.let_go(b"b")
    assert lru.pop() is None
    lru.let_go(b"b")
    assert drained(lru) == [b"b", b"a"]


def test_a_removed_block_frees_its_parent_and_may_come_back_under_its_children():
    lru = LeafLru()
    chain(lru, b"a", b"b", b"c")
    lru.remove(b"b")
    assert lru.pop() == b"a", "its child is gone"
    lru.add(b"b", b"a")
    assert drained(lru) == [b"c", b"b"], "c was there all the time"


def test_touching_one_block_for_ever_takes_no_memory():
    lru = LeafLru()
    chain(lru, b"a", b"b")
    for _ in range(10_000):
        lru.use(b"b")
    assert len(lru._heap) < 200
    assert drained(lru) == [b"b", b"a"]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3)), max_size=120))
def test_random_histories_evict_the_oldest_candidate(history: list[tuple[int, int]]):
    lru, clock = LeafLru(), 0
    used: dict[bytes, int] = {}
    parents: dict[bytes, bytes] = {}
    held: set[bytes] = set()
    for number, action in history:
        block_hash, parent = b"%d" % number, b"%d" % (number // 2) if number > 1 else b""
        if action == 0 and block_hash not in used:
            lru.add(block_hash, parent)
            clock += 1
            used[block_hash], parents[block_hash] = clock, parent
        elif action == 1 and block_hash in used:
            lru.use(block_hash)
            clock += 1
            used[block_hash] = clock
        elif action == 2 and block_hash in used:
            (lru.let_go if block_hash in held else lru.hold)(block_hash)
            held ^= {block_hash}
        elif action == 3:
            candidates = [known for known in used if known not in held and known not in parents.values()]
            expected = min(candidates, key=used.__getitem__, default=None)
            assert lru.pop() == expected
            if expected is not None:
                del used[expected], parents[expected]
    assert len(lru) == len(used)
