"""Ports of this machine, and the one HTTP request that the commands need: is the gateway ready?"""

from __future__ import annotations

import socket

import anyio

from common.protocol.errors import ConfigError


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on. Another process may take it first; then the server that wanted it says so."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def claim_port(port: int, flag: str, *, host: str = "127.0.0.1", hint: str = "") -> int:
    """`port` if it is free, any free one for 0.

    :raises ConfigError: if it is in use; the message names the flag.
    """
    if port == 0:
        return free_port(host)
    if not is_free(port, host):
        raise ConfigError(f"port {port} is in use: stop what listens there or choose another with {flag}{hint}", param=flag)
    return port


async def http_status(port: int, path: str, *, host: str = "127.0.0.1", timeout_s: float = 2.0) -> int:
    """The status of `GET path`; 0 when nothing answers."""
    request = f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n"
    try:
        with anyio.fail_after(timeout_s):
            async with await anyio.connect_tcp(host, port) as stream:
                await stream.send(request.encode())
                line = await stream.receive(64)
    except (OSError, TimeoutError, anyio.EndOfStream, anyio.BrokenResourceError):
        return 0
    parts = line.split(b" ")
    return int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else 0
