"""A folder on disk gives back exactly what was written, or nothing, whatever happened to its files."""

from __future__ import annotations

import contextlib
import errno
import random
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.transfer.segment import Segment
from services.kvstore import disk_folder
from services.kvstore.disk_files import SlotFile, slot_bytes_of
from services.kvstore.disk_folder import Copy, DiskFolder, DiskUnavailable, Outcome
from services.kvstore.disk_index import DiskFile
from services.kvstore.index_file import NAME
from tests.fixtures.tmpfs import small_tmpfs

BLOCK_BYTES = 8192
NUM_BLOCKS = 16
BLOCKS = {b"%016d" % i: random.Random(i).randbytes(BLOCK_BYTES) for i in range(NUM_BLOCKS)}
HASHES = list(BLOCKS)


@pytest.fixture
def segment() -> Iterator[Segment]:
    """The store's memory: block i in slot i."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        made = Segment.create(
            directory, "store", num_blocks=2 * NUM_BLOCKS, block_bytes=BLOCK_BYTES, fingerprint="m", sparse=True
        )
        for slot, block in enumerate(BLOCKS.values()):
            made.back(slot)
            made.back(NUM_BLOCKS + slot)
            made.write_block(slot, bytearray(block))
        yield made
        made.close()


def opened(path: Path, capacity_bytes: int = 1 << 20) -> DiskFolder:
    return DiskFolder.open(path, capacity_bytes=capacity_bytes, clock=lambda: 0.0, active_s=60.0)


def file_of(folder: DiskFolder, fingerprint: str = "m") -> DiskFile:
    file = folder.file(fingerprint, BLOCK_BYTES)
    assert file is not None
    return file


def write(folder: DiskFolder, segment: Segment, hashes: list[bytes], fingerprint: str = "m") -> Outcome:
    """As the tier does it: what is evicted leaves the index before anything is written."""
    file, index = file_of(folder, fingerprint), folder.index
    copies: list[Copy] = []
    for block_hash in hashes:
        block = index.reserve(file, block_hash, b"", zlib.crc32(BLOCKS[block_hash]))
        if block is not None:
            copies.append(Copy(file, block_hash, block, segment, HASHES.index(block_hash)))
    clear = [(other, other.to_clear) for other in index.files.values()]
    for other, _ in clear:
        other.to_clear = []
    outcome, _ = folder.write(copies, clear, [], index.take_changes())
    for number, copy in enumerate(copies):
        (index.commit if number < outcome.done else index.abandon)(file, copy.block_hash)
    for other, slots in clear:
        index.cleared(other, slots)
    folder.write([], [], [], index.take_changes())
    index.check()
    return outcome


def read(folder: DiskFolder, segment: Segment, hashes: list[bytes], fingerprint: str = "m") -> list[bytes]:
    """The hashes that come back right. One that comes back wrong fails the test."""
    file, found = file_of(folder, fingerprint), list[bytes]()
    for block_hash in hashes:
        block = file.find(block_hash)
        if block is None:
            continue
        slot = NUM_BLOCKS + HASHES.index(block_hash)
        if folder.read([Copy(file, block_hash, block, segment, slot)]).done:
            into = bytearray(BLOCK_BYTES)
            segment.read_block(slot, into)
            assert into == BLOCKS[block_hash]
            found.append(block_hash)
    return found


def block_file(path: Path) -> Path:
    (found,) = path.glob("*.blocks")
    return found


def test_blocks_come_back_after_the_folder_was_closed(tmp_path: Path, segment: Segment):
    folder = opened(tmp_path / "kv")
    assert write(folder, segment, HASHES).done == NUM_BLOCKS
    assert read(folder, segment, HASHES) == HASHES
    folder.close()
    folder.close()
    again = opened(tmp_path / "kv")
    assert again.index.num_blocks == NUM_BLOCKS
    assert read(again, segment, HASHES) == HASHES
    again.close()
    assert {path.stat().st_mode & 0o077 for path in (tmp_path / "kv").iterdir() if path.name != "format"} == {0}


def test_blocks_of_another_model_layout_or_version_are_never_found(
    tmp_path: Path, segment: Segment, monkeypatch: pytest.MonkeyPatch
):
    folder = opened(tmp_path / "kv")
    write(folder, segment, HASHES[:4])
    assert read(folder, segment, HASHES, "another model") == []
    assert folder.file("m", BLOCK_BYTES // 2) is None, "another layout under the same name"
    folder.close()
    monkeypatch.setattr(disk_folder, "version", lambda: "99.0")
    later = opened(tmp_path / "kv")
    assert later.index.num_blocks == 0 and read(later, segment, HASHES) == []
    assert list((tmp_path / "kv").glob("*.blocks")) in ([], [(tmp_path / "kv") / f"{file_of(later).identity.hex()}.blocks"])
    later.close()


def test_a_slot_that_holds_another_block_is_not_that_block(tmp_path: Path, segment: Segment):
    folder = opened(tmp_path / "kv")
    write(folder, segment, HASHES[:2])
    file = file_of(folder)
    first, second = (file.blocks[block_hash] for block_hash in HASHES[:2])
    first.slot, second.slot = second.slot, first.slot
    assert read(folder, segment, HASHES) == []
    first.slot, first.checksum = second.slot, second.checksum  # the index names the other block in all but its hash
    assert read(folder, segment, HASHES[:1]) == []
    folder.close()


@pytest.mark.parametrize("place", [0, 9, 40, 63, 64, 5000, 64 + BLOCK_BYTES - 1])
def test_a_flipped_byte_of_a_slot_costs_that_block_alone(tmp_path: Path, segment: Segment, place: int):
    folder = opened(tmp_path / "kv")
    write(folder, segment, HASHES[:4])
    data = bytearray(block_file(tmp_path / "kv").read_bytes())
    data[2 * slot_bytes_of(BLOCK_BYTES) + place] ^= 4
    block_file(tmp_path / "kv").write_bytes(data)
    assert read(folder, segment, HASHES[:4]) == [*HASHES[:2], HASHES[3]]
    folder.close()


def test_a_truncated_file_costs_what_it_has_lost(tmp_path: Path, segment: Segment):
    folder = opened(tmp_path / "kv")
    write(folder, segment, HASHES[:4])
    with block_file(tmp_path / "kv").open("r+b") as file:
        file.truncate(2 * slot_bytes_of(BLOCK_BYTES) + 100)
    assert read(folder, segment, HASHES[:4]) == HASHES[:2], "while it is open"
    folder.close()
    again = opened(tmp_path / "kv")
    assert again.index.num_blocks == 2 and read(again, segment, HASHES[:4]) == HASHES[:2]
    write(again, segment, HASHES[:4])
    assert read(again, segment, HASHES[:4]) == HASHES[:4], "and it is written again"
    again.close()


def test_a_missing_block_file_is_an_empty_one(tmp_path: Path, segment: Segment):
    folder = opened(tmp_path / "kv")
    write(folder, segment, HASHES[:4])
    folder.close()
    block_file(tmp_path / "kv").unlink()
    again = opened(tmp_path / "kv")
    assert again.index.num_blocks == 0 and read(again, segment, HASHES) == []
    again.close()


@pytest.mark.parametrize("seed", range(12))
def test_a_damaged_index_gives_what_is_right_or_nothing(tmp_path: Path, segment: Segment, seed: int):
    folder = opened(tmp_path / "kv")
    write(folder, segment, HASHES)
    folder.close()
    chance, path = random.Random(seed), tmp_path / "kv" / NAME
    data = bytearray(path.read_bytes())
    if seed % 3 == 0:
        del data[chance.randrange(len(data)) :]
    elif seed % 3 == 1:
        for _ in range(50):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    else:
        start = chance.randrange(len(data))
        data[start : start + 4096] = chance.randbytes(len(data[start : start + 4096]))
    path.write_bytes(data)
    again = opened(tmp_path / "kv")  # this process goes on, whatever LMDB does with such a file
    again.index.check()
    read(again, segment, HASHES)
    write(again, segment, HASHES)
    again.close()
    last = opened(tmp_path / "kv")
    read(last, segment, HASHES)
    last.close()


def test_a_folder_of_another_format_is_left_alone(tmp_path: Path, segment: Segment):
    folder = opened(tmp_path / "kv")
    write(folder, segment, HASHES[:2])
    folder.close()
    (tmp_path / "kv" / "format").write_text("penstock-kv 2\n")
    before = block_file(tmp_path / "kv").read_bytes()
    with pytest.raises(DiskUnavailable, match="in the format b'penstock-kv 2"):
        opened(tmp_path / "kv")
    assert block_file(tmp_path / "kv").read_bytes() == before
    (tmp_path / "kv" / "format").write_text(disk_folder.FORMAT)
    opened(tmp_path / "kv").close()


def test_one_folder_is_for_one_store(tmp_path: Path):
    first = opened(tmp_path / "kv")
    with pytest.raises(DiskUnavailable, match="used by another kvstore"):
        opened(tmp_path / "kv")
    first.close()
    opened(tmp_path / "kv").close()


def test_a_folder_that_cannot_be_made_or_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "kv", Path("/proc/kv")):
        with pytest.raises(DiskUnavailable, match="can't be used"):
            opened(path)
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DiskUnavailable, match="can't be used"):
        opened(tmp_path / "kv")
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path):
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(0o777)
    with pytest.raises(DiskUnavailable, match="others may write to it"):
        opened(tmp_path / "kv")
    (tmp_path / "kv").chmod(0o755)
    opened(tmp_path / "kv").close()


def test_a_block_damaged_in_memory_is_not_written(tmp_path: Path, segment: Segment):
    folder = opened(tmp_path / "kv")
    segment.write_block(1, bytearray(b"x"))
    outcome = write(folder, segment, HASHES[:3])
    assert outcome.damaged and outcome.done == 1
    assert read(folder, segment, HASHES) == HASHES[:1]
    folder.close()


def test_what_gives_way_gives_its_space_back(tmp_path: Path, segment: Segment):
    size = slot_bytes_of(BLOCK_BYTES)
    folder = opened(tmp_path / "kv", capacity_bytes=8 * size)
    for start in range(0, NUM_BLOCKS, 4):
        write(folder, segment, HASHES[start : start + 4])
    assert read(folder, segment, HASHES) == HASHES[8:]
    write(folder, segment, HASHES[:4], "n")
    assert len(read(folder, segment, HASHES)) + len(read(folder, segment, HASHES, "n")) == 8
    taken = sum(512 * path.stat().st_blocks for path in (tmp_path / "kv").glob("*.blocks"))
    assert taken <= 8 * size
    folder.close()


def test_a_full_disk_is_an_error_that_keeps_what_was_written(tmp_path: Path, segment: Segment):
    with small_tmpfs(tmp_path / "small", size=128 << 10) as small:
        folder = opened(small / "kv")
        outcome = write(folder, segment, HASHES)
        assert outcome.error is not None and 0 < outcome.done < NUM_BLOCKS
        assert read(folder, segment, HASHES) == HASHES[: outcome.done]
        folder.close()
        again = opened(small / "kv")
        assert read(again, segment, HASHES) == HASHES[: again.index.num_blocks]
        again.close()


def test_a_disk_without_room_for_the_index_is_full(tmp_path: Path, segment: Segment):
    """LMDB calls it an I/O error where some of its pages still fit; it is a disk that has to get room."""
    with small_tmpfs(tmp_path / "small", size=1 << 20) as small:
        folder = opened(small / "kv", capacity_bytes=64 << 10)
        assert write(folder, segment, HASHES[:4]).error is None
        with (small / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
            while True:
                filler.write(bytes(4096))
        with (small / "filler").open("r+b") as filler:
            filler.truncate((small / "filler").stat().st_size - 4096)
        records = {("m", b"%064d" % number): bytes(1000) for number in range(8)}
        outcome, saved = folder.write([], [], [], records)
        assert not saved and outcome.error is not None and outcome.error.errno == errno.ENOSPC
        (small / "filler").unlink()
        assert folder.write([], [], [], records)[1]
        folder.close()


def test_a_full_disk_with_blocks_of_another_version_gets_its_room_back(
    tmp_path: Path, segment: Segment, monkeypatch: pytest.MonkeyPatch
):
    with small_tmpfs(tmp_path / "small", size=1 << 20) as small:
        with monkeypatch.context() as earlier:
            earlier.setattr(disk_folder, "version", lambda: "0.0.1")
            folder = opened(small / "kv")
            assert write(folder, segment, HASHES).error is None
            folder.close()
        with (small / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
            while True:
                filler.write(bytes(4096))
        folder = opened(small / "kv")
        assert folder.index.num_blocks == 0
        assert write(folder, segment, HASHES[:4]).done == 4
        folder.close()


def test_a_file_system_that_takes_no_space_back_keeps_its_blocks_over_a_restart(
    tmp_path: Path, segment: Segment, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    folder = opened(tmp_path / "kv")
    write(folder, segment, HASHES[:4])
    folder.index.forget(file_of(folder), HASHES[1])
    folder.close()
    monkeypatch.setattr(SlotFile, "clear", refuse)
    again = opened(tmp_path / "kv")
    assert read(again, segment, HASHES) == [HASHES[0], *HASHES[2:4]]
    assert caplog.text.count("kv_disk_space_not_given_back") == 1
    again.close()
