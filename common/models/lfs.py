"""Files that Git has not fetched: a clone without Git LFS has some lines of text in place of each large one. Torch-free."""

from __future__ import annotations

from pathlib import Path

_POINTER = b"version https://git-lfs.github.com/spec/"


def pointer_hint(path: Path) -> str:
    """Return what an error about an unreadable file adds if it is such a pointer; else nothing."""
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(_POINTER)) == _POINTER
    except OSError:
        return ""
    return "; it is a Git LFS pointer, and `git lfs pull` fetches the file" if is_pointer else ""
