"""A pool whose blocks are wiped: as soon as nobody holds one, not before, and so that no reader takes it for KV."""

from __future__ import annotations

import pytest

from common.cache.pool import BlockPool
from common.cli.fleet import settled
from common.cli.up_config import UpConfig


def test_a_block_is_wiped_when_its_last_holder_lets_go() -> None:
    wiped: list[int] = []
    pool = BlockPool(8, 4, wipe=wiped.append)
    blocks = pool.allocate(3)
    pool.publish(blocks[0], b"hash")
    assert not pool.match([b"hash"])
    pool.retain(blocks[:1])
    pool.lease(blocks[:2])
    pool.release(blocks)
    assert wiped == [blocks[2]]
    generations = pool.generations_of(blocks)
    pool.end_lease(blocks[:2])
    assert wiped == [blocks[2], blocks[1]]  # the first one has an owner yet
    assert pool.generations_of(blocks)[1] == generations[1] + 1
    pool.release(blocks[:1])
    assert sorted(wiped) == sorted(blocks) and pool.usage().free == 8 and pool.usage().cached == 0
    pool.check()


def test_a_block_that_was_set_aside_is_wiped_when_others_need_it() -> None:
    wiped: list[int] = []
    pool = BlockPool(2, 4, wipe=wiped.append)
    blocks = pool.allocate(2)
    generations = pool.generations_of(blocks)
    pool.set_aside(blocks)
    assert not wiped
    assert pool.take_back(blocks[1], generations[1])
    pool.allocate(1)
    assert wiped == [blocks[0]]
    pool.release([blocks[1]])
    assert wiped == blocks
    pool.check()


def test_the_generation_is_raised_before_the_block_is_wiped() -> None:
    shared = [0] * 4
    seen: list[int] = []
    pool = BlockPool(4, 4, shared, wipe=lambda block: seen.append(shared[block]))
    block = pool.allocate(1)[0]
    while_held = shared[block]
    pool.release([block])
    assert seen == [while_held + 1]


@pytest.mark.parametrize(("zero_retention", "stores"), [(False, 1), (True, 0)])
def test_up_starts_no_kvstore_where_nothing_may_be_kept(zero_retention: bool, stores: int) -> None:
    assert settled(UpConfig(zero_retention=zero_retention), 0, 4).kvstore == stores
