"""Clients that stop reading cost bounded memory, and nothing of theirs is left after the cut-off, not even in the kernel."""

from __future__ import annotations

import contextlib
import socket
import time

import anyio
import pytest

from common.protocol.errors import DeadlineExceeded
from common.runtime.http_protocol import WRITE_BUFFER_BYTES
from tests.actors.edge import ScriptedCore, ScriptedStream, ids, until
from tests.actors.http_site import HI, asking, request_bytes, server_sockets, serving

READERS = 20
STALL_S = 0.5
SOME = ids("x" * 20_000)
MAX_SEND_QUEUE = 512 * 1024
"""Of one connection, in the kernel: twice SEND_BUFFER_BYTES for its records, and what it rounds up."""
MAX_TAKEN = MAX_SEND_QUEUE + WRITE_BUFFER_BYTES + 4 * len(SOME)
"""Characters of one answer: what is buffered, and what was on its way there."""


async def flood(core: ScriptedCore, *, until_s: float) -> None:
    """Feed every stream faster than anybody reads."""
    ended = time.monotonic() + until_s
    while time.monotonic() < ended and core.live:
        for stream in core.live:
            stream.give(SOME)
        await anyio.sleep(0.01)


@pytest.mark.parametrize("n", [1, 2])
async def test_stalled_streams_are_cut_off_and_leave_nothing_in_the_kernel(n: int) -> None:
    core = ScriptedCore()
    async with serving(core, slow_reader_timeout_s=STALL_S) as port:
        with contextlib.ExitStack() as clients:
            for _ in range(READERS):
                clients.enter_context(asking(port, {**HI, "stream": True, "n": n}))
            await until(lambda: len(core.streams) == READERS * n)
            async with anyio.create_task_group() as group:
                group.start_soon(lambda: flood(core, until_s=10))
                await until(lambda: len(server_sockets(port)) == READERS)
                queued = 0
                while len(core.live) == READERS * n:
                    queued = max([queued, *(found.send_queue for found in server_sockets(port))])
                    await anyio.sleep(0.02)
                assert 0 < queued < MAX_SEND_QUEUE
                await until(lambda: not core.live, within_s=STALL_S + 2)
            await until(lambda: not server_sockets(port), within_s=1.5)
            assert sum(stream.taken for stream in core.streams) < READERS * n * MAX_TAKEN


async def test_a_stalled_whole_answer_is_cut_off_too() -> None:
    def script(stream: ScriptedStream) -> None:
        stream.give(SOME * 40, finish="length")

    core = ScriptedCore(script)
    async with serving(core, slow_reader_timeout_s=STALL_S) as port:
        with contextlib.ExitStack() as clients:
            for _ in range(READERS):
                clients.enter_context(asking(port, HI))
            await until(lambda: sum(found.send_queue > 0 for found in server_sockets(port)) == READERS, within_s=10)
            assert max(found.send_queue for found in server_sockets(port)) < MAX_SEND_QUEUE
            await until(lambda: not server_sockets(port), within_s=STALL_S + 3)
    assert not core.live


@pytest.mark.parametrize("path", ["/metrics", "/v1/models"])
async def test_who_asks_for_pages_and_reads_none_is_cut_off(path: str) -> None:
    """Not only streams: whatever is written waits no longer."""
    async with serving(ScriptedCore(), slow_reader_timeout_s=STALL_S) as port:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", port))
            client.settimeout(0.05)
            asked = 0
            with contextlib.suppress(TimeoutError, ConnectionError):
                while asked < 100_000:
                    client.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode() * 50)
                    asked += 50
                    await anyio.sleep(0.001)
            await until(lambda: not server_sockets(port), within_s=STALL_S + 3)


async def test_an_error_for_a_client_that_does_not_read_waits_for_nobody() -> None:
    core = ScriptedCore()
    async with serving(core, slow_reader_timeout_s=STALL_S) as port:
        with asking(port, {**HI, "stream": True}):
            stream = await core.nth(0)
            for _ in range(100):
                stream.give(SOME)
                await anyio.sleep(0.002)
            stream.give([], error=DeadlineExceeded("late"))
            await until(lambda: not server_sockets(port), within_s=STALL_S + 3)
    assert not core.live


async def test_a_slow_but_steady_reader_is_left_alone() -> None:
    core = ScriptedCore()
    async with serving(core, slow_reader_timeout_s=STALL_S) as port, await anyio.connect_tcp("127.0.0.1", port) as client:
        await client.send(request_bytes({**HI, "stream": True}))
        stream = await core.nth(0)
        ended = time.monotonic() + 3 * STALL_S
        while time.monotonic() < ended:
            stream.give(SOME)
            for _ in range(4):
                await client.receive(65536)
            await anyio.sleep(STALL_S / 10)
        stream.say("the end", finish="stop")
        read = b""
        with anyio.fail_after(10):
            while b"[DONE]" not in read[-200:]:
                read += await client.receive(65536)
    assert b"the end" in read
