"""The HTTP edge behind the real server and real sockets: what the ASGI-level tests take for granted about it."""

from __future__ import annotations

import re

import anyio
import httpx
import pytest

from common.runtime import http_protocol
from tests.actors.edge import ScriptedCore, ids, until
from tests.actors.http_site import CHAT, HI, asking, request_bytes, serving


async def test_one_connection_serves_one_request_after_another() -> None:
    core = ScriptedCore(lambda stream: stream.say("hello", finish="stop"))
    async with serving(core) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        for stream in (True, False, True):
            response = await client.post(CHAT, json={**HI, "stream": stream})
            assert response.status_code == 200
            assert "hello" in response.text
        assert (await client.post(CHAT, json={**HI, "n": 0})).status_code == 400
    assert not core.live


async def test_a_connection_may_be_idle_for_longer_than_clients_keep_one() -> None:
    core = ScriptedCore(lambda stream: stream.say("hello", finish="stop"))
    async with serving(core) as port:
        stream = await anyio.connect_tcp("127.0.0.1", port)
        for idle_s in (6, 0):  # httpx, and with it openai, gives a connection up after 5 s
            await stream.send(request_bytes(HI))
            assert b"hello" in await stream.receive()
            await anyio.sleep(idle_s)
        await stream.aclose()


@pytest.mark.parametrize("cut", [0, 60, -30, None])
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_request_that_offers_http_2_keeps_its_body(cut: int | None, chunked: bool) -> None:
    """Java's client offers it with each first request to a plain address, and sends head and body apart."""
    core = ScriptedCore(lambda stream: stream.say("hello", finish="stop"))
    offer = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n"
    head, body = request_bytes(HI).split(b"\r\n\r\n")
    if chunked:
        head = re.sub(rb"content-length: \d+", b"transfer-encoding: chunked", head, flags=re.IGNORECASE)
        body = b"5\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n" % (body[:5], len(body) - 5, body[5:])
    request = head + b"\r\n" + offer + b"\r\n" + body
    cut = len(request) - len(body) if cut is None else cut
    async with serving(core) as port, await anyio.connect_tcp("127.0.0.1", port) as connection:
        for _ in range(2):
            await connection.send(request[:cut] or request)
            if cut:
                await anyio.sleep(0.02)
                await connection.send(request[cut:])
            with anyio.fail_after(5):
                answer = await connection.receive()
            assert answer.startswith(b"HTTP/1.1 200") and b"hello" in answer
        await connection.send(request_bytes(HI))
        with anyio.fail_after(5):
            assert b"hello" in await connection.receive()
    assert len(core.streams) == 3


async def test_a_closed_connection_frees_its_request_within_a_second() -> None:
    core = ScriptedCore()
    async with serving(core) as port:
        for stream in (True, False):
            with asking(port, {**HI, "stream": stream}):
                scripted = await core.nth(len(core.streams))
                scripted.say("a")
                await anyio.sleep(0.01)
            await until(lambda: not core.live, within_s=1)


async def test_a_connection_that_reads_nothing_is_cut_off_and_little_is_buffered_for_it() -> None:
    core = ScriptedCore()
    async with serving(core, slow_reader_timeout_s=0.3) as port:
        with asking(port, {**HI, "stream": True}):
            stream = await core.nth(0)
            pushed, some = 0, ids("x" * 50_000)
            with anyio.fail_after(20):
                while core.live:
                    stream.give(some)
                    pushed += len(some)
                    await anyio.sleep(0.005)
            assert stream.taken < pushed


async def test_an_endless_body_is_refused_while_it_comes() -> None:
    core = ScriptedCore()
    async with serving(core, max_body_bytes=100_000) as port:
        async with await anyio.connect_tcp("127.0.0.1", port) as connection:
            head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
            await connection.send(head.encode())
            with anyio.fail_after(5):
                for _ in range(11):
                    await connection.send(b"2710\r\n" + b" " * 10_000 + b"\r\n")
                answer = await connection.receive()
        assert answer.startswith(b"HTTP/1.1 413")
    assert not core.streams


@pytest.mark.parametrize(
    ("sent", "drip"),
    [
        ("", "\r\n"),
        ("GET /health HTTP/1.1\r\nx-slow: ", "a"),
        ("GET /health HTTP/1.1\r\nhost: x\r\n\r\n", "\r\n"),  # answered, and kept alive
    ],
)
async def test_a_request_that_does_not_come_to_its_point_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, sent: str, drip: str
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.3)
    async with serving(ScriptedCore()) as port, await anyio.connect_tcp("127.0.0.1", port) as connection:
        await connection.send(sent.encode())
        answer = b""
        with anyio.fail_after(3):
            while b"HTTP/1.1 408 " not in answer:
                await connection.send(drip.encode())
                with anyio.move_on_after(0.05):
                    answer += await connection.receive()


async def test_headers_without_end_are_refused_while_they_come() -> None:
    async with serving(ScriptedCore()) as port, await anyio.connect_tcp("127.0.0.1", port) as connection:
        await connection.send(b"GET /health HTTP/1.1\r\n")
        with anyio.fail_after(5):
            for _ in range(7):
                await connection.send(b"x-long: " + b"y" * 10_000 + b"\r\n")
            assert (await connection.receive()).startswith(b"HTTP/1.1 431")


async def test_a_client_that_sends_its_body_to_the_end_sees_why_it_was_refused() -> None:
    """It is told before the body has come; what still comes is read and thrown away."""
    core = ScriptedCore()
    async with serving(core, max_body_bytes=1000) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        for _ in range(3):
            answer = await client.post(CHAT, content=b" " * (20 << 20), headers={"content-type": "application/json"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "payload_too_large")
        assert (await client.post(CHAT, json={})).status_code == 400  # on the same connection
    assert not core.streams


async def test_the_rest_of_a_refused_body_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.3)
    async with serving(ScriptedCore(), max_body_bytes=1000) as port, await anyio.connect_tcp("127.0.0.1", port) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100000\r\n\r\n"
        await connection.send(head.encode())
        with anyio.fail_after(3), pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
            while True:
                await connection.send(b" ")
                with anyio.move_on_after(0.05):
                    assert b"HTTP/1.1 413" in await connection.receive()
