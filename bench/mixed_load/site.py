"""The system under load: `penstock up` with two models, two tenants, a bus of its own, and every process supervised.

<folder>/models/<name>/  keys.toml  models.toml  home/  data/  shm/  logs/<process>.log  up.log
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec

from bench.common.stack import ROOT, free_ports
from bench.mixed_load import models
from common.cli.demo import MARK, marked_processes
from common.cli.keys import append
from common.protocol.errors import ConfigError
from common.runtime import api_keys
from common.runtime.bus_login import BusLogin

READY_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 60.0
SEEDS = {"alpha": 1, "beta": 2}
"""The models, and what their weights are drawn from."""
TENANTS = ("acme", "zoo")
WORKER_ID = re.compile(r"--worker-id[= ](\S+)-[0-9a-f]{6}")
NATS_SERVER = re.compile(r"^\S*nats-server -c ")


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """Processes of each model, by role, and of the gateway; settings that every engine gets as lines of TOML.

    `shape`: of models whose weights the engine draws, in place of those made here. `device`: as `penstock up` takes it.
    `disk`: whether the kvstore has a folder on a disk. `hosts`: 2: prefill workers have a shared memory of their own, as on
    another host, and KV goes over NIXL, from the kvstore to them, too.
    """

    gateways: int = 2
    kvstores: int = 1
    workers: dict[str, dict[str, int]] = msgspec.field(
        default_factory=lambda: {
            "alpha": {"prefill": 1, "decode": 2, "draft": 1},
            "beta": {"prefill": 2, "decode": 2, "draft": 0},
        }
    )
    engine: Sequence[str] = ('dtype = "float32"', "threads = 1", "num_blocks = 900", "max_running = 16")
    gateway: Sequence[str] = ("batch_max_running = 2",)
    common: Sequence[str] = ()
    limits: Sequence[str] = ()
    shape: str = ""
    device: str = "cpu"
    disk: bool = False
    hosts: int = 1


@dataclass
class Site:
    """A running system. `keys`: the API key of each tenant, the operator's under the empty name."""

    folder: Path
    http_port: int
    nats_port: int
    mark: str
    keys: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def nats_url(self) -> str:
        return f"nats://127.0.0.1:{self.nats_port}"

    def login(self, user: str) -> BusLogin:
        """What `penstock up` wrote for a tenant, or for the monitor."""
        (path,) = (self.folder / "home").glob(f"run/*-{self.nats_port}/{user}.json")
        return BusLogin(credentials_file=str(path))

    def processes(self) -> dict[str, int]:
        """The pid of each process by its name, without the part of its id that is drawn at each start."""
        found: dict[str, int] = {}
        for pid, line in marked_processes(f"{MARK}={self.mark}"):
            named = WORKER_ID.search(line)
            if named:
                found[named[1]] = pid
            elif NATS_SERVER.match(line):
                found["nats-server"] = pid
            elif " up " in line:
                found["penstock-up"] = pid
        return found


def config_text(folder: Path, sizes: Sizes) -> str:
    """The file of `--config`."""
    lines = [
        "[common]",
        f'shm_dir = "{folder / "shm"}"',
        *sizes.common,
        "[up]",
        f'device = "{sizes.device}"',
        f"gateway = {sizes.gateways}",
        f"kvstore = {sizes.kvstores}",
        "[gateway]",
        f'api_keys = "{folder / "keys.toml"}"',
        *sizes.gateway,
        "[kvstore]",
        "capacity_mb = 64",
    ]
    if sizes.disk:
        lines += [f'kv_disk = "{folder / "kv"}"', "kv_disk_gb = 1"]
    nixl = ['kv_transfer = "nixl"', 'nixl_interface = "lo"', 'nixl_transports = "tcp"'] if sizes.hosts > 1 else []
    lines += nixl
    if sizes.hosts > 1:
        lines += ["[prefill]", f'shm_dir = "{folder / "shm-prefill"}"']
    for name, workers in sizes.workers.items():
        model = f"dummy:{sizes.shape}" if sizes.shape else str(folder / "models" / name)
        lines += ["[[models]]", f'model = "{model}"', f'served_model_name = ["{name}", "{name}-too"]']
        lines += [*(f"{role} = {count}" for role, count in workers.items()), *sizes.engine]
        lines += nixl
    return "\n".join([*lines, ""])


def _prepare(folder: Path, sizes: Sizes) -> dict[str, str]:
    """Write models, keys and settings; return the keys."""
    for name in [] if sizes.shape else sizes.workers:
        models.write(folder / "models" / name, SEEDS[name])
    limits = "".join(f"[tenants.{tenant}]\n" + "".join(f"{line}\n" for line in sizes.limits) for tenant in TENANTS)
    keys_file = folder / "keys.toml"
    keys_file.write_text(limits)
    keys = {tenant: api_keys.new_key() for tenant in TENANTS}
    for tenant, key in keys.items():
        append(keys_file, key, tenant)
    (folder / "models.toml").write_text(config_text(folder, sizes))
    return keys | {"": secrets.token_urlsafe(24)}


@contextmanager
def running(folder: Path, sizes: Sizes) -> Iterator[Site]:
    """A system that is ready; ended with the block.

    :raises ConfigError: if it is not ready in time, or does not end in time; its logs stay in `folder`.
    """
    http_port, nats_port = free_ports(2)
    site = Site(folder, http_port, nats_port, f"mixed-{os.getpid()}-{time.time_ns()}", _prepare(folder, sizes))
    for name in ("shm", "shm-prefill"):
        (folder / name).mkdir()
    flags = ["--config", folder / "models.toml", "--http-port", http_port, "--nats-port", nats_port]
    flags += ["--data-dir", folder / "data", "--log-dir", folder / "logs"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    environment |= {MARK: site.mark, "PENSTOCK_HOME": str(folder / "home"), "PENSTOCK_API_KEY": site.keys[""]}
    with (folder / "up.log").open("wb") as log:
        up = subprocess.Popen(
            [sys.executable, "-m", "common.cli", "up", *map(str, flags)],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        _wait_ready(site, up)
        yield site
    finally:
        up.send_signal(signal.SIGTERM)
        try:
            up.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            up.kill()
            raise ConfigError(f"`penstock up` did not end within {STOP_TIMEOUT_S:.0f} s of SIGTERM") from None


def _wait_ready(site: Site, up: subprocess.Popen[bytes]) -> None:
    ends_at = time.monotonic() + READY_TIMEOUT_S
    while up.poll() is None and time.monotonic() < ends_at:
        try:
            found = httpx.get(f"{site.url}/health", timeout=2).json()["models"]
            if found and all(model["ready"] for model in found) and "ready" in (site.folder / "up.log").read_text():
                return
        except (httpx.HTTPError, KeyError, ValueError):
            pass
        time.sleep(0.2)
    raise ConfigError(f"penstock up is not ready: {(site.folder / 'up.log').read_text(errors='replace')[-2000:]}")
