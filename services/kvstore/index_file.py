"""The index of a KV folder on disk, an LMDB file: which files there are, and which block lies in which slot.

LMDB survives a process that is killed and a machine that loses power, but it trusts its pages: on damaged ones it may crash the
process that reads them. So a process of its own reads a file that an earlier run left, and copies what it could read
(`python -m services.kvstore.index_file FROM TO`). What that does not survive is not opened here. Every call blocks.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import lmdb
import msgspec

from common.runtime.python_module import python_module

NAME = "index.lmdb"
COPY_NAME = "index.new"
CHECK_TIMEOUT_S = 120.0
MAX_HASH_BYTES = 64
NO_COPY = 3
"""The exit status of a process that could read the index, and not write a copy: the disk is full."""
_HEAD_BYTES = 64 << 20
_FULL_BYTES = 128 << 10
"""A disk with less free space is full."""
_DATABASES = (b"files", b"blocks")


class FileRecord(msgspec.Struct, frozen=True):
    """What the index says of a file: `version` is the Penstock that wrote it."""

    fingerprint: str
    block_bytes: int
    version: str


class IndexFile:
    """An open index; one thread at a time may call. Errors of LMDB are raised as OSError."""

    def __init__(self, path: Path, capacity_bytes: int) -> None:
        """:raises OSError: it can't be opened or made."""
        self._path = path
        try:
            self._environment = _open(path, _map_bytes(capacity_bytes))
            self._files, self._blocks = (self._environment.open_db(name) for name in _DATABASES)
        except lmdb.Error as error:
            raise OSError(f"{path} can't be opened: {error}") from error

    def load(self) -> tuple[dict[bytes, FileRecord], dict[bytes, dict[bytes, bytes]]]:
        """Return the files by identity, and the blocks' records by identity and hash; what can't be decoded is left out."""
        decoder = msgspec.msgpack.Decoder(FileRecord)
        files: dict[bytes, FileRecord] = {}
        blocks: dict[bytes, dict[bytes, bytes]] = {}
        with self._environment.begin() as transaction:
            for key, value in transaction.cursor(self._files):
                try:
                    files[bytes(key)] = decoder.decode(value)
                except (msgspec.MsgspecError, UnicodeDecodeError):
                    continue
            for key, value in transaction.cursor(self._blocks):
                blocks.setdefault(bytes(key[:16]), {})[bytes(key[16:])] = bytes(value)
        return files, blocks

    def save(self, files: Mapping[bytes, FileRecord | None], blocks: Mapping[bytes, bytes | None]) -> None:
        """Write records, or delete those that are None, all or none of them. :raises OSError: nothing was written; ENOSPC or
        EDQUOT: the disk is full."""
        try:
            with self._environment.begin(write=True) as transaction:
                for key, value in files.items():
                    if value is None:
                        transaction.delete(key, db=self._files)
                    else:
                        transaction.put(key, msgspec.msgpack.encode(value), db=self._files)
                for key, record in blocks.items():
                    if record is None:
                        transaction.delete(key, db=self._blocks)
                    else:
                        transaction.put(key, record, db=self._blocks)
        except lmdb.Error as error:
            raise OSError(self._errno_of(error), f"the index can't be written: {error}") from error

    def _errno_of(self, error: lmdb.Error) -> int:
        """Return the error number that LMDB names in its message. It says EIO as well where only some of its pages fit."""
        said = next((code for code in (errno.ENOSPC, errno.EDQUOT) if os.strerror(code) in str(error)), errno.EIO)
        disk = os.statvfs(self._path)
        return errno.ENOSPC if said == errno.EIO and disk.f_bavail * disk.f_frsize < _FULL_BYTES else said

    def close(self) -> None:
        self._environment.close()


def checked(folder: Path) -> bool:
    """Replace the index of `folder` by a copy of what a process of its own read of it, where there is room for one.

    False: it is damaged, and is gone; True also where there is none. :raises OSError: the folder can't be read or written.
    """
    path, copy = folder / NAME, folder / COPY_NAME
    copy.unlink(missing_ok=True)
    if not path.exists():
        return True
    command = python_module("services.kvstore.index_file", [str(path), str(copy)])
    try:
        status = subprocess.run(command, capture_output=True, timeout=CHECK_TIMEOUT_S).returncode
    except subprocess.TimeoutExpired:
        status = -1
    if status == 0:
        copy.replace(path)
        return True
    copy.unlink(missing_ok=True)
    if status != NO_COPY:
        path.unlink()
    return status == NO_COPY


def _copy(source: Path, target: Path) -> int:
    """Read everything in `source`, and write it to a new file; return the exit status. It may crash on what is damaged."""
    size = max(_HEAD_BYTES, 2 * source.stat().st_size)
    found: dict[bytes, list[tuple[bytes, bytes]]] = {}
    old = _open(source, size, readonly=True)
    for name in _DATABASES:
        try:
            database = old.open_db(name, create=False)
        except lmdb.NotFoundError:
            continue
        with old.begin() as transaction:
            found[name] = list(transaction.cursor(database))
    try:
        new = _open(target, size)
        for name, records in found.items():
            database = new.open_db(name)
            with new.begin(write=True) as transaction:
                for key, value in records:
                    transaction.put(key, value, db=database)
        new.sync(True)
        new.close()
    except lmdb.Error:
        return NO_COPY
    return 0


def _open(path: Path, map_bytes: int, *, readonly: bool = False) -> lmdb.Environment:
    # no locks: the folder's own lock keeps other processes out, and one thread at a time calls
    return lmdb.open(
        str(path),
        subdir=False,
        lock=False,
        readonly=readonly,
        max_dbs=2,
        map_size=map_bytes,
        metasync=False,
        mode=0o600,
        readahead=False,
    )


def _map_bytes(capacity_bytes: int) -> int:
    """Address space for the index: blocks take a page at least, and a record some 100 bytes."""
    return _HEAD_BYTES + capacity_bytes // 16


if __name__ == "__main__":
    os.umask(0o077)
    sys.exit(_copy(Path(sys.argv[1]), Path(sys.argv[2])))
