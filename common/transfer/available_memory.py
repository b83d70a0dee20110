"""How much memory this process may still take: the machine's, or what a container or service leaves of it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

_NO_LIMIT = 1 << 60
"""The kernel's word for no limit is a number near 2^63."""


class _Names(NamedTuple):
    """What a version of cgroups calls things."""

    folder: str
    limit: str
    usage: str
    cache: tuple[str, ...]


_VERSIONS = (
    _Names("", "memory.max", "memory.current", ("inactive_file", "active_file")),
    _Names("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)


def available_memory_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that can be taken without killing somebody. None: this system does not say. `root`: where /proc and /sys are."""
    found = [_machine(root / "proc/meminfo"), *(_cgroup(folder, names) for folder, names in _cgroups(root))]
    return min((size for size in found if size is not None), default=None)


def _machine(meminfo: Path) -> int | None:
    try:
        fields = {line.split(":")[0]: line.split()[1] for line in meminfo.read_text().splitlines()}
        return 1024 * (int(fields["MemAvailable"]) + int(fields.get("SwapFree", 0)))
    except (OSError, KeyError, IndexError, ValueError):
        return None


def _cgroups(root: Path) -> list[tuple[Path, _Names]]:
    """The folders that may limit this process. A container sees its own as the root; a service's is below it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[tuple[Path, _Names]] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        names = _VERSIONS[0] if not controllers else _VERSIONS[1] if "memory" in controllers.split(",") else None
        if names is not None:
            base = root / "sys/fs/cgroup" / names.folder
            found += [(base, names), (base / path.lstrip("/"), names)]
    return found


def _cgroup(folder: Path, names: _Names) -> int | None:
    """What the limit leaves; files that are cached count as free, since the kernel gives them up."""
    try:
        limit = (folder / names.limit).read_text().strip()
        if limit == "max" or int(limit) >= _NO_LIMIT:
            return None
        usage = int((folder / names.usage).read_text())
        fields = dict(line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, int(limit) - usage + sum(int(fields.get(name, 0)) for name in names.cache))
    except (OSError, ValueError):
        return None
