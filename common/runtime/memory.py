"""How much memory this machine, or the container that this process runs in, has left."""

from __future__ import annotations

from pathlib import Path


def available_bytes(root: Path = Path("/")) -> int:
    """Return the smaller of what the kernel reports as available and what the control groups of this process still allow."""
    return min([_of_the_machine(root), *_of_control_groups(root)])


def _of_the_machine(root: Path) -> int:
    """Return what the kernel reports as available; 1 EiB if it reports nothing, so that nothing is refused."""
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return 1 << 60


def _of_control_groups(root: Path) -> list[int]:
    """Return what each control group from this process's to the root still allows, in version 1 or 2."""
    left: list[int] = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return left
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, used = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, used = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(base):
                break
            try:
                limit_bytes, used_bytes = int((folder / limit).read_text()), int((folder / used).read_text())
                left.append(max(0, limit_bytes - used_bytes + _reclaimable(folder)))
            except (OSError, ValueError):  # no such group seen from here, or "max"
                continue
    return left


def _reclaimable(group: Path) -> int:
    """File pages that the kernel gives back when memory is short; counted as used."""
    try:
        for line in (group / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                return int(value)
    except (OSError, ValueError):
        pass
    return 0
