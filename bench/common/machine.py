"""On what a figure was taken: date, commit, machine, card, versions. A figure without these says nothing."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[2]
GPU_FIELDS = "name,driver_version,clocks.max.sm,power.limit,memory.total"


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """`gpus`: what nvidia-smi says of each card; empty without one. `commit` ends in + when files were changed since."""

    taken_at: str
    commit: str
    cpu: str
    cores: int
    load: float
    gpus: list[str]
    versions: dict[str, str]

    def __str__(self) -> str:
        cards = "; ".join(self.gpus) or "no GPU"
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return (
            f"{self.taken_at} · commit {self.commit} · {cards} · {self.cores} cores of {self.cpu}, load {self.load:.1f}"
            f" · {versions}"
        )


def describe(packages: tuple[str, ...] = ("torch", "triton")) -> Machine:
    return Machine(
        taken_at=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        commit=_commit(),
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        load=os.getloadavg()[0],
        gpus=_said(["nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader"]).splitlines(),
        versions={"python": platform.python_version()} | {name: found for name in packages if (found := _version(name))},
    )


def _commit() -> str:
    commit = _said(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]) or "unknown"
    return commit + ("+" if _said(["git", "-C", str(ROOT), "status", "--porcelain", "-uno"]) else "")


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _said(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
