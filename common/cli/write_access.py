"""`python -m common.cli.write_access FOLDER URL [KEYS]`: the users of a bus in containers, written once before anything else
starts; with a file of keys (`--api-keys`), one for each of its tenants, too.

    FOLDER/nats/nats-server.conf        for the server: users, passwords, permissions
    FOLDER/<user>/login.json            for whoever is that user: mount one of these folders, and no other

What is there already stays, because a server that runs would not hear of new passwords. Remove the folders to draw them anew.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from common.cli.own_bus import MAX_PAYLOAD_BYTES, MAX_PENDING_BYTES, jetstream_config, tenants_of
from common.protocol.errors import PenstockError
from common.runtime.bus_login import write_private
from common.runtime.nats_access import USERS, draw_credentials, server_config

DATA_FOLDER = "/data"
"""Of the server's container: a volume, so that files and batches survive it."""


def write(folder: Path, url: str, tenants: Sequence[str] = ()) -> bool:
    """Return False if every file is there already.

    :raises ConfigError: a file can't be written.
    """
    server = folder / "nats" / "nats-server.conf"
    logins = {user: folder / user / "login.json" for user in (*USERS, *tenants)}
    if all(path.is_file() for path in (server, *logins.values())):
        return False
    known = draw_credentials(url, tenants=tenants)
    for user, path in logins.items():
        write_private(path, msgspec.json.format(msgspec.json.encode(known[user])).decode())
    limits = f"listen: 0.0.0.0:4222\nmax_payload: {MAX_PAYLOAD_BYTES}\nmax_pending: {MAX_PENDING_BYTES}\n"
    write_private(server, limits + jetstream_config(DATA_FOLDER) + server_config(known))
    return True


if __name__ == "__main__":
    try:
        written = write(Path(sys.argv[1]), sys.argv[2], tenants_of(sys.argv[3] if len(sys.argv) > 3 else ""))
    except (PenstockError, IndexError) as error:
        sys.exit(str(error) if isinstance(error, PenstockError) else "usage: write_access FOLDER URL [FILE OF KEYS]")
    sys.stderr.write(f"{'wrote' if written else 'kept'} the credentials in {sys.argv[1]}\n")
