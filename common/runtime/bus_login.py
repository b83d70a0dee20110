"""How a process logs in to the bus: by its settings, or with the credentials that `penstock up` wrote for a bus of its own.

    login = BusLogin(tls_ca="ca.pem", creds="tenant.creds").resolve("tls://nats.example:4222", user="gateway")

`penstock up` keeps the credentials of its bus in a folder that only its user can read, named after host and port. So commands
and workers of that user find them by the bus's address, and nobody has to pass a password on.
"""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from common.models.source import NoHome, default_cache_dir
from common.protocol.errors import ConfigError
from common.runtime import logs
from common.runtime.http_access import is_loopback
from common.runtime.nats_access import Credentials, inbox_prefix, parse_credentials
from common.runtime.nats_url import parts_of, servers, shared_login

log = logs.get("bus_login")

DEFAULT_PORT = 4222
DEFAULT_INBOX_PREFIX = "_INBOX"
PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700


class BusLogin(msgspec.Struct, frozen=True, kw_only=True):
    """Paths, as settings give them; empty: not given."""

    credentials_file: str = ""
    creds: str = ""
    nkey: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""

    @classmethod
    def of_environment(cls, environ: Mapping[str, str]) -> BusLogin:
        """For commands, which have no settings of their own for this."""
        given = {field: environ.get(f"PENSTOCK_NATS_{field.upper()}", "") for field in cls.__struct_fields__}
        return cls(**given)

    def resolve(self, url: str, *, user: str) -> ResolvedLogin:
        """Read what is needed to connect to `url` as `user`: a role or "client".

        :raises ConfigError: a file is missing or wrong, or says something else than another one.
        """
        path = self._path(url, user)
        known = Credentials() if path is None else read_credentials(path)
        creds, nkey = self.creds or known.creds, self.nkey or known.nkey
        if creds and nkey:
            raise ConfigError("both nats_creds and nats_nkey are given: use one of them", param="nats_nkey")
        if (creds or nkey) and importlib.util.find_spec("nkeys") is None:
            raise ConfigError("NATS creds and nkeys need the package nkeys: pip install nkeys", param="nats_nkey")
        options: dict[str, Any] = {}
        if creds:
            options["user_credentials"] = _creds_file(creds)
        elif nkey:
            options["nkeys_seed"] = _nkey_file(nkey)
        elif path is not None and known.user:
            source = _Source(path, known)
            options |= {"user": source.user, "password": source.password}
        elif path is None:
            options |= shared_login(url)
        context = _tls(url, self.tls_ca or known.ca, self.tls_cert or known.cert, self.tls_key or known.key)
        if context is not None:
            options["tls"] = context
        # a role's answers come to where its permissions let it listen, however it logs in
        prefix = known.inbox_prefix or (DEFAULT_INBOX_PREFIX if user == "client" else inbox_prefix(user))
        return ResolvedLogin(options, prefix, known.tenant)

    def _path(self, url: str, user: str) -> Path | None:
        """The file with the credentials of `user`, if there is to be one."""
        if self.credentials_file:
            return Path(self.credentials_file)
        if self.creds or self.nkey or any(parts_of(address).username is not None for address in servers(url)):
            return None
        found = credentials_path(url, user)
        return found if found is not None and found.is_file() else None


class _Source:
    """Credentials that are read again for each connection: a bus that starts again on this machine has new ones."""

    def __init__(self, path: Path, known: Credentials) -> None:
        self._path = path
        self._known = known

    def user(self) -> str:
        try:
            self._known = read_credentials(self._path)
        except ConfigError as error:
            log.debug("credentials_kept", reason=str(error))
        return self._known.user

    def password(self) -> str:
        """Called after `user`, and of the same reading."""
        return self._known.password


class ResolvedLogin(msgspec.Struct, frozen=True):
    """Arguments of nats-py's `connect`, what this connection's inboxes begin with, and which tenant's requests it sends."""

    options: dict[str, Any]
    inbox_prefix: str
    tenant: str = ""


def run_folder(port: int) -> Path:
    """Where a bus that `penstock up` starts on `port` of this machine keeps its configuration and credentials."""
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname()) or "host"
    return default_cache_dir() / "run" / f"{host}-{port}"


def credentials_path(url: str, user: str) -> Path | None:
    """Where the credentials of `user` are if `url` is that of a bus of this user on this machine; None if it can't be one."""
    if len(servers(url)) > 1:  # a cluster is not ours
        return None
    parts = parts_of(url)
    try:
        port = parts.port or DEFAULT_PORT
    except ValueError:
        return None
    try:
        return run_folder(port) / f"{user}.json" if is_loopback(parts.hostname or "") else None
    except NoHome:
        return None


def read_credentials(path: Path) -> Credentials:
    """:raises ConfigError: the file can't be read or holds something else."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}", param="nats_credentials_file") from error
    return parse_credentials(data, str(path))


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user can read, in place of what is there; its folder is private, too.

    :raises ConfigError: it can't be written, or the folder is another user's.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=PRIVATE_FOLDER)
        folder = path.parent.lstat()
        if folder.st_uid != os.getuid():
            raise ConfigError(f"{path.parent} is another user's: remove it, or set PENSTOCK_HOME")
        path.parent.chmod(PRIVATE_FOLDER)
        new = path.with_name(f".{path.name}.{os.getpid()}")
        new.unlink(missing_ok=True)
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, PRIVATE_FILE)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        new.replace(path)
    except OSError as error:
        raise ConfigError(f"can't write {path}: {error.strerror}; set PENSTOCK_HOME to a folder of yours") from error


def _tls(url: str, ca: str, cert: str, key: str) -> ssl.SSLContext | None:
    if not (ca or cert or key or any(parts_of(address).scheme == "tls" for address in servers(url))):
        return None
    if bool(cert) != bool(key):
        raise ConfigError("nats_tls_cert and nats_tls_key are given together or not at all", param="nats_tls_cert")
    for path, setting in ((ca, "nats_tls_ca"), (cert, "nats_tls_cert"), (key, "nats_tls_key")):
        if path:
            _read(path, setting)
    try:
        context = ssl.create_default_context(cafile=ca or None)
        if cert:
            context.load_cert_chain(cert, key, password=_no_password)
    except (ssl.SSLError, OSError) as error:
        reason = getattr(error, "reason", None) or str(error)
        named = " and ".join(path for path in (ca, cert, key) if path)
        raise ConfigError(f"can't use {named} for TLS: {reason}", param="nats_tls_ca") from error
    return context


def _no_password() -> str:
    raise OSError("the key is encrypted: give one that is not")


def _creds_file(path: str) -> str:
    """Return `path`, a file with both parts of creds: nats-py would look for a missing one for ever."""
    data = _read(path, "nats_creds")
    seed = re.search(rb"BEGIN USER NKEY SEED-*\s+(\S+)", data)
    if not re.search(rb"BEGIN NATS USER JWT-*\s+\S", data) or seed is None or not _is_seed(seed[1]):
        raise ConfigError(f"nats_creds: {path} has no JWT and seed of a NATS user", param="nats_creds")
    return path


def _nkey_file(path: str) -> str:
    """Return `path`, a file with a user's seed alone."""
    if not _is_seed(_read(path, "nats_nkey").strip()):
        raise ConfigError(f"nats_nkey: {path} has no seed of a NATS user, which begins with SU", param="nats_nkey")
    return path


def _is_seed(data: bytes) -> bool:
    import nkeys  # slow to import

    try:
        nkeys.from_seed(bytearray(data)).wipe()
    except (nkeys.NkeysError, ValueError):
        return False
    return True


def _read(path: str, setting: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting}: can't read {path}: {error.strerror}", param=setting) from error
