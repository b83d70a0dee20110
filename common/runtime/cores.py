"""How many cores this process may keep busy: fewer than the machine has inside a container, a service or under taskset."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> int:
    """Return the cores that this process may run on, or the whole ones of its processor time where control groups limit that
    (`docker run --cpus`, a limit of Kubernetes, CPUQuota): with more threads the kernel stops all of them, each period anew.

    root: where /proc and /sys are.
    """
    return max(1, int(min([float(len(os.sched_getaffinity(0))), *_quotas(root)])))


def _quotas(root: Path) -> Iterator[float]:
    """Yield the limit, in cores, of each control group from this process's to the root, in version 1 or 2."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(base):
                break
            try:
                if controllers:
                    quota, period = (folder / "cpu.cfs_quota_us").read_text(), (folder / "cpu.cfs_period_us").read_text()
                else:
                    quota, period = (folder / "cpu.max").read_text().split()
                if int(quota) > 0:
                    yield int(quota) / int(period)
            except (OSError, ValueError, ZeroDivisionError):  # no such group seen from here, or "max"
                continue
