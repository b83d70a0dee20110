"""Draft workers that a benchmark starts beside a `penstock up`, with the credentials of that system's bus."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence

import anyio

from bench.common.stack import ROOT
from common.cli.client import connected, watch_presence
from common.runtime.bus_login import run_folder

READY_TIMEOUT_S = 180.0


def draft_worker(module: str, nats_port: int, model: str, worker_id: str, at_port: int = 0) -> list[str]:
    """The command of a draft worker of the system on `nats_port`, which reaches it at another port if `at_port` is given."""
    command = [sys.executable, "-m", module, f"--nats-url=nats://127.0.0.1:{at_port or nats_port}", f"--model={model}"]
    login = f"--nats-credentials-file={run_folder(nats_port) / 'draft.json'}"
    return [*command, login, "--http-port=0", f"--worker-id={worker_id}"]


@contextlib.contextmanager
def running(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that must not end by itself."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
        assert process.poll() is None, f"ended by itself with status {process.returncode}: {' '.join(command)}"
    finally:
        process.terminate()
        process.wait()


async def draft_workers_ready(nats_port: int, count: int) -> None:
    """Wait until as many draft workers said that they are ready, at whatever time. :raises TimeoutError: they do not."""
    ready: set[str] = set()
    with anyio.fail_after(READY_TIMEOUT_S):
        async with connected(f"nats://127.0.0.1:{nats_port}", "bench") as bus:
            while len(ready) < count:
                workers = (await watch_presence(bus, 0.5)).values()
                ready |= {one.worker.id for one in workers if one.worker.role == "draft" and one.state == "ready"}
