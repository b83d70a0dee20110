"""The disk's index gives up what was used least, model by model, and never a block that somebody touches."""

from __future__ import annotations

import random

from services.kvstore.disk_index import DiskFile, DiskIndex

SLOT = 4096


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def index_of(slots: int, time: Time | None = None) -> DiskIndex:
    return DiskIndex(capacity_bytes=slots * SLOT, clock=time or Time(), active_s=60.0)


def file_of(index: DiskIndex, fingerprint: str = "m", slot_bytes: int = SLOT) -> DiskFile:
    file = index.file(fingerprint, fingerprint.encode().ljust(16), slot_bytes - 64, slot_bytes)
    assert file is not None
    return file


def put(index: DiskIndex, file: DiskFile, *hashes: bytes, parent: bytes = b"", owner: bytes = b"") -> None:
    """Write a chain."""
    for block_hash in hashes:
        assert index.reserve(file, block_hash, parent, 7, owner) is not None
        index.commit(file, block_hash)
        parent = block_hash
    index.check()


def held(file: DiskFile) -> set[bytes]:
    return {block_hash for block_hash in file.blocks if file.find(block_hash)}


def test_what_is_being_written_is_not_found_and_not_evicted():
    index = index_of(2)
    file = file_of(index)
    assert index.reserve(file, b"a", b"", 1) and index.reserve(file, b"b", b"", 2)
    assert file.find(b"a") is None
    assert index.reserve(file, b"c", b"", 3) is None, "both are being written"
    index.commit(file, b"a")
    index.abandon(file, b"b")
    assert held(file) == {b"a"}
    index.check()


def test_the_tail_of_the_chain_used_least_goes_first():
    index = index_of(4)
    file = file_of(index)
    put(index, file, b"a1", b"a2")
    put(index, file, b"b1", b"b2")
    put(index, file, b"c1")
    assert held(file) == {b"a1", b"b1", b"b2", b"c1"}
    assert index.evicted == 1


def test_a_shared_prefix_outlives_prompts_that_came_once():
    index = index_of(10)
    file = file_of(index)
    put(index, file, b"shared")
    for _ in range(3):
        index.use(file, b"shared")
    for number in range(25):
        put(index, file, b"once%d" % number)
    assert b"shared" in held(file), "more recent prompts of one use went first"
    for number in range(100):
        put(index, file, b"later%d" % number)
    assert b"shared" not in held(file), "what nobody asks for any more goes in the end"


def test_a_flood_of_one_model_leaves_another_its_share():
    time = Time()
    index = index_of(10, time)
    quiet, loud = file_of(index, "quiet"), file_of(index, "loud")
    put(index, quiet, *(b"q%d" % i for i in range(5)))
    for number in range(50):
        put(index, loud, b"l%d" % number)
    assert len(held(quiet)) == 5 and len(held(loud)) == 5
    time.now = 100.0
    for number in range(50, 60):
        put(index, loud, b"l%d" % number)
    assert len(held(loud)) == 10, "a model that nobody uses has no share"


def test_cache_groups_of_one_model_have_one_share():
    index = index_of(12)
    first, second, other = file_of(index, "m"), file_of(index, "m-1"), file_of(index, "n")
    for number in range(40):
        put(index, first, b"a%d" % number)
        put(index, second, b"a%d" % number)
        put(index, other, b"b%d" % number)
    assert len(held(other)) == 6 and len(held(first)) + len(held(second)) == 6


def test_a_file_keeps_blocks_of_one_size():
    index = index_of(4)
    file_of(index, "m")
    assert index.file("m", b"m".ljust(16), 100, SLOT) is None


def test_records_bring_everything_back_in_the_order_of_use():
    index = index_of(3)
    file = file_of(index)
    put(index, file, b"a")
    put(index, file, b"b")
    put(index, file, b"c")
    file.order.touch(b"a")
    records = {block_hash: record for (_, block_hash), record in index.take_changes().items() if record is not None}
    assert index.take_changes() == {}

    again = index_of(3)
    file = file_of(again)
    assert again.restore(file, records, num_slots=3) == 0
    again.check()
    assert held(file) == {b"a", b"b", b"c"}
    put(again, file, b"d")
    assert held(file) == {b"a", b"c", b"d"}
    assert again.take_changes()["m", b"b"] is None


def test_records_that_are_damaged_or_point_nowhere_are_dropped():
    index = index_of(8)
    file = file_of(index)
    put(index, file, b"a")
    put(index, file, b"b")
    put(index, file, b"c")
    records = {block_hash: record for (_, block_hash), record in index.take_changes().items() if record is not None}
    records |= {b"twice": records[b"a"], b"short": b"abc", b"empty": b""}
    again = index_of(8)
    file = file_of(again)
    assert again.restore(file, records, num_slots=2) == 4, "c lies behind the end of the file"
    assert held(file) == {b"a", b"b"}
    again.check()
    assert {block_hash for _, block_hash in again.take_changes()} == {b"twice", b"short", b"empty", b"c"}


def test_a_smaller_quota_than_before_is_kept_from_the_start():
    index = index_of(8)
    file = file_of(index)
    put(index, file, *(b"%d" % i for i in range(8)))
    records = {block_hash: record for (_, block_hash), record in index.take_changes().items() if record is not None}
    again = index_of(3)
    file = file_of(again)
    again.restore(file, records, num_slots=8)
    again.shrink_to_limit()
    assert held(file) == {b"0", b"1", b"2"}
    again.check()


def test_any_order_of_calls_keeps_the_books():
    chance = random.Random(5)
    index = index_of(20)
    files = [file_of(index, "m"), file_of(index, "m-1", 2 * SLOT), file_of(index, "n")]
    writing: list[tuple[DiskFile, bytes]] = []
    for _ in range(4000):
        file, block_hash = chance.choice(files), b"%d" % chance.randrange(60)
        match chance.randrange(6):
            case 0 | 1:
                if index.reserve(file, block_hash, b"%d" % chance.randrange(60), 1):
                    writing.append((file, block_hash))
            case 2 if writing:
                index.commit(*writing.pop(chance.randrange(len(writing))))
            case 3 if writing:
                index.abandon(*writing.pop(chance.randrange(len(writing))))
            case 4:
                index.use(file, block_hash)
            case _:
                if chance.random() < 0.3:
                    index.forget(file, block_hash)
                slots, file.to_clear = file.to_clear, []
                index.cleared(file, slots)
        assert index.used_bytes <= index.capacity_bytes
        index.check()
    assert index.evicted


def test_a_tenants_flood_leaves_others_their_share_also_after_a_restart():
    time = Time()
    index = index_of(8, time)
    file = file_of(index)
    put(index, file, b"mine1", b"mine2", b"mine3", owner=b"tenant-a")
    for i in range(20):
        put(index, file, b"flood%d" % i, owner=b"tenant-b")
    assert {b"mine1", b"mine2", b"mine3"} <= held(file)
    records = {block_hash: record for (_, block_hash), record in index.take_changes().items() if record is not None}
    again = index_of(8, time)
    file = file_of(again)
    assert again.restore(file, records, 8) == 0
    assert file.order.owner_of(b"mine1") == b"tenant-a"
    for i in range(20, 40):
        put(again, file, b"flood%d" % i, owner=b"tenant-b")
    assert {b"mine1", b"mine2", b"mine3"} <= held(file), "before it has asked for anything"
    put(again, file, b"mine4", owner=b"tenant-a")
    for i in range(40, 60):
        put(again, file, b"flood%d" % i, owner=b"tenant-b")
    assert {b"mine1", b"mine2", b"mine3", b"mine4"} <= held(file), "half of the quota is its share"
    put(again, file, *(b"mine%d" % i for i in range(5, 9)), owner=b"tenant-a")
    assert len(held(file)) == 8
    assert sum(block_hash.startswith(b"flood") for block_hash in held(file)) == 4, "beyond it, its own go"


def test_a_tenant_that_comes_no_more_gives_way():
    time = Time()
    index = index_of(4, time)
    file = file_of(index)
    put(index, file, b"a1", b"a2", owner=b"tenant-a")
    time.now = 61.0
    for i in range(4):
        put(index, file, b"b%d" % i, owner=b"tenant-b")
    assert held(file) == {b"b0", b"b1", b"b2", b"b3"}


def test_a_record_of_no_worth_is_of_no_use():
    index = index_of(4)
    file = file_of(index)
    put(index, file, b"a")
    (record,) = index.take_changes().values()
    assert record is not None
    damaged = record[:12] + b"\xff" * 8 + record[20:]
    again = index_of(4)
    assert again.restore(file_of(again), {b"a": damaged, b"b": record[:20]}, 4) == 2
