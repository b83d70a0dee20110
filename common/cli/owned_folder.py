"""Folders that one process has for itself while it lives, and that others remove once it was killed.

    FOLDER/.owner     locked by the process that has the folder

A folder is renamed before it is removed, under its lock: whoever takes it meanwhile makes a new one. What has no lock, as of
earlier versions, is nobody's to remove.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = ".owner"
PRIVATE = 0o700
_WAIT_S = 5.0
_POLL_S = 0.02
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


class FolderTaken(OSError):
    """Another live process has it."""


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Have `folder`, which is made if there is none, until the block ends. Blocks for a moment if another process leaves it.

    :raises FolderTaken: another process has it. :raises OSError: it can't be made or written.
    """
    ends_at = time.monotonic() + _WAIT_S
    while (lock := _taken(folder)) is None:
        if time.monotonic() > ends_at:
            raise FolderTaken(f"another process has {folder}")
        time.sleep(_POLL_S)
    try:
        yield
    finally:
        os.close(lock)


def _taken(folder: Path) -> int | None:
    """Return the locked file; None: another process has it, or has just removed the folder."""
    folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    try:
        lock = os.open(folder / LOCK, _FLAGS | os.O_CREAT, 0o600)
    except FileNotFoundError:
        return None
    if _is_locked(lock, folder):
        return lock
    os.close(lock)
    return None


def _is_locked(lock: int, folder: Path) -> bool:
    """Lock the file that was opened as `lock`; whether that worked, and it is still the one in `folder`."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(lock), (folder / LOCK).lstat())
    except (BlockingIOError, FileNotFoundError):
        return False


def remove(folder: Path) -> None:
    """Remove a folder that this process has, with what is in it."""
    gone = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        folder.rename(gone)
    except OSError:
        return
    shutil.rmtree(gone, ignore_errors=True)


def sweep(folders: Iterable[Path], *, idle_s: float = 0.0) -> list[Path]:
    """Remove this user's `folders` whose owners are dead and in which nothing was written for `idle_s`. Return them."""
    return [folder for folder in folders if _swept(folder, idle_s)]


def _swept(folder: Path, idle_s: float) -> bool:
    try:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            return False
        written_at = max(path.lstat().st_mtime for path in (folder, *folder.iterdir()))
        if idle_s and time.time() - written_at < idle_s:
            return False
        lock = os.open(folder / LOCK, _FLAGS)
    except OSError:
        return False
    try:
        if not _is_locked(lock, folder):
            return False
        remove(folder)
        return True
    except OSError:
        return False
    finally:
        os.close(lock)
