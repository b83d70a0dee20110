"""The bus that `penstock up` starts: a nats-server with a user and a password for each role, drawn at each start.

<PENSTOCK_HOME>/run/<host>-<port>/      only this user can look into it; gone when `up` has ended, or when the next one starts
  nats-server.conf                      users, passwords, permissions
  gateway.json … client.json            what each role logs in with; commands find theirs by the bus's address
  <tenant>.json                         what each tenant of --api-keys logs in with
<PENSTOCK_HOME>/data/<host>-<port>/     files and batches, unless --data-dir names another folder; stays
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from common.cli import owned_folder
from common.cli.up_config import UpConfig
from common.models.naming import expanded
from common.models.source import default_cache_dir
from common.protocol.errors import ConfigError
from common.runtime import api_keys
from common.runtime.bus_login import BusLogin, run_folder, write_private
from common.runtime.nats_access import USERS, draw_credentials, quoted, server_config

MAX_PAYLOAD_BYTES = 8 << 20
"""Prompts travel as token ids, four bytes each: two million of them."""
MAX_PENDING_BYTES = 256 << 20


def check_login(config: UpConfig) -> None:
    """:raises ConfigError: something to log in with is given, but no bus of others to log in to."""
    given = [f"nats_{name}" for name in BusLogin.__struct_fields__ if getattr(config.bus_login, name)]
    if given and not config.nats_url:
        raise ConfigError(f"{given[0]} is for a bus that runs already: name it with --nats-url", param=given[0])
    taken = [name for index, name in enumerate(config.nats_clients) if name in (*USERS, *config.nats_clients[:index])]
    if taken:
        raise ConfigError(f"nats_clients: there is a user {taken[0]} already", param="nats_clients")


def tenants_of(path: str) -> list[str]:
    """The tenants of a file of keys, each of which gets a user; none without a file.

    :raises ConfigError: it can't be read, or is no such file.
    """
    return list(api_keys.read(Path(path)).tenants) if path else []


@contextmanager
def prepared(
    port: int,
    *,
    clients: Sequence[str],
    reply_prefixes: Sequence[str],
    tenants: Collection[str] = (),
    data: Path | None = None,
) -> Iterator[Path]:
    """The folder of a bus on `port` of this machine, with credentials for every role, further `clients`, and `tenants`. `data`:
    where it keeps its streams, by default a folder that goes with the other one.

    :raises ConfigError: it can't be written, another `penstock up` has it, or a tenant has another user's name.
    """
    folder = run_folder(port)
    known = draw_credentials(f"nats://127.0.0.1:{port}", (*USERS, *clients), tenants=tenants)
    if folder.parent.is_dir():
        owned_folder.sweep(folder.parent.iterdir())
    with _owned(folder):
        for user, credentials in known.items():
            write_private(folder / f"{user}.json", msgspec.json.format(msgspec.json.encode(credentials)).decode())
        write_private(
            config_path(folder),
            f"listen: 127.0.0.1:{port}\nmax_payload: {MAX_PAYLOAD_BYTES}\nmax_pending: {MAX_PENDING_BYTES}\n"
            + jetstream_config(str(data or folder / "jetstream"))
            + server_config(known, reply_prefixes=reply_prefixes),
        )
        yield folder


@contextmanager
def _owned(folder: Path) -> Iterator[None]:
    """Have `folder` until the block ends, and remove it then."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(owned_folder.owned(folder))
        except owned_folder.FolderTaken as error:
            raise ConfigError(f"another `penstock up` uses {folder}: choose another port with --nats-port") from error
        except OSError as error:
            raise ConfigError(f"can't write {folder}: {error.strerror}; set PENSTOCK_HOME to a folder of yours") from error
        stack.callback(owned_folder.remove, folder)
        yield


@contextmanager
def data_folder(config: UpConfig, port: int) -> Iterator[Path | None]:
    """Where the bus on `port` keeps files and batches, for as long as it is this process's alone. None: nowhere that lasts,
    since neither a folder nor a port was chosen.

    :raises ConfigError: it can't be written, or another server keeps its own there.
    """
    if not config.data_dir and not config.nats_port:
        yield None
        return
    folder = (
        expanded(config.data_dir, "data_dir").resolve()
        if config.data_dir
        else default_cache_dir() / "data" / run_folder(port).name
    )
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (folder / ".lock").open("a")
    except OSError as error:
        raise ConfigError(
            f"can't write {folder}: {error.strerror}; set PENSTOCK_HOME, or choose another with --data-dir", param="data_dir"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"another `penstock up` keeps its files in {folder}", param="data_dir") from error
        yield folder


def place_of_batches(config: UpConfig) -> str:
    """Return where files and batches are kept, for people; nothing with zero retention, which takes none."""
    if config.zero_retention:
        return ""
    return config.data_dir or "a folder that goes with this process: --data-dir names one that stays"


def lack_of_room(folder: Path, storage_mb: int) -> list[str]:
    """Return a warning if a server that begins to keep files and batches in `folder` will have no room for `storage_mb` of
    them: it takes three quarters of what is free on the disk at most. Return nothing if it has, or keeps some there already."""
    free_mb = shutil.disk_usage(folder).free >> 20
    if storage_mb <= free_mb * 3 // 4 or any(folder.glob("jetstream/jetstream/*/streams/*")):
        return []
    return [
        f"no files and batches: the disk of {folder} has {free_mb:,} MiB free, three quarters of which are less than "
        f"--batch-storage-mb {storage_mb}; set less, or choose another disk with --data-dir"
    ]


def jetstream_config(folder: str) -> str:
    """The `jetstream` block of a nats-server's configuration: what was accepted is on the disk."""
    return f"jetstream {{ store_dir: {quoted(folder)}, sync_interval: always }}\n"


def config_path(folder: Path) -> Path:
    return folder / "nats-server.conf"
