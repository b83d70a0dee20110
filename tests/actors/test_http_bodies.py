"""How bodies reach the HTTP edge: compressed, too large, many at once; and what clients of HTTP/1.0 and hasty ones get."""

from __future__ import annotations

import codecs
import gzip
import json
import socket
import time
import urllib.error
import urllib.request
import zlib
from contextlib import closing
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import httpx
import pytest

from common.runtime import http_protocol
from services.gateway import intake
from services.gateway.config import GatewayConfig
from services.gateway.intake import Intake
from services.gateway.parse import SMALL_BYTES
from tests.actors.edge import MAX_CONTEXT, AsgiClient, ScriptedCore, app_of, until
from tests.actors.http_client import CHAT, COMPLETIONS, HI, check_error, client, config, says
from tests.actors.http_site import request_bytes, server_sockets, serving

MIB = 1024 * 1024


async def post_gzip(core: ScriptedCore, data: bytes, *, encoding: str = "gzip", **settings: Any) -> httpx.Response:
    async with client(core, **settings) as http:
        headers = {"content-type": "application/json", "content-encoding": encoding}
        return await http.post(CHAT, content=data, headers=headers)


# ── compressed ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "GZIP", "identity"])
async def test_a_gzip_body_is_read(encoding: str, mark: bytes) -> None:
    core = ScriptedCore(says("hello", finish="stop"))
    data = mark + json.dumps(HI).encode()
    response = await post_gzip(core, data if encoding == "identity" else gzip.compress(data), encoding=encoding)
    assert response.json()["choices"][0]["message"]["content"] == "hello"


async def test_a_gzip_body_of_several_members_is_read() -> None:
    data = json.dumps(HI).encode()
    members = gzip.compress(data[:10]) + gzip.compress(data[10:20]) + gzip.compress(data[20:])
    assert (await post_gzip(ScriptedCore(says("x")), members)).status_code == 200


@pytest.mark.parametrize("encoding", ["br", "deflate", "zstd", "gzip, gzip", "chunked"])
async def test_another_encoding_is_a_415(encoding: str) -> None:
    check_error(await post_gzip(ScriptedCore(), b"x", encoding=encoding), 415, "unsupported_media_type")


WHOLE = gzip.compress(b"{}", mtime=0)  # names of tests must not have the time in them: processes that run tests compare them


@pytest.mark.parametrize("data", [b"no gzip at all", b"", WHOLE[:-9], WHOLE + b"junk", zlib.compress(b"{}")])
async def test_what_is_no_gzip_is_a_400(data: bytes) -> None:
    check_error(await post_gzip(ScriptedCore(), data), 400, "invalid_parameter")


async def test_a_bomb_is_refused_before_it_has_gone_off(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = gzip.compress(b" " * (128 * MIB))
    assert len(bomb) < MIB
    unpacked = 0
    real = zlib.decompressobj

    class Counting:
        def __init__(self, bits: int) -> None:
            self._real = real(bits)

        def decompress(self, data: bytes, limit: int) -> bytes:
            nonlocal unpacked
            piece = self._real.decompress(data, limit)
            unpacked += len(piece)
            return piece

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

    monkeypatch.setattr(zlib, "decompressobj", Counting)
    check_error(await post_gzip(ScriptedCore(), bomb), 413, "payload_too_large")
    assert unpacked <= 8 * MIB + MIB


# ── too large, from clients of all kinds ─────────────────────────────────────────────────────────────────────────────────


def post_and_close(port: int, size: int) -> tuple[int, str]:
    """urllib says `Connection: close`, sends everything, and only then reads."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{CHAT}", data=b" " * size, headers={"content-type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=20)
    with closing(caught.value) as answer:
        return answer.code, json.loads(answer.read())["error"]["code"]


@pytest.mark.parametrize("size", [100_000, 20 * MIB])
async def test_a_client_that_closes_afterwards_sees_why_its_body_was_refused(size: int) -> None:
    core = ScriptedCore()
    async with serving(core, max_body_bytes=1000) as port:
        for _ in range(5):
            answer = await anyio.to_thread.run_sync(post_and_close, port, size)
            assert answer == (413, "payload_too_large")
        await until(lambda: not server_sockets(port))
    assert not core.streams


@pytest.mark.parametrize("more", ["", "connection: close\r\n"])
async def test_the_rest_of_a_refused_body_is_read_only_so_far(monkeypatch: pytest.MonkeyPatch, more: str) -> None:
    monkeypatch.setattr(http_protocol, "MAX_DISCARD_BYTES", 2 * MIB)
    sent = 0
    async with serving(ScriptedCore(), max_body_bytes=1000) as port, await anyio.connect_tcp("127.0.0.1", port) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {10**9}\r\n{more}\r\n"
        await connection.send(head.encode())
        with anyio.fail_after(10), pytest.raises((anyio.BrokenResourceError, anyio.EndOfStream)):
            while True:
                await connection.send(b" " * 65536)
                sent += 65536
        assert sent < 16 * MIB


async def test_the_rest_of_a_refused_body_is_waited_for_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.3)
    async with serving(ScriptedCore(), max_body_bytes=1000) as port, await anyio.connect_tcp("127.0.0.1", port) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 5000\r\n"
        await connection.send(head.encode() + b"connection: close\r\n\r\n")
        assert b" 413 " in await connection.receive()
        with anyio.fail_after(3), pytest.raises((anyio.BrokenResourceError, anyio.EndOfStream)):
            while True:
                await connection.send(b" ")
                await anyio.sleep(0.05)


# ── HTTP/1.0 ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def exchange(port: int, sent: bytes) -> tuple[bytes, bytes]:
    """(head, body) of the answer, read until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(sent)
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
    head, _, body = received.partition(b"\r\n\r\n")
    return head.lower(), body


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 2])
async def test_a_client_of_http_1_0_gets_no_chunks(path: str, stream: bool, n: int) -> None:
    core = ScriptedCore(says("hello", finish="stop"))
    body = {**(HI if path == CHAT else {"prompt": "hi"}), "stream": stream, "n": n}
    async with serving(core) as port:
        head, answer = await anyio.to_thread.run_sync(exchange, port, request_bytes(body, path=path, version="1.0"))
    assert b" 200 " in head and b"transfer-encoding" not in head
    if stream:
        events = answer.decode().split("\n\n")
        assert all(event.startswith("data: ") for event in events if event)
        assert events[-2] == "data: [DONE]" and "hello" in answer.decode()
    else:
        assert len(json.loads(answer)["choices"]) == n


async def test_errors_and_pages_of_http_1_0() -> None:
    async with serving(ScriptedCore()) as port:
        head, answer = await anyio.to_thread.run_sync(exchange, port, request_bytes({**HI, "n": 0}, version="1.0"))
        assert b" 400 " in head and json.loads(answer)["error"]["param"] == "n"
        head, _ = await anyio.to_thread.run_sync(exchange, port, b"GET /health HTTP/1.0\r\n\r\n")
        assert b" 200 " in head


# ── many at once ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def large(size: int = MIB) -> bytes:
    return b'{"prompt":[' + b"1," * (size // 2) + b"1]}"


async def test_bodies_hold_no_more_memory_than_they_may() -> None:
    """Forty of a megabyte through three: they wait for each other, and all are answered."""
    settings = config(max_bodies_bytes=4 * MIB, max_body_bytes=2 * MIB)
    shared = Intake(settings)
    app = app_of(ScriptedCore(), settings, intake=shared)
    announced = {"content-length": str(len(large()))}
    clients = [AsgiClient(app, COMPLETIONS, large(), headers=announced) for _ in range(40)]
    most = 0

    async def look() -> None:
        nonlocal most
        while True:
            most = max(most, shared.body_bytes)
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        group.start_soon(look)
        async with anyio.create_task_group() as asking:
            for one in clients:
                asking.start_soon(one.run)
        group.cancel_scope.cancel()
    assert {one.status for one in clients} == {400}
    assert MIB < most <= 4 * MIB
    assert shared.body_bytes == 0


async def test_while_large_bodies_wait_small_ones_pass_and_in_the_end_some_are_told_to_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(intake, "WAIT_S", 0.2)
    core = ScriptedCore(says("x", finish="stop"))
    settings = config(max_bodies_bytes=4 * MIB, max_body_bytes=2 * MIB)
    shared = Intake(settings)
    app = app_of(core, settings, intake=shared)
    announced = {"content-length": str(MIB), "content-type": "application/json"}
    slow = [AsgiClient(app, COMPLETIONS, b"", headers=announced) for _ in range(6)]
    for one in slow:
        one.parts_read = 10**6  # its body never comes
    async with anyio.create_task_group() as group:
        for one in slow:
            group.start_soon(one.run)
        await until(lambda: shared.body_bytes >= 3 * MIB - SMALL_BYTES)
        small = AsgiClient(app, CHAT, HI)
        await small.run()
        assert small.status == 200
        await until(lambda: [one.status for one in slow].count(429) == 3, within_s=3)
        refused = next(one for one in slow if one.status == 429)
        assert refused.headers["retry-after"]
        for one in slow:
            one.hang_up()
    assert shared.body_bytes == 0


@pytest.mark.parametrize("leaves", ["reading", "waiting"])
async def test_who_leaves_gives_its_room_back(leaves: str) -> None:
    settings = config(max_bodies_bytes=2 * MIB, max_body_bytes=MIB)
    shared = Intake(settings)
    with shared.room() as first, shared.room() as second:
        await first.wait_for(MIB)
        with anyio.move_on_after(0.05):
            await second.wait_for(MIB)
        assert shared.body_bytes == MIB
    assert shared.body_bytes == 0


async def test_one_large_body_is_decoded_at_a_time_and_others_go_on() -> None:
    core = ScriptedCore(says("x", finish="stop"))
    app = app_of(core, GatewayConfig())
    huge = [AsgiClient(app, COMPLETIONS, large(7 * MIB)) for _ in range(4)]
    for one in huge:
        one.parts_read = 0
        one._parts = [large(7 * MIB)]
    gaps: list[float] = []

    async def beat() -> None:
        while True:
            began = time.monotonic()
            await anyio.lowlevel.checkpoint()
            gaps.append(time.monotonic() - began)

    async with anyio.create_task_group() as group:
        group.start_soon(beat)
        async with anyio.create_task_group() as asking:
            for one in huge:
                asking.start_soon(one.run)
        group.cancel_scope.cancel()
    assert {one.status for one in huge} == {400}
    assert json.loads(huge[0].body)["error"]["code"] == "context_length_exceeded"
    gaps.sort()
    assert gaps[-5] < 0.05, "a turn of the loop is short, but for what else this machine does"


async def test_an_id_list_of_exactly_the_context_is_served_from_a_large_body() -> None:
    core = ScriptedCore(says("x", finish="stop"))
    ids = [1] * (MAX_CONTEXT - 1)
    body = json.dumps({"prompt": ids, "max_tokens": 1, "metadata": {"x": "y" * SMALL_BYTES}}).encode()
    async with client(core) as http:
        response = await http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 200
    assert core.streams[0].request.prompt == ids
    assert response.headers["warning"] == '299 penstock "ignored: metadata"'
