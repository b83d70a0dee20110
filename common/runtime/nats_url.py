"""Addresses of NATS servers: are they any, and how they are shown. A setting names those of a cluster, with commas between."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import SplitResult, urlsplit

from common.protocol.errors import ConfigError

_BETWEEN = re.compile(r",(?=[^@]*?(?:[a-z]+://|$))")
"""A comma between two addresses, and not one of a password, behind which comes its `@`."""


def servers(url: str) -> list[str]:
    """Return the addresses in `url`, one or several with commas between, in the order in which they are tried."""
    return [address for part in _BETWEEN.split(url) if (address := part.strip())] or [url]


def parts_of(address: str) -> SplitResult:
    """Take one address apart, which may be a host alone.

    :raises ValueError: it is none.
    """
    return urlsplit(address if "://" in address else f"nats://{address}")


def shared_login(url: str) -> dict[str, Any]:
    """Return nats-py's options for the user in `url`, if there is one: servers of a cluster that a client hears of from another
    one have none in their addresses. Empty where the addresses name different users, or none.

    :raises ValueError: an address is none.
    """
    found = {(parts.username, parts.password) for parts in map(parts_of, servers(url)) if parts.username is not None}
    if len(found) != 1:
        return {}
    user, password = found.pop()
    return {"token": user} if password is None else {"user": user, "password": password}


def redacted(url: str) -> str:
    """The URL without user and password, for logs."""
    return ",".join(map(_redacted, servers(url)))


def _redacted(address: str) -> str:
    try:
        parts = urlsplit(address)
        if parts.username is not None:
            return f"{parts.scheme}://{parts.hostname}:{parts.port or 4222}"
    except ValueError:  # no URL at all, or a port that is none
        pass
    return address.rpartition("@")[2]


def check_nats_url(url: str) -> None:
    """:raises ConfigError: if `url` has an address that can't be taken apart: a port or an IPv6 address that is none."""
    try:
        for address in servers(url):
            _ = parts_of(address).port
    except ValueError as error:
        raise ConfigError(f"{redacted(url)} is not a NATS URL; try nats://127.0.0.1:4222", param="nats_url") from error
