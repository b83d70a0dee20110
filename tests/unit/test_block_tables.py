"""Block tables on the device are those of the step's rows, however these have changed since the steps before."""

from __future__ import annotations

import random
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.cache.block_table import BlockTable
from common.cache.grouped_pool import HOLE, GroupedPool, PoolGroup
from common.cache.pool import BlockPool
from common.cache.retention import KEEP_ALL, Retention
from common.engine.gpu.block_tables import BlockTables, max_table_ids, table_bytes
from common.engine.gpu.extents import UNIT, Extent, Extents, rounded
from common.engine.gpu.graphs import exact_shape
from common.engine.gpu.step_buffers import StepPacker, buffer_bytes, layout
from common.engine.gpu.table_slots import TableSlots, capacity
from common.engine.plan import StepRow
from common.engine.sequence import Sequence
from common.engine.sequence_cache import SequenceCache
from common.protocol import tokens as token_bytes
from common.protocol.errors import InvalidParameter, OutOfBlocks
from common.protocol.handles import WorkerRef
from common.protocol.messages import Generation, SamplingParams

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)
SIZE = 4
"""Tokens of a block."""


class Step:
    """Packs rows and applies the upload, as a runner does; then compares with tables that are built from scratch."""

    def __init__(self, num_blocks: list[int], *, max_ids: int, max_tables: int, change_bytes: int = 1 << 10) -> None:
        self.tables = BlockTables(num_blocks=num_blocks, max_ids=max_ids, max_tables=max_tables, device=CPU)
        self.packer = StepPacker(self.tables, block_tokens=SIZE, vocab_size=100)
        self.buffer = np.zeros(buffer_bytes(256, 64, change_bytes, len(num_blocks)), np.uint8)
        self.uploaded = 0

    def pack(self, rows: list[StepRow], *, launched: bool = True) -> None:
        self.buffer[:] = 0x7F  # what steps before left behind
        shape = exact_shape(rows)._replace(rows=len(rows) + 2)
        packed = self.packer.pack(rows, self.buffer, shape)
        self.uploaded = packed.changes.stop - packed.changes.start
        if not launched:
            return
        upload = torch.from_numpy(self.buffer)
        self.tables.apply(upload[packed.changes])
        fields = layout(upload, shape, len(self.tables.num_blocks))
        taken: set[int] = set()
        for group in range(len(self.tables.num_blocks)):
            tables = [row.more_blocks[group - 1] if group else row.blocks for row in rows]
            starts = fields.block_starts[group].tolist()
            assert starts[: len(rows)] == packed.first_blocks[group].tolist()
            slots = iter(fields.slots[group].tolist())
            for row, table, start in zip(rows, tables, starts, strict=False):
                held = self.tables.ids[start : start + len(table)].tolist()
                assert min(held) >= 0  # what nobody reads is still an address
                assert [HOLE if want == HOLE else have for have, want in zip(held, table, strict=True)] == table
                places = range(row.start, row.start + len(row.tokens))
                assert [next(slots) for _ in places] == [table[place // SIZE] * SIZE + place % SIZE for place in places]
                mine = set(range(start, start + len(table)))
                assert not taken & mine, "two tables have a place in common"
                taken |= mine
            assert set(slots) <= {-1}


def row(table: list[int], *more: list[int], end: int | None = None) -> StepRow:
    """A row of one token, the last that the tables hold, or that before `end`."""
    end = len(table) * SIZE if end is None else end
    return StepRow([5], end - 1, table, 1, GREEDY, 1, more_blocks=list(more))


# ── a table that knows when it has changed ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.__setitem__(1, 9),
        lambda table: table.__setitem__(slice(1, 2), [8, 9]),
        lambda table: table.__delitem__(0),
        lambda table: table.__imul__(2),
        lambda table: table.insert(1, 9),
        lambda table: table.pop(),
        lambda table: table.remove(3),
        lambda table: table.clear(),
        lambda table: table.reverse(),
        lambda table: table.sort(reverse=True),
    ],
)
def test_whatever_is_not_growth_makes_another_version_of_a_table(change: Any) -> None:
    table, plain = BlockTable([1, 2, 3]), [1, 2, 3]
    version = table.version
    change(table)
    change(plain)
    assert list(table) == plain
    assert table.version not in (version, BlockTable().version)


def test_growth_and_letting_go_keep_the_version_of_a_table() -> None:
    table = BlockTable([1, 2, 3])
    version = table.version
    table.append(4)
    table += [5]
    table.extend([6])
    table.let_go(0, 2)
    assert (list(table), table.version) == ([HOLE, HOLE, 3, 4, 5, 6], version)
    assert BlockTable(table).version != version


# ── places in an array ───────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.lists(st.tuples(st.integers(0, 300), st.booleans()), max_size=60))
def test_extents_never_overlap_and_come_back_whole(units: int, wanted: list[tuple[int, bool]]) -> None:
    extents, held = Extents(units * UNIT), list[Extent]()
    for count, gives in wanted:
        if gives and held:
            extents.give(held.pop(count % len(held)))
            continue
        extent = extents.take(count)
        if extent is not None:
            assert extent.size >= max(count, 1)
            assert extent.start % extent.size == 0
            assert extent.start + extent.size <= extents.capacity
            held.append(extent)
    places = list(chain.from_iterable(range(start, start + size) for start, size in held))
    assert len(places) == len(set(places))
    for extent in held:
        extents.give(extent)
    whole = 1 << (units.bit_length() - 1)
    assert extents.take(whole * UNIT) is not None


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 200), min_size=1, max_size=40))
def test_any_tables_fit_that_are_entered_largest_first(counts: list[int]) -> None:
    extents = Extents(capacity(sum(counts), len(counts)))
    for count in sorted(counts, reverse=True):
        assert extents.take(count + 1) is not None
    assert sum(rounded(count + 1) for count in counts) <= extents.capacity


# ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def sequence(number: int, prompt: list[int]) -> Sequence:
    return Sequence.of(
        Generation(
            request=f"r{number}",
            attempt=0,
            gateway=WorkerRef("gateway", "g", 1),
            tokens=token_bytes.pack(prompt),
            prompt_tokens=len(prompt),
            sampling=SamplingParams(temperature=0.0, max_tokens=1 << 20),
            deadline_ms=1 << 60,
        ),
        vocab_size=100,
        max_context=1 << 20,
    )


class Worker:
    """Sequences that share prefixes, in a cache with windows, whose steps run one behind the other, or fail."""

    def __init__(self, groups: list[Retention], seed: int) -> None:
        self.dice = random.Random(seed)
        self.cache = SequenceCache(GroupedPool(*(PoolGroup(BlockPool(60, SIZE), kept) for kept in groups)), fingerprint="x")
        self.step = Step([60] * len(groups), max_ids=150 * len(groups), max_tables=5 * len(groups))
        self.running: list[Sequence] = []
        self.numbers = 0

    def admit(self) -> None:
        shared = [1 + n % 90 for n in range(self.dice.choice((0, 8, 30, 60)))]
        one = sequence(self.numbers, [*shared, *(self.dice.randrange(100) for _ in range(self.dice.randrange(1, 30)))])
        self.numbers += 1
        try:
            self.cache.open(one, len(one.tokens) + 1)
        except OutOfBlocks:
            return
        self.running.append(one)

    def import_kv(self) -> None:
        """As a decode worker does with the blocks behind a handle."""
        one = self.dice.choice(self.running)
        end = len(one.tokens) - 1
        if one.num_computed >= end:
            return
        try:
            self.cache.reach(one, end)
        except OutOfBlocks:
            return
        self.cache.copied(one, end)

    def run(self) -> None:
        chosen = [one for one in self.running if self.dice.random() < 0.8][:5]
        rows: list[tuple[Sequence, StepRow, int]] = []
        for one in chosen:
            self.cache.catch_up(one)
            proposal = [7] * self.dice.choice((0, 0, 3)) if one.num_unplanned == 1 else []
            count = min(one.num_unplanned, self.dice.randrange(1, 20))
            try:
                self.cache.grow(one, one.num_planned + count + len(proposal))
            except OutOfBlocks:
                continue
            rows.append((one, one.plan(count, proposal, 0), len(proposal)))
        if not rows:
            return
        fails = self.dice.random() < 0.2
        self.step.pack([found for _, found, _ in rows], launched=not fails)
        for one, found, proposed in rows:
            if fails:
                one.rewind()
                continue
            one.ran(found)
            if found.num_samples:
                accepted = self.dice.randrange(proposed + 1)  # what was rejected is computed again, in the same blocks
                one.tokens += [7] * accepted + [self.dice.randrange(100)]
                one.computed(found.start + len(found.tokens) - proposed + accepted)
            self.cache.publish(one)

    def end(self) -> None:
        self.cache.close(self.running.pop(self.dice.randrange(len(self.running))))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(["admit", "import_kv", "run", "run", "run", "end"]), min_size=10, max_size=60),
    st.sampled_from([[KEEP_ALL], [KEEP_ALL, Retention(window=10)], [Retention(chunk=16), KEEP_ALL, Retention(window=6)]]),
    st.integers(0, 1 << 30),
)
def test_sequences_that_come_grow_share_and_leave_have_the_tables_of_their_rows(
    acts: list[str], groups: list[Retention], seed: int
) -> None:
    worker = Worker(groups, seed)
    for act in acts:
        if worker.running or act == "admit":
            getattr(worker, act)()
        worker.cache.check()


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_tables_that_grow_shrink_are_exchanged_or_come_back_are_as_if_sent_whole(data: st.DataObject) -> None:
    """Any change of any table between two steps, and any of them in a step; the array is almost too small for a step."""
    step = Step([50], max_ids=120, max_tables=8, change_bytes=data.draw(st.sampled_from([0, 60, 4000])))
    dice = random.Random(data.draw(st.integers(0, 1 << 30)))
    tables: list[BlockTable | list[int]] = [BlockTable([1])]
    for _ in range(data.draw(st.integers(1, 25))):
        for _ in range(dice.randrange(4)):
            index = dice.randrange(len(tables))
            table = tables[index]
            new = [dice.randrange(50) for _ in range(dice.choice((1, 1, 5, 40)))]
            act = dice.choice(("grow", "grow", "truncate", "exchange", "let go", "swap", "replace", "plain"))
            if act == "grow":
                table += new
            elif act == "truncate":
                del table[max(1, len(table) - 2) :]
                table += new[:1]
            elif act == "exchange":
                table[dice.randrange(len(table))] = new[0]
            elif act == "let go" and isinstance(table, BlockTable):
                table.let_go(0, len(table) // 2)
            elif act == "swap":
                tables.reverse()
            elif act == "replace" or len(table) > 100:
                tables[index] = BlockTable(new)
            elif act == "plain":
                tables[index] = new
            else:
                tables.append(BlockTable(new))
        chosen = dice.sample(tables, dice.randrange(1, min(len(tables), 8) + 1))
        while sum(map(len, chosen)) > 120:
            chosen.pop()
        rows = [row(table) for table in chosen if table[-1] != HOLE]
        if rows:
            step.pack(rows, launched=dice.random() < 0.9)


def test_a_step_sends_what_is_new() -> None:
    step = Step([1000], max_ids=1000, max_tables=16)
    tables = [BlockTable(range(100 * i, 100 * i + 50)) for i in range(4)]
    step.pack([row(table) for table in tables[:3]])
    assert step.uploaded == 12 * 150
    step.pack([row(table) for table in tables[:3]])
    assert step.uploaded == 0
    tables[1].append(7)
    step.pack([row(table) for table in tables])
    assert step.uploaded == 12 * (1 + 50)
    tables[1][0] = 8
    tables[2].let_go(0, 20)
    step.pack([row(table) for table in tables[1:3]])
    assert step.uploaded == 12 * 51


def test_what_a_step_that_was_not_launched_would_have_sent_goes_with_the_next_one() -> None:
    step = Step([100], max_ids=100, max_tables=4)
    first, second = BlockTable([1, 2]), BlockTable([3])
    step.pack([row(first)])
    first.append(4)
    step.pack([row(first), row(second)], launched=False)
    bad = BlockTable([5, 100])
    with pytest.raises(InvalidParameter, match="outside the pool"):
        step.pack([row(second), row(bad)])
    step.pack([row(second), row(first)])


def test_blocks_that_another_thread_appends_meanwhile_are_not_in_the_step() -> None:
    class Growing(BlockTable):
        """Grows each time that its length is asked for, as a table does whose sequence the scheduler extends."""

        def __len__(self) -> int:
            length = super().__len__()
            self.append(200 + length)
            return length

    slots = TableSlots(max_ids=100, max_tables=4)
    table = Growing([1, 2, 3])
    for length in (3, 4, 5):
        placed = slots.place([table], [1000])
        assert placed.held.tolist() == [length]
        start = int(placed.starts[0])
        assert slots.ids[start : start + length].tolist() == [1, 2, 3, 203, 204][:length]
        assert slots.ids[start + length] == 0


def test_the_same_tables_again_are_placed_as_they_were() -> None:
    tables = BlockTables(num_blocks=[100, 50], max_ids=100, max_tables=8, device=CPU)
    first, second = BlockTable([1, 2]), BlockTable([3])
    before = tables.place([row(first, second)])
    assert tables.place([row(first, second)]) is before
    first.append(4)
    after = tables.place([row(first, second)])
    assert after is not before and after.held.tolist() == [[3], [1]]
    first[0] = 5
    assert tables.place([row(first, second)]) is not after
    assert tables.slots.ids[tables.place([row(first, second)]).starts[0, 0]] == 5
    with pytest.raises(InvalidParameter):
        tables.place([row(BlockTable([100]), second)])
    assert tables.place([row(first, second)]).held.tolist() == [[3], [1]]


def test_tables_that_are_no_longer_used_give_way_and_those_in_use_stay() -> None:
    step = Step([100], max_ids=64, max_tables=4)
    kept = BlockTable(range(20))
    step.pack([row(kept)])
    for _ in range(100):
        step.pack([row(kept), row(BlockTable(range(30)))])
        assert step.uploaded == 12 * 30


def test_tables_are_moved_together_where_the_gaps_between_them_are_too_small() -> None:
    moved: list[int] = []

    class Watched(TableSlots):
        def forget(self) -> None:
            moved.append(1)
            super().forget()

    for seed in range(60):
        dice = random.Random(seed)
        slots, tables = Watched(max_ids=96, max_tables=3), [BlockTable([1])]
        for _ in range(100):
            for _ in range(3):
                table, act = dice.choice(tables), dice.randrange(4)
                if act == 0 and len(table) < 60:
                    table += range(dice.choice((1, 10, 30)))
                elif act == 1:
                    tables.append(BlockTable(range(dice.choice((1, 15, 16, 31, 33, 60)))))
                elif len(tables) > 1:
                    tables.remove(table)
            chosen = dice.sample(tables, min(len(tables), 3))
            while sum(map(len, chosen)) > 96:
                chosen.pop()
            starts = slots.place(chosen, [100]).starts.tolist()
            assert [slots.ids[at : at + len(table)].tolist() for at, table in zip(starts, chosen, strict=True)] == chosen
    assert moved


def test_more_than_fits_is_refused() -> None:
    step = Step([100], max_ids=64, max_tables=2)
    with pytest.raises(InvalidParameter, match="with 65 ids"):
        step.pack([row(BlockTable(range(65)))])
    with pytest.raises(InvalidParameter, match="cache groups"):
        step.pack([row(BlockTable([1]), BlockTable([1]))])
    with pytest.raises(InvalidParameter, match="hole"):
        step.pack([row(BlockTable([1, HOLE]))])
    with pytest.raises(InvalidParameter, match="don't hold its tokens"):
        step.pack([row(BlockTable([1]), end=SIZE + 1)])
    step.pack([row(BlockTable(range(64)))])


def test_the_array_is_as_large_as_it_is_counted() -> None:
    max_ids = max_table_ids([1000, 50], max_rows=8, longest_blocks=200)
    tables = BlockTables(num_blocks=[1000, 50], max_ids=max_ids, max_tables=64, device=CPU)
    assert tables.ids.nbytes == table_bytes(max_ids, 64)
    assert max_ids >= 2 * 8 * 200
