"""A hash leads to a slot only between the writer's commit and its eviction, and slots never leak."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.protocol.messages import KvUsage
from services.kvstore.index import BlockIndex

CHAIN = [b"a", b"b", b"c"]


def store(index: BlockIndex, hashes: list[bytes]) -> list[int]:
    """Write and commit; the checksum of a hash is its first byte."""
    granted = index.reserve(hashes)
    index.commit([slot for _, slot in granted], [hashes[i][0] for i, _ in granted])
    return [slot for _, slot in granted]


def test_what_is_committed_is_found_with_its_checksums():
    index = BlockIndex(4)
    slots = store(index, CHAIN)
    assert index.lookup([*CHAIN, b"d"]) == slots
    assert index.checksums_of(slots) == [97, 98, 99]
    assert index.usage() == KvUsage(total=4, free=1, cached=3)


def test_a_billion_slots_cost_nothing_before_they_are_used():
    index = BlockIndex(1 << 40)
    assert store(index, CHAIN) == [0, 1, 2]
    assert index.usage().free == (1 << 40) - 3
    index.check()


@pytest.mark.parametrize(
    ("stored", "found"),
    [
        ("abcdef", (4, 6)),
        ("def", (4, 6)),
        ("cd", (2, 4)),
        ("ab", (0, 2)),
        ("a", (0, 1)),
        ("cef", (4, 6)),
        ("ce", (0, 0)),
        ("", (0, 0)),
    ],
)
def test_a_window_goes_on_from_the_longest_part_of_which_its_last_blocks_are_there(stored: str, found: tuple[int, int]):
    index, chain = BlockIndex(6), [bytes([letter]) for letter in b"abcdef"]
    for letter in stored:
        store(index, [letter.encode()])
    first, slots = index.lookup_tail(chain, [0, 0, 1, 2, 3, 4])
    assert (first, first + len(slots)) == found
    assert index.checksums_of(slots) == [block[0] for block in chain[found[0] : found[1]]]


def test_a_chunk_that_begins_behind_a_part_reads_nothing_of_it():
    assert BlockIndex(6).lookup_tail([b"a", b"b", b"c", b"d"], [0, 2, 2, 2]) == (2, [])


def test_what_is_being_written_is_neither_found_nor_granted_twice():
    index = BlockIndex(4)
    granted = index.reserve(CHAIN)
    assert [i for i, _ in granted] == [0, 1, 2]
    assert index.lookup(CHAIN) == []
    assert index.reserve([*CHAIN, b"d"]) == [(3, 3)], "only what nobody writes yet"
    assert index.usage() == KvUsage(total=4, owned=4)


def test_a_writer_that_never_commits_leaves_nothing():
    index = BlockIndex(4)
    index.abandon([slot for _, slot in index.reserve(CHAIN)])
    assert index.lookup(CHAIN) == []
    assert index.usage() == KvUsage(total=4, free=4)
    index.check()


def test_a_lookup_stops_at_a_block_that_is_not_readable_yet():
    index = BlockIndex(4)
    store(index, [b"a"])
    index.reserve([b"a", b"b"])
    assert len(index.lookup(CHAIN)) == 1


def test_a_leased_block_is_not_evicted_and_neither_is_what_it_builds_on():
    index = BlockIndex(3)
    slots = store(index, CHAIN)
    index.lease(slots[:2])
    assert index.usage() == KvUsage(total=3, leased=2, cached=1)
    assert index.reserve([b"x", b"y"]) == [(0, slots[2])], "only the tail could be had"
    index.end_lease(slots[:2])
    assert index.lookup(CHAIN) == slots[:2]
    assert index.evicted == 1


def test_a_chain_never_evicts_itself():
    index = BlockIndex(2)
    slots = store(index, [b"a", b"b"])
    assert index.reserve([b"a", b"b", b"c", b"d"]) == []
    assert index.lookup([b"a", b"b"]) == slots


def test_the_least_recently_found_chain_is_evicted():
    index = BlockIndex(4)
    store(index, [b"a", b"b"])
    store(index, [b"x", b"y"])
    index.lookup([b"a", b"b"])
    index.reserve([b"1", b"2"])
    assert index.lookup([b"x"]) == []
    assert len(index.lookup([b"a", b"b"])) == 2


def test_a_damaged_block_is_forgotten_at_once_and_free_when_its_readers_are_done():
    index = BlockIndex(3)
    slots = store(index, CHAIN)
    index.lease(slots)
    index.lease(slots)
    assert index.forget(slots, {b"b", b"unknown"}) == 1
    assert index.forget(slots, {b"b"}) == 0
    index.end_lease(slots)
    assert index.lookup(CHAIN) == slots[:1]
    assert index.reserve([b"x"]) == [], "its slot is still being read"
    index.end_lease(slots)
    index.check()
    assert index.reserve(CHAIN) == [(1, slots[1])]


def test_wrong_calls_are_bugs_and_say_so():
    index = BlockIndex(2)
    ((_, slot),) = index.reserve([b"a"])
    with pytest.raises(AssertionError, match="before it was committed"):
        index.lease([slot])
    index.commit([slot], [1])
    with pytest.raises(AssertionError, match="committed twice"):
        index.commit([slot], [1])
    with pytest.raises(AssertionError, match="more often"):
        index.end_lease([slot])


class IndexMachine(RuleBasedStateMachine):
    """Random histories of readers and writers. Chains are paths in a binary tree, so that they share prefixes."""

    @initialize(num_slots=st.integers(1, 10))
    def start(self, num_slots: int) -> None:
        self.index = BlockIndex(num_slots)
        self.writes: list[list[tuple[bytes, int]]] = []
        self.reads: list[list[int]] = []
        self.content: dict[int, bytes] = {}

    @rule(leaf=st.integers(1, 31))
    def offer(self, leaf: int) -> None:
        hashes = path(leaf)
        granted = [(hashes[i], slot) for i, slot in self.index.reserve(hashes)]
        for _, slot in granted:
            assert slot not in {held for group in self.reads for held in group}, "granted a slot that is being read"
            self.content[slot] = b""
        if granted:
            self.writes.append(granted)

    @precondition(lambda self: self.writes)
    @rule(data=st.data(), commit=st.booleans())
    def finish(self, data: st.DataObject, commit: bool) -> None:
        granted = self.writes.pop(data.draw(st.integers(0, len(self.writes) - 1)))
        slots = [slot for _, slot in granted]
        if not commit:
            self.index.abandon(slots)
            return
        self.content.update((slot, block_hash) for block_hash, slot in granted)
        self.index.commit(slots, [int(block_hash) for block_hash, _ in granted])

    @rule(leaf=st.integers(1, 31))
    def look_up(self, leaf: int) -> None:
        hashes = path(leaf)
        slots = self.index.lookup(hashes)
        assert [self.content[slot] for slot in slots] == hashes[: len(slots)], "a hash led to other content"
        assert self.index.checksums_of(slots) == [int(block_hash) for block_hash in hashes[: len(slots)]]
        self.index.lease(slots)
        if slots:
            self.reads.append(slots)

    @precondition(lambda self: self.reads)
    @rule(data=st.data(), damaged=st.booleans())
    def read(self, data: st.DataObject, damaged: bool) -> None:
        slots = self.reads.pop(data.draw(st.integers(0, len(self.reads) - 1)))
        if damaged:
            self.index.forget(slots, {self.content[slots[-1]]})
        self.index.end_lease(slots)

    @invariant()
    def counts_add_up(self) -> None:
        usage = self.index.usage()
        assert usage.free + usage.owned + usage.leased + usage.cached == usage.total
        assert usage.owned == sum(len(granted) for granted in self.writes)
        assert usage.leased == len({slot for slots in self.reads for slot in slots})
        self.index.check()


def path(leaf: int) -> list[bytes]:
    """The hashes from the root of the tree to `leaf`."""
    return [b"%d" % (leaf >> shift) for shift in range(leaf.bit_length() - 1, -1, -1)]


IndexMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_random_histories_keep_the_invariant = IndexMachine.TestCase
