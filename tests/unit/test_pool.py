"""The block pool keeps `free + owned + leased + cached == total`, and its generations give every reuse away."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.cache.pool import ArrivedBlock, BlockPool
from common.protocol.errors import OutOfBlocks
from common.protocol.messages import KvUsage


def test_a_fresh_pool_is_free():
    pool = BlockPool(4, 16)
    assert pool.usage() == KvUsage(total=4, free=4)
    assert pool.available == 4


def test_allocate_takes_all_or_nothing():
    pool = BlockPool(4, 16)
    pool.allocate(3)
    with pytest.raises(OutOfBlocks) as caught:
        pool.allocate(2)
    assert (caught.value.needed, caught.value.free) == (2, 1)
    assert pool.usage() == KvUsage(total=4, free=1, owned=3)


def test_every_allocation_bumps_the_generation_where_readers_look():
    shared = np.zeros(2, np.uint64)
    pool = BlockPool(2, 16, shared)
    blocks = pool.allocate(2)
    assert pool.generations_of(blocks) == [1, 1] == shared[blocks].tolist()
    pool.release(blocks)
    assert shared.tolist() == [1, 1], "giving back changes nothing: late readers still see the right bytes"
    pool.allocate(1)
    assert sorted(shared.tolist()) == [1, 2]


def test_the_block_given_back_last_is_reused_first():
    pool = BlockPool(100, 16)
    first = pool.allocate(3)
    pool.release(first)
    assert pool.allocate(3) == first, "no new page of the segment is touched"


def test_a_published_block_is_found_after_its_owner_went():
    pool = BlockPool(4, 16)
    (block,) = pool.allocate(1)
    pool.publish(block, b"a")
    pool.release([block])
    assert pool.usage() == KvUsage(total=4, free=3, cached=1)
    assert pool.match([b"a", b"b"]) == [block]
    pool.retain([block])
    assert pool.usage() == KvUsage(total=4, free=3, owned=1)


def test_match_stops_at_the_first_hole():
    pool = BlockPool(4, 16)
    blocks = pool.allocate(2)
    pool.publish(blocks[0], b"a")
    pool.publish(blocks[1], b"c")
    assert pool.match([b"a", b"b", b"c"]) == [blocks[0]]
    assert pool.match([b"x"]) == []


def test_the_first_of_two_equal_blocks_is_the_one_found():
    pool = BlockPool(4, 16)
    first, second = pool.allocate(2)
    pool.publish(first, b"a")
    pool.publish(second, b"a")
    assert pool.match([b"a"]) == [first]
    pool.release([second])
    assert pool.usage() == KvUsage(total=4, free=3, owned=1), "the second one was never cached"


def test_cached_blocks_are_evicted_oldest_first_and_a_chain_from_its_tail():
    pool = BlockPool(4, 16)
    chain = pool.allocate(3)
    for block, block_hash in zip(chain, (b"a", b"b", b"c"), strict=True):
        pool.publish(block, block_hash)
    pool.release(chain)
    assert pool.available == 4
    pool.allocate(2)
    assert pool.match([b"a", b"b", b"c"]) == chain[:2]
    pool.allocate(1)
    assert pool.match([b"a", b"b", b"c"]) == chain[:1]


def test_use_makes_a_cached_block_young_again():
    pool = BlockPool(2, 16)
    old, young = pool.allocate(2)
    pool.publish(old, b"old")
    pool.publish(young, b"young")
    pool.release([old])
    pool.release([young])
    pool.retain(pool.match([b"old"]))
    pool.release([old])
    pool.allocate(1)
    assert pool.match([b"old"]) == [old]
    assert pool.match([b"young"]) == []


def test_a_leased_block_keeps_its_content_after_its_owner_went():
    pool = BlockPool(1, 16)
    blocks = pool.allocate(1)
    pool.lease(blocks)
    assert pool.usage() == KvUsage(total=1, owned=1), "owned as long as there is an owner"
    pool.release(blocks)
    assert pool.usage() == KvUsage(total=1, leased=1)
    with pytest.raises(OutOfBlocks):
        pool.allocate(1)
    pool.end_lease(blocks)
    assert pool.usage() == KvUsage(total=1, free=1)


def test_a_cached_block_can_be_leased_and_is_cached_again():
    pool = BlockPool(1, 16)
    blocks = pool.allocate(1)
    pool.publish(blocks[0], b"a")
    pool.release(blocks)
    pool.lease(blocks)
    pool.lease(blocks)
    pool.end_lease(blocks)
    assert pool.usage() == KvUsage(total=1, leased=1)
    pool.end_lease(blocks)
    assert pool.usage() == KvUsage(total=1, cached=1)


def test_a_block_that_was_set_aside_can_be_taken_back_until_others_need_it():
    pool = BlockPool(4, 16)
    aside = pool.allocate(2)
    generations = pool.generations_of(aside)
    pool.set_aside(aside)
    assert pool.usage() == KvUsage(total=4, free=2, cached=2) and pool.available == 4 and pool.num_aside == 2
    assert pool.take_back(aside[1], generations[1])
    assert pool.usage() == KvUsage(total=4, free=2, owned=1, cached=1)
    assert not pool.take_back(aside[1], generations[1]), "it is owned already"
    pool.set_aside([aside[1]])
    taken = pool.allocate(4)
    assert sorted(taken) == [0, 1, 2, 3] and pool.num_aside == 0
    pool.set_aside(taken)
    assert not any(map(pool.take_back, aside, generations)), "it holds another one's content now"
    pool.check()


def test_of_blocks_that_arrived_those_are_taken_back_that_are_still_there_and_asked_for():
    pool = BlockPool(8, 16)
    blocks = pool.allocate(6)
    arrived = {
        3 + i: ArrivedBlock(block, generation, is_owned=i == 2)
        for i, (block, generation) in enumerate(zip(blocks, pool.generations_of(blocks), strict=True))
    }
    pool.set_aside([block for block in blocks if block != blocks[2]])
    pool.allocate(3)  # two were free; the third is the one that was set aside first
    assert pool.take_back_all(arrived, 3, 8) == {4: blocks[1], 5: blocks[2], 6: blocks[3], 7: blocks[4]}
    assert pool.num_aside == 1 and pool.usage().owned == 7
    pool.check()


def test_blocks_that_can_be_found_are_evicted_before_those_that_were_set_aside():
    pool = BlockPool(3, 16)
    (found, aside, free) = pool.allocate(3)
    (generation,) = pool.generations_of([aside])
    pool.set_aside([aside])
    pool.publish(found, b"a")
    pool.release([found, free])
    held = pool.allocate(2)
    assert sorted(held) == sorted([found, free]) and pool.match([b"a"]) == []
    assert pool.take_back(aside, generation)


def test_drop_cached_keeps_what_somebody_holds():
    pool = BlockPool(3, 16)
    blocks = pool.allocate(2)
    for block in blocks:
        pool.publish(block, bytes([block]))
    pool.release(blocks[:1])
    pool.drop_cached()
    assert pool.usage() == KvUsage(total=3, free=2, owned=1)
    assert pool.match([bytes([blocks[0]])]) == []
    pool.check()


@pytest.mark.parametrize("mistake", ["release", "end_lease", "retain", "lease", "publish"])
def test_a_wrong_call_is_a_bug_and_says_so(mistake: str):
    pool = BlockPool(2, 16)
    pool.release(pool.allocate(1))
    with pytest.raises(AssertionError, match="block 0"):
        pool.publish(0, b"a") if mistake == "publish" else getattr(pool, mistake)([0])


def test_one_block_can_not_have_two_contents():
    pool = BlockPool(1, 16)
    (block,) = pool.allocate(1)
    pool.publish(block, b"a")
    pool.publish(block, b"a")
    with pytest.raises(AssertionError, match="two contents"):
        pool.publish(block, b"b")


class Handle:
    """What a reader noted down: blocks, their generations, and what it would have read then."""

    def __init__(self, blocks: list[int], generations: list[int], content: list[int]) -> None:
        self.blocks, self.generations, self.content = blocks, generations, content


class PoolMachine(RuleBasedStateMachine):
    """Random histories of a pool beside a naive model: plain reference counts, and the bytes each block holds."""

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.total = num_blocks
        self.shared = np.zeros(num_blocks, np.uint64)
        self.pool = BlockPool(num_blocks, 16, self.shared)
        self.owned: list[list[int]] = []
        self.aside: list[tuple[list[int], list[int], list[int]]] = []
        self.leased: list[list[int]] = []
        self.handles: list[Handle] = []
        self.content = [0] * num_blocks
        self.hash_content: dict[bytes, int] = {}
        self.writes = 0

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int) -> None:
        held = {block for group in self.owned + self.leased for block in group}
        if count > self.total - len(held):
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert not held & set(blocks), "handed out a block somebody holds"
        for block in blocks:
            self.writes += 1
            self.content[block] = self.writes
        self.owned.append(blocks)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1))))

    @precondition(lambda self: self.owned)
    @rule(data=st.data(), shared=st.booleans())
    def hold_again(self, data: st.DataObject, shared: bool) -> None:
        blocks = list(data.draw(st.sampled_from(self.owned)))
        if shared:
            self.pool.retain(blocks)
            self.owned.append(blocks)
        else:
            self.pool.lease(blocks)
            self.leased.append(blocks)
            self.handles.append(Handle(blocks, self.pool.generations_of(blocks), [self.content[b] for b in blocks]))

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def end_lease(self, data: st.DataObject) -> None:
        self.pool.end_lease(self.leased.pop(data.draw(st.integers(0, len(self.leased) - 1))))

    @precondition(lambda self: any(self.owned))
    @rule(data=st.data(), name=st.integers(0, 5))
    def publish(self, data: st.DataObject, name: int) -> None:
        block = data.draw(st.sampled_from([block for group in self.owned for block in group]))
        block_hash = b"%d-%d" % (name, self.content[block]) if name else b"same"
        already = self.pool.match([block_hash])
        try:
            self.pool.publish(block, block_hash)
        except AssertionError as error:
            assert "two contents" in str(error)
            return
        if not already and self.pool.match([block_hash]) == [block]:
            self.hash_content[block_hash] = self.content[block]

    @rule(data=st.data(), lease=st.booleans())
    def find(self, data: st.DataObject, lease: bool) -> None:
        if not self.hash_content:
            return
        block_hash = data.draw(st.sampled_from(sorted(self.hash_content)))
        blocks = self.pool.match([block_hash])
        if not blocks:
            return
        assert self.content[blocks[0]] == self.hash_content[block_hash], "a hash led to other content"
        if lease:
            self.pool.lease(blocks)
            self.leased.append(blocks)
        else:
            self.pool.retain(blocks)
            self.owned.append(blocks)

    @rule(data=st.data())
    def set_aside(self, data: st.DataObject) -> None:
        if not self.owned:
            return
        group = data.draw(st.sampled_from(self.owned))
        held = [block for other in self.owned for block in other] + [block for other in self.leased for block in other]
        if any(held.count(block) > 1 for block in group) or any(self.pool.match([h]) for h in self.hashes_of(group)):
            return
        self.owned.remove(group)
        self.aside.append((group, self.pool.generations_of(group), [self.content[block] for block in group]))
        self.pool.set_aside(group)

    def hashes_of(self, group: list[int]) -> list[bytes]:
        return [block_hash for block_hash in self.hash_content if set(self.pool.match([block_hash])) & set(group)]

    @rule(data=st.data())
    def take_back(self, data: st.DataObject) -> None:
        if not self.aside:
            return
        blocks, generations, content = self.aside.pop(data.draw(st.integers(0, len(self.aside) - 1)))
        back = [i for i in range(len(blocks)) if self.pool.take_back(blocks[i], generations[i])]
        assert [self.content[blocks[i]] for i in back] == [content[i] for i in back], "others have written to it"
        if back:
            self.owned.append([blocks[i] for i in back])

    @rule()
    def drop_cached(self) -> None:
        self.pool.drop_cached()

    @invariant()
    def counts_add_up(self) -> None:
        usage = self.pool.usage()
        assert usage.free + usage.owned + usage.leased + usage.cached == usage.total == self.total
        owned = {block for group in self.owned for block in group}
        leased = {block for group in self.leased for block in group} - owned
        assert (usage.owned, usage.leased) == (len(owned), len(leased))
        assert self.pool.available == usage.free + usage.cached
        self.pool.check()

    @invariant()
    def generations_give_every_reuse_away(self) -> None:
        for handle in self.handles:
            if self.shared[handle.blocks].tolist() == handle.generations:
                assert [self.content[block] for block in handle.blocks] == handle.content


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
test_random_histories_keep_the_invariant = PoolMachine.TestCase
