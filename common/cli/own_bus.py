"""The bus that `penstock up` starts: a nats-server with a user and a password for each role, drawn at each start.

<PENSTOCK_HOME>/run/<host>-<port>/      only this user can look into it; gone when `up` has ended
  nats-server.conf                      users, passwords, permissions
  gateway.json … client.json            what each role logs in with; commands find theirs by the bus's address
  <tenant>.json                         what each tenant of --api-keys logs in with
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from common.cli.fleet import UpConfig
from common.protocol.errors import ConfigError
from common.runtime import api_keys
from common.runtime.bus_login import BusLogin, read_credentials, run_folder, write_private
from common.runtime.nats_access import CLIENT, USERS, Credentials, draw_credentials, server_config

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
    port: int, *, clients: Sequence[str], reply_prefixes: Sequence[str], tenants: Collection[str] = ()
) -> Iterator[Path]:
    """The folder of a bus on `port` of this machine, with credentials for every role, further `clients`, and `tenants`.

    :raises ConfigError: it can't be written, or a tenant has another user's name.
    """
    folder = run_folder(port)
    known = draw_credentials(f"nats://127.0.0.1:{port}", (*USERS, *clients), tenants=tenants)
    try:
        for user, credentials in known.items():
            write_private(folder / f"{user}.json", msgspec.json.format(msgspec.json.encode(credentials)).decode())
        write_private(
            config_path(folder),
            f"listen: 127.0.0.1:{port}\nmax_payload: {MAX_PAYLOAD_BYTES}\nmax_pending: {MAX_PENDING_BYTES}\n"
            + server_config(known, reply_prefixes=reply_prefixes),
        )
        yield folder
    finally:
        if _is_ours(folder, known[CLIENT]):  # and not that of a bus that began on this port meanwhile
            shutil.rmtree(folder, ignore_errors=True)


def _is_ours(folder: Path, client: Credentials) -> bool:
    try:
        return read_credentials(folder / f"{CLIENT}.json") == client
    except ConfigError:
        return False


def config_path(folder: Path) -> Path:
    return folder / "nats-server.conf"
