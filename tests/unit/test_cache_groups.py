"""A cache of several groups: each lets go of what its layers read no more; a prefix counts where every group can go on."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.cache.grouped_pool import HOLE, GroupedPool, PoolGroup
from common.cache.pool import BlockPool
from common.cache.retention import KEEP_ALL, Retention
from common.engine.sequence import Sequence
from common.protocol.errors import OutOfBlocks
from services.decode.scheduler import DecodeScheduler
from services.prefill.scheduler import PrefillScheduler
from tests.unit.scheduling import BLOCK_TOKENS, MAX_CONTEXT, Bench, Pipeline, sequence

WINDOW = Retention(window=6)
CHUNK = Retention(chunk=8)
PROMPT = list(range(10, 70))


def held(table: list[int]) -> list[int]:
    """The indices of a block table that have a block."""
    return [index for index, block in enumerate(table) if block != HOLE]


def filled(pool: BlockPool, hashes: list[bytes]) -> list[int]:
    blocks = pool.allocate(len(hashes))
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.publish(block, block_hash)
    pool.release(blocks)
    return blocks


@given(position=st.integers(0, 300), window=st.integers(0, 40), chunk=st.integers(0, 40))
def test_nothing_before_the_first_token_is_read_later(position: int, window: int, chunk: int) -> None:
    retention = Retention(window, chunk)
    first = retention.first_token(position)
    assert 0 <= first <= position
    assert first <= retention.first_token(position + 1) <= first + max(1, chunk)
    sees = [
        key
        for key in range(position + 1)
        if (not window or key > position - window) and (not chunk or key // chunk == position // chunk)
    ]
    assert sees[0] == first


@given(
    num_tokens=st.integers(1, 300),
    window=st.integers(0, 40),
    chunk=st.integers(0, 40),
    block_tokens=st.sampled_from([1, 4, 16]),
)
def test_a_sequence_that_goes_on_by_a_block_needs_no_more_than_it_reserves(
    num_tokens: int, window: int, chunk: int, block_tokens: int
) -> None:
    retention = Retention(window, chunk)
    most = max(
        -(-min(num_tokens, start + block_tokens - start % block_tokens) // block_tokens)
        - retention.first_token(start) // block_tokens
        for start in range(num_tokens)
    )
    assert most <= retention.blocks_for(num_tokens, block_tokens)


def test_a_prefix_counts_only_where_every_group_has_what_the_next_token_reads() -> None:
    chain = [bytes([i]) for i in range(8)]
    full, window = BlockPool(16, 4), BlockPool(16, 4)
    pool = GroupedPool(PoolGroup(full), PoolGroup(window, WINDOW))
    whole = filled(full, chain)
    assert pool.match(chain) == [[], []], "the window group has nothing"
    tail = filled(window, chain[3:5])
    assert pool.match(chain) == [whole[:5], [HOLE, HOLE, HOLE, *tail]]
    assert pool.match(chain[:4]) == [[], []], "behind four blocks, tokens from 11 on are read: block 2 is not there"
    filled(window, chain[6:8])
    assert len(pool.match(chain)[0]) == 8
    full.drop_cached()
    assert pool.match(chain) == [[], []]


def test_behind_a_chunk_nothing_of_it_is_needed() -> None:
    chain = [bytes([i]) for i in range(8)]
    full, chunk = BlockPool(16, 4), BlockPool(16, 4)
    pool = GroupedPool(PoolGroup(full), PoolGroup(chunk, CHUNK))
    filled(full, chain[:7])
    found = pool.match(chain)
    assert len(found[0]) == 6, "the sixth block ends a chunk, the seventh begins one that is not there"
    assert found[1] == [HOLE] * 6


@given(data=st.data(), num_own=st.integers(0, 4))
@settings(max_examples=200, deadline=None)
def test_a_match_is_the_longest_part_that_can_be_gone_on_from(data: st.DataObject, num_own: int) -> None:
    chain = [bytes([i]) for i in range(12)]
    retentions = data.draw(st.lists(st.sampled_from([KEEP_ALL, WINDOW, CHUNK, Retention(window=1)]), min_size=1, max_size=3))
    pools = [BlockPool(32, 4) for _ in retentions]
    pool = GroupedPool(*map(PoolGroup, pools, retentions))
    present = [data.draw(st.sets(st.integers(0, 11))) for _ in retentions]
    for one, indices in zip(pools, present, strict=True):
        filled(one, [chain[i] for i in sorted(indices)])
    own = [[100 + i if r.first_token(num_own * 4) // 4 <= i else HOLE for i in range(num_own)] for r in retentions]

    def has(indices: set[int], mine: list[int], i: int) -> bool:
        return mine[i] != HOLE if i < num_own else i in indices

    def usable(blocks: int) -> bool:
        return all(
            has(indices, mine, i)
            for indices, mine, retention in zip(present, own, retentions, strict=True)
            for i in range(retention.first_token(blocks * 4) // 4, blocks)
        )

    longest = max((blocks for blocks in range(num_own + 1, 13) if usable(blocks)), default=0)
    tables = pool.match(chain, own, num_own)
    for table, retention, mine, one in zip(tables, retentions, own, pools, strict=True):
        first = retention.first_token(longest * 4) // 4
        expected = [mine[i] if i < num_own else one.find(chain[i]) for i in range(longest)]
        assert table == [expected[i] if i >= first else HOLE for i in range(longest)]


def test_the_counts_of_each_group_are_told() -> None:
    pool = GroupedPool(PoolGroup(BlockPool(8, 4)), PoolGroup(BlockPool(4, 4), WINDOW))
    tables = pool.allocate([3, 1])
    with pytest.raises(OutOfBlocks):
        pool.allocate([1, 4])
    usage = pool.usage()
    assert (usage.total, usage.free, usage.owned) == (12, 8, 4)
    assert [(group.total, group.owned) for group in usage.groups] == [(8, 3), (4, 1)]
    pool.lease([tables[0], [HOLE, *tables[1]]])
    pool.release(tables)
    assert [group.leased for group in pool.usage().groups] == [3, 1]
    pool.end_lease(tables)
    pool.check()
    assert pool.usage().free == 12


@pytest.mark.parametrize("depth", [1, 2])
def test_a_window_keeps_only_what_the_next_token_reads(depth: int) -> None:
    bench = Bench(64, windows=((WINDOW, 12),))
    scheduler = PrefillScheduler(bench.cache, token_budget=8, max_running=4, max_context=MAX_CONTEXT)
    s = sequence("a", PROMPT)
    scheduler.admit(s, 0.0)
    assert len(s.blocks) == 15 and not s.more_blocks[0], "a window's blocks come with the steps"
    pipeline = Pipeline(bench, scheduler, depth=depth)
    while not s.num_outputs:
        pipeline.step()
        first = WINDOW.first_token(s.num_computed // 4 * 4) // BLOCK_TOKENS
        assert held(s.more_blocks[0])[0] == first
        assert len(held(s.more_blocks[0])) <= 2 + 2 * depth
    assert held(s.more_blocks[0]) == [13, 14]
    assert s.tokens[len(PROMPT) :] == bench.expected(s)
    bench.cache.close(s)
    assert bench.all_given_back()


def test_the_same_prompt_again_is_found_behind_its_window() -> None:
    bench = Bench(64, windows=((WINDOW, 20), (CHUNK, 20)))
    scheduler = PrefillScheduler(bench.cache, token_budget=64, max_running=4, max_context=MAX_CONTEXT)
    for request, cached in (("a", 0), ("b", 56)):
        s = sequence(request, PROMPT)
        scheduler.admit(s, 0.0)
        assert s.num_cached == cached
        Pipeline(bench, scheduler).run()
        assert s.tokens[len(PROMPT) :] == bench.expected(s)
        bench.cache.close(s)
    bench.pool.groups[1].pool.drop_cached()
    c = sequence("c", PROMPT)
    scheduler.admit(c, 0.0)
    assert c.num_cached == 0, "without the window's blocks there is no prefix, whatever the other groups have"
    scheduler.cancel(c)
    assert bench.all_given_back()


def test_a_window_group_promises_no_more_than_it_has() -> None:
    bench = Bench(64, windows=((WINDOW, 9),))
    scheduler = PrefillScheduler(bench.cache, token_budget=64, max_running=8, max_context=MAX_CONTEXT)
    both = [sequence(name, [index, *PROMPT]) for index, name in enumerate("ab")]
    for s in both:
        scheduler.admit(s, 0.0)
    with pytest.raises(OutOfBlocks):
        scheduler.admit(sequence("c", PROMPT), 0.0)
    done = Pipeline(bench, scheduler).run()
    assert len(done) == 2, "in parts as large as the blocks allow, but to the end"
    for s in both:
        assert s.tokens[len(PROMPT) + 1 :] == bench.expected(s)
        bench.cache.close(s)
    assert bench.all_given_back()


def test_a_failed_step_finds_its_windows_as_they_were() -> None:
    bench = Bench(64, windows=((WINDOW, 16),))
    scheduler = PrefillScheduler(bench.cache, token_budget=8, max_running=8, max_context=MAX_CONTEXT)
    s = sequence("a", PROMPT)
    scheduler.admit(s, 0.0)
    pipeline = Pipeline(bench, scheduler, depth=2)
    for _ in range(4):
        pipeline.step()
        pipeline.fill()
        pipeline.flights.clear()
        assert scheduler.rewind() == [s]
    pipeline.run()
    assert s.tokens[len(PROMPT) :] == bench.expected(s)
    bench.cache.close(s)
    assert bench.all_given_back()


@pytest.mark.parametrize("copied", [0, 60])
def test_a_copy_fills_a_windows_tail_and_what_fails_is_computed(copied: int) -> None:
    """As a hand-off does it: the tail of the window arrives; or nothing does, and the prompt is computed from its start."""
    source, bench = Bench(64, windows=((WINDOW, 16),)), Bench(64, windows=((WINDOW, 16),))
    prefill = PrefillScheduler(source.cache, token_budget=16, max_running=8, max_context=MAX_CONTEXT)
    theirs = sequence("a", PROMPT)
    prefill.admit(theirs, 0.0)
    Pipeline(source, prefill).run()
    decode = DecodeScheduler(bench.cache, token_budget=16, max_running=4, max_context=MAX_CONTEXT, recompute=lambda one: 30)
    mine = sequence("a", [*PROMPT, *theirs.tokens[len(PROMPT) :]], max_tokens=20)
    decode.admit(mine)
    decode.begin_copy(mine)
    bench.cache.reach(mine, 60)
    assert held(mine.more_blocks[0]) == [13, 14]
    for ours, other, into, out in zip(mine.tables, theirs.tables, bench.storage, source.storage, strict=True):
        for index in held(other):
            into[ours[index]] = out[other[index]]
    decode.end_copy(mine, copied)
    assert mine.num_computed == copied, "nothing again: what those tokens read in the window was not copied"
    Pipeline(bench, decode).run()
    assert mine.num_outputs == 20
    assert mine.tokens[60:81] == bench.runner.expected_tokens(PROMPT, mine.sampling, 21)
    source.cache.close(theirs)
    assert bench.all_given_back() and source.all_given_back()


@given(
    seed=st.integers(0, 10_000), window=st.sampled_from([WINDOW, CHUNK, Retention(window=40)]), num_blocks=st.integers(14, 30)
)
@settings(max_examples=40, deadline=None)
def test_random_worlds_give_right_tokens_and_everything_back(seed: int, window: Retention, num_blocks: int) -> None:
    dice = random.Random(seed)
    bench = Bench(dice.choice([40, 90]), windows=((window, num_blocks),))
    decode = dice.random() < 0.5
    scheduler: DecodeScheduler | PrefillScheduler
    if decode:
        scheduler = DecodeScheduler(
            bench.cache,
            token_budget=12,
            max_running=5,
            max_context=MAX_CONTEXT,
            propose=lambda s, limit: [dice.randrange(3, 900) for _ in range(min(limit, dice.randrange(3)))],
        )
    else:
        scheduler = PrefillScheduler(bench.cache, token_budget=12, max_running=5, max_context=MAX_CONTEXT)
    pipeline = Pipeline[Any](bench, cast(Any, scheduler), depth=dice.choice([1, 2]))
    every: list[Sequence] = []

    def finished() -> None:
        for s in every:
            assert s.tokens[s.generation.prompt_tokens :] == bench.expected(s)
            if not decode and s.num_outputs:
                bench.cache.close(s)

    for number in range(14):
        head, length = dice.randrange(3), dice.randrange(2, 60)
        s = sequence(f"r{number}", [head * 300 + 5 + i for i in range(length)], max_tokens=dice.randrange(1, 30))
        try:
            scheduler.admit(s) if isinstance(scheduler, DecodeScheduler) else scheduler.admit(s, 0.0)
            every.append(s)
        except Exception as error:
            assert getattr(error, "code", "") in ("out_of_blocks", "out_of_credits"), error
        for _ in range(dice.randrange(5)):
            pipeline.step()
            bench.cache.check()
        finished()
        if every and dice.random() < 0.2:
            scheduler.cancel(gone := dice.choice(every))
            gone.cancelled = True
    pipeline.run()
    finished()
    assert all(s.num_outputs for s in every if not s.cancelled)
    assert bench.all_given_back()
