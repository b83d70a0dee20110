"""The HTTP edge behind the real server and real sockets, for its tests."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import anyio

from common.runtime import endpoints
from common.runtime.file_limit import FileLimit
from services.gateway.config import GatewayConfig
from services.gateway.intake import Intake
from tests.actors.edge import ScriptedCore, app_of, until

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def serving(
    core: ScriptedCore, *, files: FileLimit | None = None, intake: Intake | None = None, **settings: Any
) -> AsyncIterator[int]:
    """The port of a running server."""
    config = GatewayConfig(**settings)
    listener = endpoints.bind("127.0.0.1", 0, stall_timeout_s=config.slow_reader_timeout_s)
    app = app_of(core, config, intake=intake)
    server = endpoints.HttpServer(app, stall_timeout_s=config.slow_reader_timeout_s, files=files)
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(server.run_until_finished, listener)
            await until(lambda: server.started)
            try:
                yield listener.getsockname()[1]
            finally:
                server.finish(at_once=True)
    finally:
        listener.close()


def request_bytes(body: dict[str, Any], *, path: str = CHAT, version: str = "1.1", more: str = "") -> bytes:
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/{version}\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n{more}\r\n"
    )
    return head.encode() + data


@contextmanager
def asking(port: int, body: dict[str, Any]) -> Iterator[socket.socket]:
    """A connection with a request on it, which nobody reads."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", port))
        connection.sendall(request_bytes(body))
        yield connection


class TcpSocket(NamedTuple):
    """A line of /proc/net/tcp: a connection of the server's, whatever its state, also when no process has it any more."""

    state: int
    send_queue: int


LISTENING = 0x0A
TIME_WAIT = 0x06


def server_sockets(port: int) -> list[TcpSocket]:
    """The kernel's connections at the server's end, those in TIME_WAIT left out."""
    found: list[TcpSocket] = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        state = int(fields[3], 16)
        if int(fields[1].split(":")[1], 16) == port and state not in (LISTENING, TIME_WAIT):
            found.append(TcpSocket(state, int(fields[4].split(":")[0], 16)))
    return found
