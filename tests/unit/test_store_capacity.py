"""What a kvstore takes at most."""

from __future__ import annotations

import shutil
from pathlib import Path

from common.transfer.available_memory import available_memory_bytes
from common.transfer.store_capacity import DEFAULT_BYTES, store_capacity_bytes
from services.kvstore.config import KvstoreConfig


def test_what_was_said_holds(tmp_path: Path) -> None:
    assert store_capacity_bytes(3, tmp_path, num_gpus=8) == 3 << 20


def test_by_default_it_is_a_gibibyte() -> None:
    assert store_capacity_bytes(KvstoreConfig().capacity_mb, "/dev/shm", num_gpus=0) == DEFAULT_BYTES


def test_beside_gpus_it_is_a_quarter_of_what_is_free(tmp_path: Path) -> None:
    def free_bytes() -> int:
        return min(size for size in (shutil.disk_usage(tmp_path).free, available_memory_bytes()) if size is not None)

    before = free_bytes()
    found = store_capacity_bytes(0, tmp_path, num_gpus=1)
    most = max(before, free_bytes())
    assert DEFAULT_BYTES <= found <= max(DEFAULT_BYTES, most // 3), "others take and free memory meanwhile"


def test_a_folder_that_is_missing_is_somebody_elses_error(tmp_path: Path) -> None:
    assert store_capacity_bytes(0, tmp_path / "missing", num_gpus=1) == DEFAULT_BYTES
