"""How much shared memory a kvstore takes at most, where nobody said it."""

from __future__ import annotations

import shutil
from pathlib import Path

from common.runtime.gpu_claim import count_gpus
from common.transfer.available_memory import available_memory_bytes

DEFAULT_BYTES = 1 << 30
MIN_BYTES = 1 << 20
SHARE = 4
"""A quarter of what is free: KV of GPUs fills memory fast, and workers need the rest of a small /dev/shm for their own KV."""


def store_capacity_bytes(capacity_mb: int, shm_dir: str | Path, *, num_gpus: int | None = None) -> int:
    """Return the capacity that the setting `capacity_mb` means.

    0, what suits: a quarter of the memory that is free now, in `shm_dir` and at all; not more than 1 GiB without GPUs, nor less
    beside them. `num_gpus`: of the machine; None: as many as it shows.
    """
    if capacity_mb:
        return capacity_mb << 20
    directory = Path(shm_dir)
    if not directory.is_dir():
        return DEFAULT_BYTES
    free = [shutil.disk_usage(directory).free, available_memory_bytes()]
    share = min(size for size in free if size is not None) // SHARE
    if count_gpus() if num_gpus is None else num_gpus:
        return max(share, DEFAULT_BYTES)
    return max(min(share, DEFAULT_BYTES), MIN_BYTES)
