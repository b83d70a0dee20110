"""Folders of a bus that `penstock up` starts: room for files and batches, and what killed owners leave."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from common.cli import own_bus


class Disk(msgspec.Struct):
    free: int


def test_a_disk_without_room_for_files_and_batches_is_told_before_the_bus_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(free=4000 << 20))
    assert own_bus.lack_of_room(tmp_path, 3000) == []
    (warning,) = own_bus.lack_of_room(tmp_path, 3001)
    assert str(tmp_path) in warning and "4,000 MiB free" in warning and "--batch-storage-mb 3001" in warning
    (tmp_path / "jetstream" / "jetstream" / "$G" / "streams" / "PENSTOCK_FILES").mkdir(parents=True)
    assert own_bus.lack_of_room(tmp_path, 3001) == [], "its room is taken by itself"
