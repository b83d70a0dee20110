"""Several models share one store's memory: by what is used, never beyond the capacity, and what is given up is really free."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from common.protocol.errors import InvalidParameter, OutOfBlocks
from common.protocol.messages import KvUsage
from common.transfer.block_locks import lock_to_copy
from common.transfer.shm import StoreTransport
from services.kvstore.arena import Arena
from services.kvstore.arenas import RETRY_S, Arenas
from tests.fixtures.tmpfs import small_tmpfs

PAGE = os.sysconf("SC_PAGESIZE")
BLOCK = 4 * PAGE
CAPACITY = 16 * BLOCK


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many blocks an arena takes at once does not depend on the machine's speed."""
    monkeypatch.setattr("services.kvstore.arena.MAX_GROWTH_S", 3600.0)


class Store:
    """Arenas with a clock that the test turns."""

    def __init__(self, directory: Path, *, capacity: int = CAPACITY, max_arenas: int = 8) -> None:
        self.now = 100.0
        self.evicted = 0
        self.arenas = Arenas(
            str(directory),
            "store",
            capacity_bytes=capacity,
            max_arenas=max_arenas,
            clock=lambda: self.now,
            on_evicted=self.count,
        )

    def count(self, evicted: int) -> None:
        self.evicted += evicted

    def put(self, model: str, chain: list[bytes], *, block_bytes: int = BLOCK, owner: bytes = b"") -> int:
        """Offer and commit; returns how many blocks the store took."""
        arena = self.arenas.of(model, block_bytes)
        granted = arena.reserve(chain, owner)
        arena.index.commit([slot for _, slot in granted], [0] * len(granted))
        return len(granted)

    def has(self, model: str, chain: list[bytes]) -> int:
        """Blocks of the chain that a lookup finds."""
        arena = self.arenas.used(model)
        return len(arena.index.lookup(chain)) if arena is not None else 0

    def check(self) -> None:
        """Books, files and the capacity agree."""
        held = 0
        for arena in self.arenas.values():
            arena.index.check()
            held += arena.memory_bytes
            assert arena.segment.memory_bytes == arena._table_bytes + arena.memory_bytes, "the file takes something else"
        assert held == self.arenas.memory_bytes <= self.arenas.capacity_bytes
        owned = sum(size for size in self.arenas.owners._bytes.values())
        assert owned == sum(len(arena.index.order) * arena.slot_bytes for arena in self.arenas.values())
        usage = self.arenas.usage()
        assert usage.free + usage.owned + usage.leased + usage.cached == usage.total


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    made = Store(folder)
    yield made
    made.check()
    made.arenas.close()
    assert not list(folder.iterdir())


def chain(name: str, length: int) -> list[bytes]:
    return [f"{name}{index}".encode() for index in range(length)]


def test_models_that_take_turns_keep_what_they_stored(store: Store) -> None:
    for turn in range(20):
        for model in ("a", "b", "c"):
            assert store.put(model, chain(model, 5)) == (5 if turn == 0 else 0)
            assert store.has(model, chain(model, 5)) == 5
    assert store.evicted == 0
    assert store.arenas.usage() == KvUsage(total=16, free=1, cached=15)


def test_a_store_takes_no_memory_before_something_is_stored(store: Store) -> None:
    store.put("a", chain("a", 3))
    assert store.arenas.memory_bytes == 3 * BLOCK
    assert store.arenas["a"].segment.memory_bytes == 3 * BLOCK + PAGE


def test_one_model_alone_gets_the_whole_capacity(store: Store) -> None:
    assert store.put("a", chain("a", 20)) == 16
    assert store.arenas.memory_bytes == CAPACITY


def test_a_new_model_takes_what_was_used_least_recently_block_by_block(store: Store) -> None:
    store.put("a", chain("old", 8))
    store.put("a", chain("new", 8))
    assert store.put("b", chain("b", 3)) == 3
    assert store.has("a", chain("old", 8)) == 5, "its tail went, and no more than was needed"
    assert store.has("a", chain("new", 8)) == 8
    assert store.evicted == 3


def test_a_model_that_is_used_takes_from_one_that_is_not_rather_than_from_itself(store: Store) -> None:
    store.put("idle", chain("idle", 8))
    store.put("busy", chain("x", 8))
    store.put("busy", chain("y", 4))
    assert (store.has("busy", chain("x", 8)), store.has("busy", chain("y", 4))) == (8, 4)
    assert store.has("idle", chain("idle", 8)) == 4


def test_memory_passes_between_blocks_of_different_sizes(store: Store) -> None:
    store.put("small", chain("s", 64), block_bytes=PAGE)
    assert store.put("large", chain("l", 4), block_bytes=5 * PAGE - 100) == 4
    assert store.has("small", chain("s", 64)) == 44, "four times five pages, from the tail"
    store.check()
    assert store.put("small", chain("t", 30), block_bytes=PAGE) == 30
    store.check()


def test_what_is_read_or_written_is_not_taken(store: Store) -> None:
    a = store.arenas.of("a", BLOCK)
    written = a.reserve(chain("w", 6))
    store.put("a", chain("r", 6))
    read = a.index.lookup(chain("r", 6))
    a.index.lease(read)
    store.put("a", chain("free", 4))
    assert store.put("b", chain("b", 9)) == 4, "only what nobody holds"
    assert store.put("b", chain("c", 9)) == 4, "then its own"
    a.index.end_lease(read)
    a.index.abandon([slot for _, slot in written])
    assert store.put("b", chain("d", 6)) == 6, "slots that hold nothing go first"
    assert store.has("a", chain("r", 6)) == 6


def test_a_reader_whose_block_went_to_another_model_notices(store: Store, folder: Path) -> None:
    store.put("a", chain("a", 16))
    arena = store.arenas["a"]
    slots = arena.index.lookup(chain("a", 16))
    generations = arena.generations_of(slots)
    store.put("b", chain("b", 16))
    assert store.has("a", chain("a", 16)) == 0
    assert all(now > then for now, then in zip(arena.generations_of(slots), generations, strict=True))


def test_an_arena_nobody_uses_for_long_gives_all_its_memory_back(store: Store, folder: Path) -> None:
    store.put("a", chain("a", 4))
    held = store.arenas.of("held", BLOCK).reserve(chain("h", 2))
    store.now += 500
    store.put("b", chain("b", 4))
    store.now += 500
    store.arenas.tidy(store.now, 1000)
    assert list(store.arenas) == ["held", "b"], "a model that somebody is writing for stays"
    assert len(list(folder.iterdir())) == 2
    store.arenas["held"].index.abandon([slot for _, slot in held])
    store.arenas.tidy(store.now, 1000)
    assert list(store.arenas) == ["b"]
    assert store.put("b", chain("c", 12)) == 12


def test_a_lookup_counts_as_use(store: Store) -> None:
    store.put("a", chain("a", 4))
    store.now += 500
    store.has("a", [b"unknown"])
    store.now += 600
    store.arenas.tidy(store.now, 1000)
    assert list(store.arenas) == ["a"]


def test_a_tenants_flood_in_another_model_leaves_others_their_share(store: Store) -> None:
    assert store.put("a", chain("mine", 6), owner=b"tenant-a") == 6
    for i in range(20):
        store.put("b", chain(f"flood{i}-", 3), owner=b"tenant-b")
    assert store.has("a", chain("mine", 6)) == 6, "less than its half of sixteen"
    assert store.arenas.num_readable == 16, "anyone may use the rest"
    store.arenas.owners.weigh(b"tenant-b", 7.0)
    for i in range(20):
        store.put("b", chain(f"more{i}-", 3), owner=b"tenant-b")
    assert store.has("a", chain("mine", 6)) == 2, "an eighth, by the weights"


def test_a_tenant_takes_back_its_share_from_one_that_had_more(store: Store) -> None:
    assert store.put("a", chain("all", 16), owner=b"tenant-b") == 16
    assert store.put("a", chain("mine", 8), owner=b"tenant-a") == 8
    assert store.put("a", chain("more", 8), owner=b"tenant-a") == 8, "in place of its own"
    assert store.has("a", chain("all", 16)) == 8


def test_where_a_tenant_with_too_much_is_reading_it_all_somebody_else_gives(store: Store) -> None:
    store.put("a", chain("read", 12), owner=b"tenant-b")
    slots = store.arenas["a"].index.lookup(chain("read", 12))
    store.arenas["a"].index.lease(slots)
    store.put("a", chain("mine", 4), owner=b"tenant-a")
    assert store.put("a", chain("other", 2), owner=b"tenant-c") == 2
    assert store.has("a", chain("mine", 4)) == 2
    store.arenas["a"].index.end_lease(slots)


def test_a_flood_of_models_is_bounded_and_takes_the_one_used_least_recently(folder: Path) -> None:
    store = Store(folder, max_arenas=3)
    for number in range(10):
        store.put(f"m{number}", chain("x", 1))
        assert len(list(folder.iterdir())) == len(store.arenas) <= 3
    assert list(store.arenas) == ["m7", "m8", "m9"]
    held = store.arenas["m7"].index.lookup(chain("x", 1))
    store.arenas["m7"].index.lease(held)
    store.put("m10", chain("x", 1))
    assert list(store.arenas) == ["m7", "m9", "m10"], "the one used least recently of those that nobody holds"
    store.arenas["m7"].index.end_lease(held)
    for arena in store.arenas.values():
        arena.index.lease(arena.index.lookup(chain("x", 1)))
    with pytest.raises(OutOfBlocks, match="max_fingerprints"):
        store.put("one more", chain("x", 1))
    store.arenas.close()


@pytest.mark.parametrize("block_bytes", [0, -1, CAPACITY + 1, 1 << 40])
def test_a_block_size_that_can_not_be_takes_nothing(store: Store, folder: Path, block_bytes: int) -> None:
    with pytest.raises(InvalidParameter):
        store.put("a", chain("a", 1), block_bytes=block_bytes)
    assert not list(folder.iterdir())


def test_a_model_has_blocks_of_one_size(store: Store) -> None:
    store.put("a", chain("a", 1))
    with pytest.raises(InvalidParameter, match=f"blocks of {BLOCK} bytes"):
        store.put("a", chain("b", 1), block_bytes=2 * BLOCK)


def test_a_full_tmpfs_stops_the_growth_and_nothing_else(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "shm", size=1 << 20) as folder:
        store = Store(folder, capacity=4 << 20)
        assert store.put("a", chain("a", 100)) == 63, "what fits, beside the table"
        store.check()
        assert store.put("a", chain("b", 10)) == 10, "it goes on with what it has"
        assert store.put("b", chain("c", 10)) == 10, "and a model that is new gets its share of that"
        store.check()
        store.arenas.close()


def test_after_a_refusal_the_store_tries_again(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "shm", size=1 << 20) as folder:
        store = Store(folder, capacity=1 << 20)
        with (folder / "greedy").open("wb") as greedy:
            os.posix_fallocate(greedy.fileno(), 0, (1 << 20) - 20 * PAGE)
        assert store.put("a", chain("a", 10)) == 4
        (folder / "greedy").unlink()
        assert store.put("a", chain("b", 10)) == 4, "not at every offer"
        store.now += RETRY_S
        assert store.put("a", chain("c", 20)) == 20
        store.check()
        store.arenas.close()


def test_a_system_that_takes_no_memory_back_costs_only_the_exchange(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("a", chain("a", 16))

    def refuse(slot: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(store.arenas["a"].segment, "unback", refuse)
    assert store.put("b", chain("b", 4)) == 0
    assert store.put("a", chain("c", 4)) == 4


def test_memory_that_a_late_writer_took_comes_back(store: Store, folder: Path) -> None:
    store.put("a", chain("a", 16))
    arena = store.arenas["a"]
    slot = arena.index.lookup(chain("a", 16))[15]
    store.put("b", chain("b", 4))
    transport = StoreTransport(folder)
    transport.write(arena.segment.name, "a", [slot], np.ones((1, BLOCK), np.uint8), [0])
    assert arena.segment.memory_bytes == arena._table_bytes + arena.memory_bytes + BLOCK
    store.arenas.tidy(store.now, 1000)
    store.check()


def test_what_a_worker_still_copies_after_its_lease_keeps_its_memory_and_others_give_theirs(store: Store) -> None:
    store.put("a", chain("a", 16))
    segment, copied = store.arenas["a"].segment, store.arenas["a"].index.lookup(chain("a", 16))[15]
    with lock_to_copy(segment._fd, [(segment._offset(copied), BLOCK)]):
        assert store.put("b", chain("b", 2)) == 0, "the leaf, which is the least recently used, is being copied"
        store.check()
        assert store.put("b", chain("b", 2)) == 0, "and spare by now"
        assert store.put("a", chain("c", 3)) == 3
        assert store.put("b", chain("b", 2)) == 2, "another slot gives its memory"
        store.check()
    store.put("b", chain("b", 16))
    store.check()


def test_what_a_late_reader_looks_at_is_reclaimed_the_next_time(store: Store, folder: Path) -> None:
    store.put("a", chain("a", 16))
    arena = store.arenas["a"]
    slot = arena.index.lookup(chain("a", 16))[15]
    store.put("b", chain("b", 4))
    StoreTransport(folder).write(arena.segment.name, "a", [slot], np.ones((1, BLOCK), np.uint8), [0])
    with lock_to_copy(arena.segment._fd, [(arena.segment._offset(slot), BLOCK)]):
        store.arenas.tidy(store.now, 1000)
    store.arenas.tidy(store.now, 1000)
    store.check()


class ArenasMachine(RuleBasedStateMachine):
    """Random histories of several models with blocks of different sizes."""

    @initialize(pages=st.integers(1, 40), max_arenas=st.integers(1, 4))
    def start(self, pages: int, max_arenas: int) -> None:
        self.directory = tempfile.TemporaryDirectory(dir="/dev/shm")
        self.store = Store(Path(self.directory.name), capacity=pages * PAGE, max_arenas=max_arenas)
        self.writes: list[tuple[Arena, list[int]]] = []
        self.reads: list[tuple[Arena, list[int], list[int]]] = []

    @rule(model=st.integers(1, 5), leaf=st.integers(1, 31))
    def offer(self, model: int, leaf: int) -> None:
        try:
            arena = self.store.arenas.of(str(model), model * PAGE - model % 2)
        except (InvalidParameter, OutOfBlocks):
            return
        slots = [slot for _, slot in arena.reserve(path(leaf), b"tenant-%d" % (model % 3))]
        if slots:
            self.writes.append((arena, slots))

    @precondition(lambda self: self.writes)
    @rule(data=st.data(), commit=st.booleans())
    def finish(self, data: st.DataObject, commit: bool) -> None:
        arena, slots = self.writes.pop(data.draw(st.integers(0, len(self.writes) - 1)))
        if commit:
            arena.index.commit(slots, [0] * len(slots))
        else:
            arena.index.abandon(slots)

    @rule(model=st.integers(1, 5), leaf=st.integers(1, 31))
    def look_up(self, model: int, leaf: int) -> None:
        arena = self.store.arenas.used(str(model))
        slots = arena.index.lookup(path(leaf)) if arena is not None else []
        if arena is not None and slots:
            arena.index.lease(slots)
            self.reads.append((arena, slots, arena.generations_of(slots)))

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        arena, slots, generations = self.reads.pop(data.draw(st.integers(0, len(self.reads) - 1)))
        assert arena.generations_of(slots) == generations, "a leased block was given to somebody else"
        arena.index.end_lease(slots)

    @rule(seconds=st.sampled_from([1, 50, 200]))
    def time_passes(self, seconds: int) -> None:
        self.store.now += seconds
        self.store.arenas.tidy(self.store.now, 100)

    @invariant()
    def the_books_balance(self) -> None:
        if hasattr(self, "store"):
            self.store.check()

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.arenas.close()
            assert not list(Path(self.directory.name).iterdir())
            self.directory.cleanup()


def path(leaf: int) -> list[bytes]:
    """The hashes from the root of a binary tree to `leaf`."""
    return [b"%d" % (leaf >> shift) for shift in range(leaf.bit_length() - 1, -1, -1)]


ArenasMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
test_random_histories_keep_the_invariant = ArenasMachine.TestCase
