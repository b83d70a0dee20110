"""The file of `--api-keys`: tenants, their limits, and digests of their keys.

    [tenants.acme]
    requests_per_minute = 600
    tokens_per_minute = 200_000

    [[keys]]
    sha256 = "2c26b46b68ffc68ff99b453c1d304134…"
    tenant = "acme"

A key has 256 random bits, so a plain digest of it tells nothing and needs no salt. A key is looked up by its digest: how long
that takes says something of the digest at most, from which nobody finds a key.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from common.protocol import subjects
from common.protocol.errors import ConfigError, InvalidParameter
from common.runtime.config import unknown
from common.runtime.nats_access import USERS

MAX_TENANTS = 10_000
MAX_KEYS = 100_000
MAX_FILE_BYTES = 64 * 1024 * 1024
MAX_KEY_CHARS = 512
MAX_TENANT_CHARS = 64
KEY_PREFIX = "pk-"
_KEY_BYTES = 32
_SENDABLE = re.compile(rf"[\x21-\x7e]{{1,{MAX_KEY_CHARS}}}")

Limit = Annotated[int, Meta(ge=0, le=2**53)]


class TenantSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tenant's table. A limit of 0 is none.

    `tokens_per_minute`: of prompts and answers. `max_concurrent`: requests at a time. `max_context`: prompt and answer of one
    request. `weight`: its share, beside others', of workers that are busy. `models`: those it may use; empty: all.
    `max_batches`: batches at a time that have not ended. `max_files_mb`: of its files, those that its batches wrote included.
    `dashboard`: whether it may see the dashboard, which shows everyone's requests.
    """

    requests_per_minute: Limit = 0
    tokens_per_minute: Limit = 0
    max_concurrent: Limit = 0
    max_context: Limit = 0
    weight: Annotated[float, Meta(ge=0.001, le=1000)] = 1.0
    models: tuple[str, ...] = ()
    max_batches: Limit = 0
    max_files_mb: Limit = 0
    dashboard: bool = False


class _Key(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    tenant: str
    note: str = ""


class _Tables(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tenants: dict[str, TenantSettings] = {}
    keys: list[_Key] = []


class KeyFile(msgspec.Struct, frozen=True):
    """`tenants` by name; `owners`: whose a key is, by the key's digest."""

    tenants: Mapping[str, TenantSettings]
    owners: Mapping[bytes, str]


def parse(text: str, name: str) -> KeyFile:
    """Return what `text`, the content of the file `name`, says.

    :raises ConfigError: it is no such file; the message says where, and holds no key.
    """
    try:
        content = tomllib.loads(text)
        _check_names(content, name)
        tables = msgspec.convert(content, _Tables)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ConfigError(f"{name}: {error}", param="api_keys") from error
    if len(tables.tenants) > MAX_TENANTS or len(tables.keys) > MAX_KEYS:
        raise ConfigError(f"{name}: at most {MAX_TENANTS} tenants and {MAX_KEYS} keys are taken", param="api_keys")
    if not tables.tenants:  # what is left of a file that somebody is writing
        raise ConfigError(f"{name} has no tenants: `penstock keys add TENANT --file {name}` makes one", param="api_keys")
    for tenant in tables.tenants:
        check_tenant(tenant)
    owners: dict[bytes, str] = {}
    for index, key in enumerate(tables.keys):
        if key.tenant not in tables.tenants:
            raise ConfigError(f"{name}: keys[{index}] is of {key.tenant!r}, and there is no such tenant", param="api_keys")
        if owners.setdefault(bytes.fromhex(key.sha256), key.tenant) != key.tenant:
            raise ConfigError(f"{name}: keys[{index}] is another tenant's, too", param="api_keys")
    return KeyFile(tables.tenants, owners)


def _check_names(content: Mapping[str, Any], name: str) -> None:
    """:raises ConfigError: a table or a tenant's limit has a name that is none; the message has the nearest."""
    for table in content:
        if table not in _Tables.__struct_fields__:
            unknown(f"table in {name}:", table, _Tables.__struct_fields__)
    tenants = content.get("tenants")
    for tenant, limits in tenants.items() if isinstance(tenants, dict) else ():
        for limit in limits if isinstance(limits, dict) else ():
            if limit not in TenantSettings.__struct_fields__:
                unknown(f"limit of tenant {tenant[:100]!r} in {name}:", limit, TenantSettings.__struct_fields__)


def read(path: Path) -> KeyFile:
    """:raises ConfigError: `path` can't be read, or is no file of keys."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes", param="api_keys")
        return parse(content.decode("utf-8-sig"), str(path))
    except OSError as error:
        raise ConfigError(f"can't read {path}, which is to hold API keys: {error.strerror}", param="api_keys") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text", param="api_keys") from error


def check_tenant(name: str) -> str:
    """:raises ConfigError: `name` can't be a tenant's, since it can't be part of a subject."""
    try:
        subjects.token(name, what="tenant")
    except InvalidParameter as error:
        raise ConfigError(f"tenant {name[:100]!r}: {error}", param="api_keys") from error
    if name in USERS:
        raise ConfigError(f"tenant {name!r}: users of the bus have this name", param="api_keys")
    if len(name) > MAX_TENANT_CHARS:
        raise ConfigError(f"tenant {name!r}: at most {MAX_TENANT_CHARS} characters", param="api_keys")
    return name


def check_key(key: str, setting: str) -> str:
    """:raises ConfigError: `key`, given as `setting`, is none that a client can send in a header."""
    if not _SENDABLE.fullmatch(key):
        raise ConfigError(
            f"{setting} must be 1 to {MAX_KEY_CHARS} visible ASCII characters, without spaces or line ends", param=setting
        )
    return key


def digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def new_key() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def lines_for(key: str, tenant: str, *, known: Iterable[str], note: str = "") -> str:
    """Return what to put at the end of a key file so that `key` is `tenant`'s. `known`: the tenants that the file has.

    :raises ConfigError: the tenant's name or the note is none.
    """
    check_tenant(tenant)
    if not note.isprintable():
        raise ConfigError("a note is one line of text", param="note")
    table = "" if tenant in set(known) else f"\n[tenants.{tenant}]\n"
    escaped = note.replace("\\", "\\\\").replace('"', '\\"')
    noted = f'note = "{escaped}"\n' if note else ""
    return f'{table}\n[[keys]]\nsha256 = "{digest(key.encode()).hex()}"\ntenant = "{tenant}"\n{noted}'
