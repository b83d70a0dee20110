"""Ports of this machine, and the one HTTP request that the commands need: is the gateway ready?"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import anyio

from common.protocol.errors import ConfigError
from common.runtime.http_access import is_loopback

_SHORT_BYTES = 4096


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen there now."""
    try:
        _bound(port, host).close()
    except OSError:
        return False
    return True


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on. Another process may take it first; then the server that wanted it says so."""
    with _bound(0, host) as probe:
        return int(probe.getsockname()[1])


def free_ports(count: int) -> list[int]:
    """So many of them, no two alike: one that was free and is not held yet may be given again."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


@contextlib.contextmanager
def claimed_port(port: int, flag: str, *, host: str = "127.0.0.1", hint: str = "") -> Iterator[int]:
    """Have `port` if it is free, any free one for 0. Until the end no other process is given it as a free one, while a server
    that sets SO_REUSEADDR may listen there, and again after a crash: the socket that keeps it does not listen.

    :raises ConfigError: if nothing can listen there; the message says what to change.
    """
    try:
        claim = _bound(port, host)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            advice = f"stop what listens there or choose another with {flag}{hint}"
            raise ConfigError(f"port {port} is in use: {advice}", param=flag) from error
        if error.errno == errno.EACCES:
            raise ConfigError(f"port {port} is for root alone: choose one from 1024 up with {flag}", param=flag) from error
        reason = (error.strerror or "unknown").lower()
        raise ConfigError(f"can't listen on {host}: {reason}; is it an address of this machine?", param=flag) from error
    with claim:
        yield int(claim.getsockname()[1])


def _bound(port: int, host: str) -> socket.socket:
    """A socket with that port, any free one for 0, which does not listen.

    :raises OSError: it can't be had.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound


def reachable(host: str) -> str:
    """An address under which this machine reaches a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def may_use_proxy(url: str) -> bool:
    """Whether the environment's proxy may lead to a server: not to one of this machine.

    :raises ConfigError: it may, and the environment names one that can't be used.
    """
    if is_loopback(urlsplit(url).hostname or ""):
        return False
    import httpx  # slow to import

    try:
        httpx.AsyncClient()
    except (ImportError, ValueError, httpx.InvalidURL) as error:  # SOCKS without its package, an unknown scheme
        raise ConfigError(f"a proxy of the environment (http_proxy, https_proxy, all_proxy) can't be used: {error}") from error
    return True


async def http_status(port: int, path: str, *, host: str = "127.0.0.1", timeout_s: float = 2.0) -> int:
    """The status of `GET path`; 0 when nothing answers."""
    return (await http_reply(port, path, host=host, timeout_s=timeout_s))[0]


async def http_reply(port: int, path: str, *, host: str = "127.0.0.1", timeout_s: float = 2.0) -> tuple[int, str]:
    """The status of `GET path` and the first line of a short answer; 0 when nothing answers."""
    answer = b""
    named = f"[{host}]" if ":" in host else host
    request = f"GET {path} HTTP/1.1\r\nHost: {named}:{port}\r\nConnection: close\r\n\r\n"
    try:
        with anyio.fail_after(timeout_s):
            async with await anyio.connect_tcp(host, port) as stream:
                await stream.send(request.encode())
                while len(answer) < _SHORT_BYTES:
                    answer += await stream.receive(_SHORT_BYTES)
    except (OSError, TimeoutError, anyio.EndOfStream, anyio.BrokenResourceError):
        pass  # what has come counts
    head, _, body = answer.partition(b"\r\n\r\n")
    parts = head.split(b" ", 2)
    status = int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else 0
    return status, body.decode(errors="replace").partition("\n")[0]
