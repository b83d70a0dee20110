"""HTTP requests that a browser was tricked into, told by their `Host` and `Origin` headers. Pure.

A page of `attacker.example` whose name is made to resolve to 127.0.0.1 (DNS rebinding) reads what it likes from a server on
loopback, but its requests carry `Host: attacker.example`. A page of another site that only sends requests carries its own
`Origin`. Programs other than browsers send no `Origin`, and as `Host` the address they were given.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

from common.protocol.errors import HostNotAllowed, OriginNotAllowed

ANY = "*"

_HOST = re.compile(r"\s*(\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[^\s\[\]:/@]+))(:[0-9]*)?\s*")


class HttpAccess:
    """The rule for one listening address.

    `allowed_hosts`: names that clients may use for this server, `*.example.com` for all below a domain, `*` for every name.
    Addresses and `localhost` are always allowed, for nobody can make them resolve elsewhere. Empty: on loopback no name, on
    any other address every name.
    `allowed_origins`: origins of web pages that may send requests, such as `https://chat.example.com`, or `*`. Pages of this
    host itself may, and those of loopback to a server on loopback.
    """

    def __init__(self, bound_to: str, *, allowed_hosts: Sequence[str] = (), allowed_origins: Sequence[str] = ()) -> None:
        everyone = ANY in allowed_hosts or (not allowed_hosts and not is_loopback(bound_to))
        self._hosts = None if everyone else frozenset(_plain(host) for host in allowed_hosts)
        self._origins = frozenset(origin.lower().rstrip("/") for origin in allowed_origins)

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Look at a request's headers, whose names are lower case.

        :raises HostNotAllowed: the request is meant for another host. :raises OriginNotAllowed: it comes from a page of
            another site.
        """
        hosts: list[str] = []
        origins: list[str] = []
        for name, value in headers:
            if name == b"host":
                hosts.append(value.decode("latin-1"))
            elif name == b"origin":
                origins.append(value.decode("latin-1"))
        for host in hosts:
            self._check_host(host)
        for origin in origins:
            self._check_origin(origin, hosts)

    def _check_host(self, sent: str) -> None:
        host = host_of(sent)
        if self._hosts is None or is_loopback(host) or _is_address(host) or host in self._hosts:
            return
        if any(pattern.startswith("*.") and host.endswith(pattern[1:]) for pattern in self._hosts):
            return
        raise HostNotAllowed(f"this server is not {sent[:100]!r}: use its address, or allow the name with --allowed-hosts")

    def _check_origin(self, sent: str, hosts: Sequence[str]) -> None:
        if ANY in self._origins or sent.lower() in self._origins:
            return
        origin = _host_of_origin(sent)
        here = [host_of(host) for host in hosts]
        if origin and here and all(origin == host or (is_loopback(origin) and is_loopback(host)) for host in here):
            return
        raise OriginNotAllowed(
            f"pages of {sent[:100]!r} may not use this server: --allow-origin lets them use a gateway, --allowed-origins lets "
            "their requests in"
        )


def host_of(header: str) -> str:
    """The host that a `Host` header names, in lower case, without port and brackets; empty if it names none.

    >>> host_of("[::1]:8000"), host_of("LOCALHOST.:8000"), host_of("127.0.0.1")
    ('::1', 'localhost', '127.0.0.1')
    """
    found = _HOST.fullmatch(header)
    return "" if found is None else _plain(found["address"] or found["name"] or "")


def is_loopback(host: str) -> bool:
    """Whether `host` is `localhost` or an address of this machine alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def reachable_host(bound_to: str) -> str:
    """Return where others reach what listens on this address: there, or by the machine's name if it is every address."""
    try:
        everywhere = ipaddress.ip_address(bound_to).is_unspecified
    except ValueError:
        everywhere = not bound_to
    return socket.gethostname() if everywhere else bound_to


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _plain(host: str) -> str:
    return host.strip().lower().removesuffix(".")


def _host_of_origin(origin: str) -> str:
    """Empty for an origin without a host: `null`, `file://`, and what is no origin."""
    try:
        return _plain(urlsplit(origin).hostname or "")
    except ValueError:
        return ""
