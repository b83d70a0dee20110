"""Where what takes long to make is kept between starts: compiled kernels, and what was measured of them."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

CACHE_VARIABLE = "PENSTOCK_KERNEL_CACHE"
_HOME_VARIABLE = "PENSTOCK_HOME"


def cache_directory() -> Path:
    """Return $PENSTOCK_KERNEL_CACHE, or ~/.cache/penstock/kernels; for a user without a home folder $PENSTOCK_HOME/kernels, or
    else a folder that can't be made."""
    if given := os.environ.get(CACHE_VARIABLE):
        return Path(given)
    try:
        return Path.home() / ".cache" / "penstock" / "kernels"
    except RuntimeError:  # neither HOME nor an entry in the user database: a container that was given a number as its user
        return Path(os.environ.get(_HOME_VARIABLE) or os.devnull) / "kernels"


def not_kept() -> str:
    """Return why nothing can be kept there, and what to do about it; empty where it can."""
    directory = cache_directory()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(4096))  # a full disk takes an empty file
    except OSError as error:
        reason = (error.strerror or "unknown").lower()
        return (
            f"{directory} can't be written ({reason}): set {CACHE_VARIABLE} to a folder of yours, or each start compiles anew"
        )
    return ""


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file of that folder, which other processes find whole or not at all. Where nothing can be kept, do nothing."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
            file.write(data)
        Path(file.name).replace(path)
