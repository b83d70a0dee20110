"""What a worker's pools hold is what a gateway's index finds, through messages that may be lost, repeated or late."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.cache.contents import PoolContents
from common.cache.grouped_pool import GroupedPool, PoolGroup
from common.cache.pool import BlockPool
from common.cache.prefix import hash_chain
from common.cache.retention import KEEP_ALL, Retention
from common.engine.sequence import Sequence
from common.engine.sequence_cache import SequenceCache
from common.protocol.errors import OutOfBlocks
from common.protocol.handles import WorkerRef
from common.protocol.kv_events import KvEvents, KvLayout
from common.protocol.messages import Generation, SamplingParams
from common.protocol.tokens import pack as pack_tokens
from services.gateway.worker_blocks import unpack
from tests.unit.kv_told import hashes, held, index, pack, ref, snapshot, tokens, told

CHAIN = hashes(tokens(16 * 8 + 1))


class Told:
    """A worker's pools, and an index that hears of them through messages that may be lost, repeated or late."""

    def __init__(self, *groups: tuple[Retention, int], max_pending: int = 1000) -> None:
        pools = [PoolGroup(BlockPool(num_blocks, 4), kept) for kept, num_blocks in groups]
        self.pool = GroupedPool(*pools)
        self.contents: list[PoolContents] = []
        for group in pools:
            group.pool.contents = PoolContents(group.pool.num_blocks, max_pending=max_pending)
            self.contents.append(group.pool.contents)
        self.cache = SequenceCache(self.pool, fingerprint="f")
        self.layout = KvLayout("f", 4, [(kept.window, kept.chunk) for kept, _ in groups])
        self.number = 0
        self.index = index()

    def run(self, prompt: list[int]) -> None:
        """Compute a prompt, a block at a time, and let go of it."""
        generation = Generation(
            request="r",
            attempt=1,
            gateway=WorkerRef("gateway", "g", 1),
            tokens=pack_tokens(prompt),
            prompt_tokens=len(prompt),
            sampling=SamplingParams(),
            deadline_ms=0,
        )
        sequence = Sequence.of(generation, vocab_size=1000, max_context=1000)
        try:
            self.cache.open(sequence, len(prompt))
        except OutOfBlocks:
            return
        while sequence.num_computed < len(prompt):
            step = min(4, len(prompt) - sequence.num_computed)
            if not self.cache.cover(sequence, step):
                break
            sequence.computed(sequence.num_computed + step)
            self.cache.publish(sequence)
        self.cache.close(sequence)

    def message(self) -> KvEvents:
        self.number += 1 + any(contents.has_lost for contents in self.contents)
        changes = [contents.take(1000) for contents in self.contents]
        stored, removed = [one for one, _ in changes], [other for _, other in changes]
        return KvEvents(worker=ref(), number=self.number, layout=self.layout, stored=stored, removed=removed)

    def settle(self) -> None:
        """Tell what is left, and answer until no snapshot is wanted."""
        self.index.apply(self.message(), 0)
        self.index.apply(KvEvents(worker=ref(), number=self.number, layout=self.layout), 0)
        now = 0.0
        while self.index.wanted(now):
            arriving = self.index.begin(ref())
            assert arriving is not None
            parts = [contents.all() for contents in self.contents]
            counts = [len(part) // 8 for part in parts]
            arriving.add(snapshot(self.number, unpack(b"".join(parts)), counts=counts, layout=self.layout))
            self.index.finish(ref(), arriving, now)
            now += 1

    def check(self, prompts: list[list[int]]) -> None:
        for prompt in prompts:
            chain = hash_chain(prompt[:-1], 4, fingerprint="f", salt=b"")
            expected = 4 * len(self.pool.match(chain)[0])
            assert held(self.index, prompt) == ({0: expected} if expected else {})


GROUPS = [
    [(KEEP_ALL, 24)],
    [(KEEP_ALL, 24), (Retention(window=6), 12)],
    [(KEEP_ALL, 24), (Retention(window=9), 10), (Retention(chunk=8), 9)],
    [(Retention(window=7), 16)],
]


@pytest.mark.parametrize("groups", GROUPS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_index_finds_what_the_worker_would_find(groups: list[tuple[Retention, int]], data: st.DataObject) -> None:
    worker = Told(*groups, max_pending=data.draw(st.sampled_from([1000, 8])))
    bases = [[number * 100 + index for index in range(40)] for number in range(3)]
    prompts = [base[:cut] + [500 + end] * 5 for base in bases for cut in (3, 8, 17, 30) for end in (1, 2)]
    late: list[KvEvents] = []
    for _ in range(data.draw(st.integers(1, 25))):
        worker.run(data.draw(st.sampled_from(prompts)))
        fate = data.draw(st.sampled_from(["told", "told", "told", "later", "lost", "twice", "late"]))
        if fate == "later":
            continue
        events = worker.message()
        if fate == "late":
            late.append(events)
        elif fate != "lost":
            for _ in range(2 if fate == "twice" else 1):
                worker.index.apply(events, 0)
            while late:
                worker.index.apply(late.pop(), 0)
    worker.settle()
    worker.check(prompts)
    assert worker.index.num_blocks == sum(len(contents.all()) // 8 for contents in worker.contents)
    worker.cache.check()


def test_changes_that_are_too_many_leave_out_a_number() -> None:
    contents = PoolContents(100, max_pending=4)
    for block in range(4):
        contents.stored([(block, bytes([block]) * 16)])
    assert contents.num_pending == 4 and not contents.has_lost
    contents.stored([(4, b"4" * 16)])
    assert contents.has_lost and contents.num_pending == 0
    assert len(contents.all()) == 8 * 5
    assert contents.take(10) == (b"", b"") and not contents.has_lost


def test_a_block_that_was_stored_and_removed_between_two_messages_is_told_of_once() -> None:
    woken: list[int] = []
    contents = PoolContents(4, max_pending=10, on_change=lambda: woken.append(1))
    contents.stored([(0, b"a" * 16)])
    contents.removed(0)
    contents.stored([(1, b"b" * 16)])
    stored, removed = contents.take(1)
    assert (len(stored), len(removed)) == (0, 8)
    stored, removed = contents.take(10)
    assert (len(stored), len(removed)) == (8, 0)
    assert contents.all() == stored and woken == [1]


def test_messages_are_small() -> None:
    assert len(msgspec.msgpack.encode(told(1, list(range(1, 1001))))) < 8 * 1000 + 200
    assert unpack(pack(CHAIN)) == CHAIN
