"""A folder on disk that keeps KV blocks: its lock, its format, its index, its files. Calls that block say so; they belong in a
thread.

    FOLDER/format         which format this is
    FOLDER/lock           locked by the kvstore that uses the folder, for as long as it lives
    FOLDER/index.lmdb     which block lies where (`index_file.py`)
    FOLDER/*.blocks       the blocks of one fingerprint each (`disk_files.py`)

A block is written first and then put into the index; one that gives way leaves the index before its slot is written again. So a
process that is killed leaves an index that is right. Blocks are not forced to the disk: what a loss of power tears is found by
its checksum, and computed again.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from common.runtime import logs
from common.runtime.version import version
from common.transfer.checksums import crc32
from common.transfer.segment import Segment
from services.kvstore.disk_files import SUFFIX, DamagedBlock, SlotFile, slot_bytes_of
from services.kvstore.disk_index import DiskBlock, DiskFile, DiskIndex
from services.kvstore.index_file import NAME, FileRecord, IndexFile, checked

log = logs.get("kvstore")

FORMAT = "penstock-kv 1\n"
_RECORDS = "records 2"
"""What the index says of a block; blocks with other records are another version's."""
"""Changes with what files and slots look like, and when the kernels write other KV for the same tokens."""
Changes = Mapping[tuple[str, bytes], bytes | None]


class DiskUnavailable(Exception):
    """The folder can't be used; the message says why, and what to do."""


class Copy(msgspec.Struct, frozen=True):
    """One block to copy between a slot on disk and a slot of a segment in shared memory."""

    file: DiskFile
    block_hash: bytes
    block: DiskBlock
    segment: Segment
    segment_slot: int


class Outcome(msgspec.Struct):
    """How many of a list of copies succeeded; the first that did not ended it. `damaged`: its source was not the block."""

    done: int = 0
    damaged: bool = False
    error: OSError | None = None


class DiskFolder:
    """An open folder, whose lock this process has. `index` belongs to the event loop, everything else to one thread at a time,
    but for `read`, which any number of threads may call."""

    def __init__(self, path: Path, lock: int, records: IndexFile, index: DiskIndex) -> None:
        self.path = path
        self.index = index
        self._lock = lock
        self._records = records
        self._slot_files: dict[bytes, SlotFile] = {}
        self._recorded: set[bytes] = set()
        self._opening = threading.Lock()
        self._keeps_space = False

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        capacity_bytes: int,
        clock: Callable[[], float],
        active_s: float,
        weights: dict[bytes, float] | None = None,
    ) -> DiskFolder:
        """Blocks. For the arguments see `DiskIndex`. :raises DiskUnavailable: it can't be used."""
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_owner(path)
            lock = _locked(path)
        except OSError as error:
            raise DiskUnavailable(f"{path} can't be used: {error.strerror}") from error
        try:
            _check_format(path)
            if not checked(path):
                log.error("kv_disk_index_damaged", folder=str(path), lost="every block on disk")
            records = IndexFile(path / NAME, capacity_bytes)
            index = DiskIndex(capacity_bytes=capacity_bytes, clock=clock, active_s=active_s, weights=weights)
            folder = cls(path, lock, records, index)
            folder._load()
            return folder
        except OSError as error:
            os.close(lock)
            raise DiskUnavailable(f"{path} can't be used: {error.strerror or error}") from error
        except BaseException:
            os.close(lock)
            raise

    def file(self, fingerprint: str, block_bytes: int) -> DiskFile | None:
        """Return the file of a fingerprint; None if it has blocks of another size."""
        return self.index.file(fingerprint, identity_of(fingerprint), block_bytes, slot_bytes_of(block_bytes))

    # -- in threads

    def write(
        self, copies: Sequence[Copy], clear: Sequence[tuple[DiskFile, list[int]]], empty: Sequence[DiskFile], changes: Changes
    ) -> tuple[Outcome, bool]:
        """Blocks. Save the changes of the index, give space back, and write blocks; return what became of those, and whether
        the changes were saved."""
        problem = self._try_to_save(changes, empty)
        for file, slots in clear:
            self._clear(file, slots)
        if problem is not None and clear:  # the disk may have been full
            problem = self._try_to_save(changes, empty)
        outcome = Outcome(error=problem)
        if problem is None:
            _copy_all(copies, outcome, self._write_one)
        return outcome, problem is None

    def read(self, copies: Sequence[Copy]) -> Outcome:
        """Blocks. Copy blocks into shared memory; what is not exactly what was written ends it."""
        outcome = Outcome()
        _copy_all(copies, outcome, self._read_one)
        return outcome

    def close(self) -> None:
        """Blocks. Save what has changed, and unlock the folder. Harmless twice."""
        if self._lock < 0:
            return
        self._save_last()
        self._records.close()
        for slots in self._slot_files.values():
            slots.close()
        os.close(self._lock)
        self._lock = -1

    # -- inside

    def _save_last(self) -> None:
        if (error := self._try_to_save(self.index.take_changes(), [])) is not None:
            log.warning("kv_disk_index_not_saved", reason=error.strerror or str(error))

    def _write_one(self, copy: Copy, buffer: bytearray) -> None:
        copy.segment.read_block(copy.segment_slot, buffer)
        if crc32(buffer) != copy.block.checksum:
            raise DamagedBlock("the block in memory is damaged")
        self._slots_of(copy.file).write(copy.block.slot, copy.block_hash, copy.block.checksum, buffer)

    def _read_one(self, copy: Copy, buffer: bytearray) -> None:
        self._slots_of(copy.file).read(copy.block.slot, copy.block_hash, copy.block.checksum, buffer)
        copy.segment.write_block(copy.segment_slot, buffer)

    def _slots_of(self, file: DiskFile) -> SlotFile:
        with self._opening:
            if file.identity not in self._slot_files:
                self._slot_files[file.identity] = SlotFile(self.path, file)
            return self._slot_files[file.identity]

    def _clear(self, file: DiskFile, slots: Sequence[int]) -> None:
        """Give the space of slots back, where the file system can do that."""
        try:
            self._slots_of(file).clear(slots)
        except OSError as error:
            if self._keeps_space:
                return
            self._keeps_space = True  # said once: it is the file system's way
            log.warning("kv_disk_space_not_given_back", file=file.identity.hex(), reason=error.strerror)

    def _try_to_save(self, changes: Changes, empty: Sequence[DiskFile]) -> OSError | None:
        try:
            self._save(changes, empty)
        except OSError as error:
            return error
        return None

    def _save(self, changes: Changes, empty: Sequence[DiskFile]) -> None:
        files: dict[bytes, FileRecord | None] = {file.identity: None for file in empty}
        blocks: dict[bytes, bytes | None] = {}
        for (fingerprint, block_hash), record in changes.items():
            file = self.index.files.get(fingerprint)
            if file is None:
                continue
            if file.identity not in self._recorded:
                files[file.identity] = FileRecord(fingerprint, file.block_bytes, version())
            blocks[file.identity + block_hash] = record
        if files or blocks:
            self._records.save(files, blocks)
        self._recorded |= {identity for identity, record in files.items() if record is not None}
        for file in empty:
            self._recorded.discard(file.identity)
            self._slots_of(file).remove()
            del self._slot_files[file.identity]

    def _load(self) -> None:
        """Take over what an earlier run has left, and remove what nobody can use. :raises OSError: files can't be opened."""
        files, blocks = self._records.load()
        gone: dict[bytes, bytes | None] = {}
        lost = 0
        for identity, record in list(files.items()):
            if identity != identity_of(record.fingerprint):  # another version's, or damaged
                files.pop(identity)
                continue
            found = self.file(record.fingerprint, record.block_bytes)
            assert found is not None
            slots = self._slots_of(found)
            lost += self.index.restore(found, blocks.pop(identity, {}), slots.num_slots)
            self._clear(found, found.free)
        for identity, others in blocks.items():
            gone |= {identity + block_hash: None for block_hash in others}
        self._recorded = set(files)
        if gone or lost:
            log.warning("kv_disk_blocks_of_no_use", folder=str(self.path), other_version=len(gone), damaged=lost)
        known = {identity.hex() for identity in files}
        for path in self.path.glob(f"*{SUFFIX}"):  # first: on a full disk the index needs their room to become smaller
            if path.name.removesuffix(SUFFIX) not in known:
                path.unlink()
        self._records.save(dict.fromkeys(blocks), gone)
        self.index.shrink_to_limit()


def identity_of(fingerprint: str) -> bytes:
    """Return 16 bytes that name what may be found under a fingerprint: its model, precision and layout, as this version of
    Penstock computes them."""
    return hashlib.blake2b(fingerprint.encode(), digest_size=16, key=f"{FORMAT}{_RECORDS}{version()}".encode()[:64]).digest()


def _copy_all(copies: Sequence[Copy], outcome: Outcome, copy_one: Callable[[Copy, bytearray], None]) -> None:
    buffer = bytearray()
    for copy in copies:
        if len(buffer) != copy.file.block_bytes:
            buffer = bytearray(copy.file.block_bytes)
        try:
            copy_one(copy, buffer)
        except DamagedBlock:
            outcome.damaged = True
            return
        except OSError as error:
            outcome.error = error
            return
        outcome.done += 1


def _check_owner(path: Path) -> None:
    """:raises DiskUnavailable: others could plant files there."""
    found = path.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise DiskUnavailable(f"{path} belongs to another user, or others may write to it: chown it, or chmod go-w")


def _locked(path: Path) -> int:
    """:raises DiskUnavailable: another kvstore uses the folder. :raises OSError: it can't be written."""
    lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise DiskUnavailable(f"{path} is used by another kvstore: give each a folder of its own") from error
    return lock


def _check_format(path: Path) -> None:
    """:raises DiskUnavailable: the folder holds something else. :raises OSError: it can't be read or written."""
    marker = path / "format"
    if marker.exists():
        said = marker.read_bytes()[:64]
        if said != FORMAT.encode():
            raise DiskUnavailable(
                f"{path} has KV in the format {said!r}, and this version reads {FORMAT.encode()!r}: "
                "name another folder, or remove this one"
            )
        return
    draft = path / "format.new"
    draft.write_text(FORMAT)
    draft.replace(marker)
