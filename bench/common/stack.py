"""The processes under test: started, waited for, watched (CPU, memory, engine steps) and stopped."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import anyio

from bench.common.stats import Usage, slope_per_min
from common.cli.net import free_ports as free_ports  # benchmarks take it from here
from common.protocol.errors import ConfigError
from common.runtime import parent_death
from common.runtime.nats_server import find_binary

ROOT = Path(__file__).parents[2]
SAMPLE_S = 1.0
STOP_TIMEOUT_S = 15.0
STEPS = re.compile(rb"^penstock_engine_step_seconds_count(?:\{[^}]*\})? ([0-9.e+]+)", re.MULTILINE)


@dataclass(slots=True)
class Sample:
    """At `at` (seconds since 1970): CPU seconds used so far, resident bytes, engine steps so far (-1: not told)."""

    at: float
    cpu_s: float
    rss: int
    steps: float


@dataclass(slots=True)
class Watched:
    """A process and what it was seen to use."""

    name: str
    pid: int
    metrics_port: int = 0
    samples: list[Sample] = field(default_factory=list)

    def usage(self, begin: float, end: float) -> Usage | None:
        """What it used between two times, in seconds since 1970; None if it was not sampled there."""
        inside = [sample for sample in self.samples if begin <= sample.at <= end]
        if len(inside) < 2:
            return None
        first, last = inside[0], inside[-1]
        megabytes = [(sample.at, sample.rss / 2**20) for sample in inside]
        return Usage(
            cpu_percent=round(100 * (last.cpu_s - first.cpu_s) / (last.at - first.at), 1),
            rss_mb_first=round(megabytes[0][1], 1),
            rss_mb_last=round(megabytes[-1][1], 1),
            rss_mb_max=round(max(size for _, size in megabytes), 1),
            rss_growth_mb_per_min=round(slope_per_min(megabytes), 3),
        )

    def steps_per_s(self, begin: float, end: float) -> float:
        inside = [sample for sample in self.samples if begin <= sample.at <= end and sample.steps >= 0]
        if len(inside) < 2:
            return 0.0
        return (inside[-1].steps - inside[0].steps) / (inside[-1].at - inside[0].at)


@dataclass(slots=True)
class Child:
    """A process of ours, and where it writes."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def check(self) -> None:
        """:raises ConfigError: with its last words, if it has ended."""
        if self.process.poll() is not None:
            raise ConfigError(f"{self.name} ended with status {self.process.returncode}:\n{self.last_words()}")

    def last_words(self) -> str:
        return self.log.read_bytes()[-2000:].decode(errors="replace").strip()


class Stack:
    """Started children, in order, and all processes that are watched: these and others."""

    def __init__(self, folder: Path) -> None:
        """:raises ConfigError: psutil, which watches them, is not installed."""
        self._psutil = psutil_module()
        self.folder = folder
        self.children: list[Child] = []
        self.watched: list[Watched] = []

    def start(self, name: str, module: str, *flags: str, metrics_port: int = 0) -> Child:
        """`python -m module flags…`; its output goes to a file named after it."""
        log = self.folder / f"{name}.log"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", parent_death.PARENT_VARIABLE: str(os.getpid())}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *flags], cwd=ROOT, env=environment, stdout=output, stderr=output
            )
        child = Child(name, process, log)
        self.children.append(child)
        self.watch(name, process.pid, metrics_port=metrics_port)
        return child

    def start_nats(self, port: int) -> Child:
        """A nats-server without credentials; it ends with this process."""
        return self.start("nats", "common.runtime.parent_death", "SIGKILL", str(find_binary()), "-a=127.0.0.1", f"-p={port}")

    def watch(self, name: str, pid: int, *, metrics_port: int = 0) -> None:
        self.watched.append(Watched(name, pid, metrics_port))

    @asynccontextmanager
    async def sampling(self) -> AsyncIterator[None]:
        """Sample what is watched meanwhile."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._sample_for_ever)
            yield
            group.cancel_scope.cancel()

    async def _sample_for_ever(self) -> None:
        while True:
            for watched in list(self.watched):
                try:
                    process = self._psutil.Process(watched.pid)
                    times, memory = process.cpu_times(), process.memory_info()
                except self._psutil.Error:
                    continue
                port = watched.metrics_port
                steps = await anyio.to_thread.run_sync(_steps, port) if port else -1.0
                watched.samples.append(Sample(time.time(), times.user + times.system, memory.rss, steps))
            await anyio.sleep(SAMPLE_S)

    async def wait_ready(self, port: int, timeout_s: float = 120.0) -> None:
        """Until the gateway's canary went through. :raises ConfigError: if a process ends before, or it takes too long."""
        ends_at = time.monotonic() + timeout_s
        while time.monotonic() < ends_at:
            for child in self.children:
                child.check()
            if await anyio.to_thread.run_sync(_is_ready, port):
                return
            await anyio.sleep(0.1)
        said = "".join(f"\n{child.name}:\n{child.last_words()}" for child in self.children)  # their folder goes with us
        raise ConfigError(f"the gateway was not ready within {timeout_s:.0f} s{said}")

    async def stop(self) -> None:
        """SIGTERM, in the reverse order; what has not ended in time is killed."""
        for child in reversed(self.children):
            child.process.terminate()
        with anyio.move_on_after(STOP_TIMEOUT_S):
            for child in self.children:
                await anyio.to_thread.run_sync(child.process.wait, abandon_on_cancel=True)
        for child in self.children:
            if child.process.poll() is None:
                child.process.kill()
                child.process.wait()


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Stack]:
    stack = Stack(folder)
    try:
        yield stack
    finally:
        with anyio.CancelScope(shield=True):
            await stack.stop()


def _get(port: int, path: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        error.close()
        return error.code, b""
    except OSError:
        return 0, b""


def _is_ready(port: int) -> bool:
    return _get(port, "/ready")[0] == 200


def psutil_module() -> ModuleType:
    """:raises ConfigError: it is not installed. Penstock itself does not need it, and `--help` must not."""
    try:
        import psutil
    except ImportError as error:
        raise ConfigError("psutil is not installed here; `pip install 'penstock[bench]'` brings it") from error
    return psutil


def _steps(port: int) -> float:
    found = STEPS.search(_get(port, "/metrics")[1])
    return float(found[1]) if found else -1.0


def quiet_flags(worker_id: str, nats_url: str, model: str, http_port: int) -> Sequence[str]:
    """What every service is given."""
    return (
        f"--nats-url={nats_url}",
        f"--worker-id={worker_id}",
        f"--model={model}",
        f"--http-port={http_port}",
        "--log-level=warning",
    )
