"""What a container may still take is known before the kernel kills somebody for taking it."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.protocol.errors import ConfigError
from common.transfer import segment_file
from common.transfer.available_memory import available_memory_bytes
from common.transfer.segment import Segment

GIB = 1 << 30
MEMINFO = "MemTotal: 16777216 kB\nMemFree: 1 kB\nMemAvailable: 8388608 kB\nSwapTotal: 0 kB\nSwapFree: 1048576 kB\n"


def system(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, "proc/self/cgroup": cgroup, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_machine_without_limits_has_what_it_says(tmp_path: Path) -> None:
    root = system(tmp_path, "0::/user.slice\n", {"sys/fs/cgroup/memory.max": "max\n"})
    assert available_memory_bytes(root) == 9 * GIB


def test_a_container_has_what_its_limit_leaves(tmp_path: Path) -> None:
    root = system(
        tmp_path,
        "0::/\n",
        {
            "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory.current": f"{GIB + 3000}\n",
            "sys/fs/cgroup/memory.stat": "anon 5\ninactive_file 1000\nactive_file 2000\n",
        },
    )
    assert available_memory_bytes(root) == GIB


def test_a_service_is_limited_below_the_root(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/system.slice/penstock.service"
    files = {f"{folder}/memory.max": "4096", f"{folder}/memory.current": "5000", f"{folder}/memory.stat": ""}
    assert available_memory_bytes(system(tmp_path, "0::/system.slice/penstock.service\n", files)) == 0


def test_the_older_cgroups_are_read_too(tmp_path: Path) -> None:
    root = system(
        tmp_path,
        "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n",
        {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000\n",
            "sys/fs/cgroup/memory/memory.stat": "cache 7\ntotal_inactive_file 300\ntotal_active_file 100\n",
        },
    )
    assert available_memory_bytes(root) == GIB - 600


def test_a_system_that_says_nothing_is_no_error(tmp_path: Path) -> None:
    assert available_memory_bytes(tmp_path) is None


def test_this_machine_says(tmp_path: Path) -> None:
    assert available_memory_bytes()


def test_a_pool_that_would_get_somebody_killed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_file, "available_memory_bytes", lambda: 3 << 20)
    with pytest.raises(ConfigError, match="3 MiB of memory left, and this worker's KV blocks need 5 MiB: lower kv_cache_mb"):
        Segment.create(tmp_path, "a", num_blocks=4, block_bytes=1 << 20, fingerprint="m")
    assert not list(tmp_path.iterdir())
