"""What a kvstore takes at most."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from common.transfer import store_capacity
from common.transfer.store_capacity import DEFAULT_BYTES, MIN_BYTES, store_capacity_bytes
from services.kvstore.config import KvstoreConfig

GIB = 1 << 30


class Disk(msgspec.Struct):
    free: int


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """What a folder has free, beside 1 TiB of memory."""
    disk = Disk(free=100 * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk)
    monkeypatch.setattr(store_capacity, "available_memory_bytes", lambda: 1 << 40)
    return disk


def test_what_was_said_holds(tmp_path: Path) -> None:
    assert store_capacity_bytes(3, tmp_path, num_gpus=8) == 3 << 20


def test_by_default_it_is_a_gibibyte(tmp_path: Path, free: Disk) -> None:
    assert store_capacity_bytes(KvstoreConfig().capacity_mb, tmp_path, num_gpus=0) == DEFAULT_BYTES


def test_a_small_folder_is_not_taken_whole(tmp_path: Path, free: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    free.free = 64 << 20  # /dev/shm of a container that was given none
    assert store_capacity_bytes(0, tmp_path, num_gpus=0) == 16 << 20
    free.free = 0
    assert store_capacity_bytes(0, tmp_path, num_gpus=0) == MIN_BYTES
    free.free = 100 * GIB
    monkeypatch.setattr(store_capacity, "available_memory_bytes", lambda: 2 * GIB)
    assert store_capacity_bytes(0, tmp_path, num_gpus=0) == GIB // 2, "the limit of a container's memory"


def test_beside_gpus_it_is_a_quarter_of_what_is_free(tmp_path: Path, free: Disk) -> None:
    assert store_capacity_bytes(0, tmp_path, num_gpus=1) == 25 * GIB
    free.free = GIB
    assert store_capacity_bytes(0, tmp_path, num_gpus=1) == DEFAULT_BYTES


def test_a_folder_that_is_missing_is_somebody_elses_error(tmp_path: Path) -> None:
    assert store_capacity_bytes(0, tmp_path / "missing", num_gpus=1) == DEFAULT_BYTES
