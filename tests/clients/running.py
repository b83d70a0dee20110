"""A whole Penstock as its users start it, in its own interpreter: clients know it by its URL and its key alone."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("SERVER_PYTHON") or str(ROOT / ".venv" / "bin" / "python")
"""The interpreter that Penstock is installed for."""

MODEL = "smollm2-135m-instruct"
KEY = "sk-penstock"
PAGE = "https://chat.example"
"""Whose pages may use the API of `penstock`."""
SIMULATED = {"PENSTOCK_ENGINE": "simulated", "PENSTOCK_TIME_SCALE": "0"}
START_TIMEOUT_S = 270.0
STOP_TIMEOUT_S = 30.0


class CommandFailed(Exception):
    """A client's command said so, by its exit status."""


@dataclass(frozen=True)
class Penstock:
    """`url` has no path; `v1` is what OpenAI's clients call the base URL."""

    url: str

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"


@contextlib.contextmanager
def penstock_up(*flags: str, environment: Mapping[str, str] | None = None) -> Iterator[Penstock]:
    """`penstock up` with an API key, ready; ended with the block."""
    folder = Path(tempfile.mkdtemp(prefix="penstock-clients-"))
    port, nats_port = free_ports(2)
    command = [PYTHON, "-m", "common.cli", "up", "--http-port", str(port), "--nats-port", str(nats_port)]
    command += ["--served-model-name", MODEL, "--kv-cache-mb", "256", "--log-dir", str(folder / "logs")]
    command += ["--data-dir", str(folder / "data"), *flags]
    shm_dir = folder / "shm"
    shm_dir.mkdir()
    with (folder / "up.log").open("wb") as log:
        up = subprocess.Popen(
            [*command, "--shm-dir", str(shm_dir)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PENSTOCK_API_KEY": KEY, **(environment or {})},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    site = Penstock(f"http://127.0.0.1:{port}")
    try:
        _wait_ready(site, up, folder / "up.log")
        yield site
    finally:
        if up.poll() is None:
            up.terminate()
            try:
                up.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                up.kill()
                up.wait()
        shutil.rmtree(folder, ignore_errors=True)


def script(name: str, *arguments: str) -> str:
    """A command that a package of this virtual environment brought, run to its end; its output."""
    command = [str(Path(sys.executable).parent / name), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if ended.returncode != 0:
        raise CommandFailed(f"{command}\n{ended.stdout[-6000:]}\n{ended.stderr[-6000:]}")
    return ended.stdout


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def _wait_ready(site: Penstock, up: subprocess.Popen[bytes], log: Path) -> None:
    ended = time.monotonic() + START_TIMEOUT_S
    while up.poll() is None and time.monotonic() < ended:
        with contextlib.suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(f"{site.url}/ready", timeout=5).close()
            return
        time.sleep(0.2)
    raise AssertionError(f"not ready:\n{log.read_text()[-4000:]}")
