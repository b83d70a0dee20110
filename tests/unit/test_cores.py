"""Threads are as many as the processor time that a container or a service has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.runtime.cores import usable_cores


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))


@pytest.mark.parametrize(
    ("cgroup", "files", "cores"),
    [
        ("0::/\n", {}, 64),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 64),
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 2),  # docker run --cpus 2.5
        ("0::/\n", {"cpu.max": "20000 100000\n"}, 1),
        ("0::/a.slice/b.service\n", {"a.slice/cpu.max": "400000 100000\n", "a.slice/b.service/cpu.max": "max 100000\n"}, 4),
        ("0::/seen/outside\n", {"cpu.max": "300000 100000\n"}, 3),
        ("4:memory:/x\n3:cpu,cpuacct:/x\n", {"cpu/x/cpu.cfs_quota_us": "-1\n", "cpu/x/cpu.cfs_period_us": "100000\n"}, 64),
        ("3:cpu,cpuacct:/x\n", {"cpu/x/cpu.cfs_quota_us": "800000\n", "cpu/x/cpu.cfs_period_us": "100000\n"}, 8),
        ("3:cpuset:/\n0::/\n", {"cpu.max": "damaged\n"}, 64),
    ],
)
def test_control_groups_limit_them(tmp_path: Path, cgroup: str, files: dict[str, str], cores: int) -> None:
    for name, text in {"proc/self/cgroup": cgroup, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cores(tmp_path) == cores


def test_a_system_that_says_nothing_has_all_of_them(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == 64
