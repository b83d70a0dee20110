"""A whole Penstock with real weights under hostile clients: every refusal is typed, nothing is taken, nobody else waits.

One stack serves all tests. `undisturbed` is what a stream's longest gap between chunks is when nobody else is there; while
abuse runs, a well-behaved stream beside it may not be much slower, and must say the same.
"""

from __future__ import annotations

import json
import os
import random
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing, suppress
from typing import Any

import anyio
import msgspec
import nats
import pytest
import pytest_asyncio
from nats.aio.client import Client

from common.models.source import ModelFiles
from common.protocol import headers, subjects
from common.protocol.handles import Role
from tests.e2e.bad_input import BAD_BODIES, CHAT, MODEL, chat, completion, garbage
from tests.e2e.stack import Reply, Stack
from tests.fixtures.nats import LocalNatsServer

ROLES: tuple[Role, ...] = ("gateway", "prefill", "decode", "draft", "kvstore")
PROMPT = "The three primary colours are"
NUM_TOKENS = 48
MAX_GAP_S = 1.0
"""Beyond the undisturbed gap, on two cores that clients and workers share."""

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(smollm2: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    folder = tmp_path_factory.mktemp("abuse")
    server = LocalNatsServer(folder / "nats")
    server.start()
    try:
        flags, engine_flags = ("--model", smollm2.name, "--lease-s", "2"), ("--kv-cache-mb", "256")
        async with Stack(server.url, folder, flags=flags, engine_flags=engine_flags) as stack:
            for role in ROLES:
                await stack.start(role)
            await stack.ready()
            yield stack
            assert all(process.poll() is None for process in stack.processes.values())
    finally:
        server.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def wire(stack: Stack) -> AsyncIterator[Client]:
    connection = await nats.connect(stack.nats_url)
    yield connection
    await connection.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(stack: Stack) -> tuple[str, float]:
    """The text of the well-behaved stream, and its longest gap in seconds."""
    replies = [await stack.complete(PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True) for _ in range(3)]
    return replies[0].text, max(map(longest_gap, replies))


def longest_gap(reply: Reply) -> float:
    return max(later - earlier for earlier, later in zip(reply.times, reply.times[1:], strict=False))


def pools(stack: Stack) -> dict[str, list[Any]]:
    return {
        name: [presence.running, presence.waiting, *msgspec.structs.astuple(presence.kv)]
        for name, (_, presence) in stack.heard.items()
        if name in stack.processes
    }


@asynccontextmanager
async def nothing_taken(stack: Stack) -> AsyncIterator[None]:
    """No worker's pool or queue is other than before, whatever the block did: nothing of it reached one."""
    await stack.clean()
    before = pools(stack)
    yield
    await anyio.sleep(0.3)  # a heartbeat
    assert pools(stack) == before


async def beside(stack: Stack, undisturbed: tuple[str, float], abuse: Callable[[], Awaitable[object]]) -> None:
    """Run `abuse` again and again while well-behaved streams run, and measure those. Their client runs in this process, so time
    in which this process stood still is not counted as a gap."""
    text, gap_s = undisturbed
    rounds, stalls = 0, [0.0]

    async def go_on() -> None:
        nonlocal rounds
        while True:
            await abuse()
            rounds += 1

    async def note_stalls() -> None:
        while True:
            begun = time.monotonic()
            await anyio.sleep(0.01)
            stalls.append(time.monotonic() - begun - 0.01)

    replies: list[Reply] = []
    async with anyio.create_task_group() as group:
        group.start_soon(go_on)
        group.start_soon(note_stalls)
        until = time.monotonic() + 2
        while not rounds or time.monotonic() < until:
            replies.append(await stack.complete(PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True))
        group.cancel_scope.cancel()
    assert {(reply.text, reply.finish) for reply in replies} == {(text, "length")}
    gaps = [longest_gap(reply) for reply in replies]
    print(f"{rounds} rounds; longest gap {max(gaps):.3f} s, undisturbed {gap_s:.3f} s, own {max(stalls):.3f} s")  # noqa: T201
    assert max(gaps) < gap_s + MAX_GAP_S + max(stalls)


# ── bodies ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_bad_body_over_http_is_a_typed_4xx_and_takes_nothing(stack: Stack) -> None:
    async with nothing_taken(stack):
        for path, cases in BAD_BODIES.items():
            for body, code in cases:
                answer = await stack.client.post(
                    f"{stack.url()}/v1/{path}", content=body, headers={"content-type": "application/json"}
                )
                error = answer.json()["error"]
                assert 400 <= answer.status_code < 500, (body[:80], error)
                assert error["code"] == code, (body[:80], error)
                assert 10 < len(error["message"]) < 400 and "Traceback" not in error["message"]


async def test_a_bad_body_over_nats_is_a_typed_error_and_takes_nothing(stack: Stack, wire: Client) -> None:
    async with nothing_taken(stack):
        of_path = (subjects.chat, subjects.completions, subjects.responses, subjects.messages)
        for subject, cases in zip((of(MODEL) for of in of_path), BAD_BODIES.values(), strict=True):
            for body, code in cases:
                inbox = wire.new_inbox()
                replies = await wire.subscribe(inbox)
                await wire.publish(subject, body, reply=inbox)
                answer = await replies.next_msg(timeout=10)
                await replies.unsubscribe()
                fields = answer.headers or {}
                assert (fields[headers.FINAL], fields[headers.ERROR_CODE]) == ("1", code), (body[:80], fields)
                assert json.loads(answer.data)["error"]["message"]


async def test_bad_bodies_slow_nobody(stack: Stack, wire: Client, undisturbed: tuple[str, float]) -> None:
    async def abuse() -> None:
        for body, _ in CHAT:
            await stack.client.post(
                f"{stack.url()}/v1/chat/completions", content=body, headers={"content-type": "application/json"}
            )
            await wire.publish(subjects.chat(MODEL), body, reply=wire.new_inbox())

    await beside(stack, undisturbed, abuse)


# ── HTTP connections ─────────────────────────────────────────────────────────────────────────────────────────────────────


def connection(stack: Stack, sent: bytes = b"") -> socket.socket:
    """A raw connection, with the first bytes already sent."""
    raw = socket.create_connection(("127.0.0.1", stack.presence("gateway-0").http_port), timeout=10)
    raw.sendall(sent)
    return raw


def post(length: int | None, more: bytes = b"", kind: bytes = b"application/json") -> bytes:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: " + kind + b"\r\n"
    return (
        head + (b"Content-Length: %d\r\n\r\n" % length if length is not None else b"Transfer-Encoding: chunked\r\n\r\n") + more
    )


def status_of(raw: socket.socket) -> int:
    return int(raw.recv(4096).split(b" ")[1])


async def test_what_is_no_request_of_ours_is_a_4xx(stack: Stack) -> None:
    async with nothing_taken(stack):
        cases = [
            (post(50 << 20), 413),  # refused before it is sent
            (post(10**14), 413),
            (post(10**30), 400),
            (post(2, b"{}", kind=b"text/plain"), 415),
            (post(2, b"{}", kind=b"application/x-www-form-urlencoded"), 415),
            (b"GET /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
            (b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
            (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc" + b"\r\n\r\n", 400),  # somebody speaks TLS
            (b"HELLO\r\n\r\n", 400),
            (post(-1), 400),
        ]
        for sent, status in cases:
            with closing(connection(stack, sent)) as raw:
                assert await anyio.to_thread.run_sync(status_of, raw) == status, sent[:80]


async def test_a_body_without_end_is_cut_off(stack: Stack) -> None:
    def send() -> int:
        with closing(connection(stack, post(None))) as raw:
            chunk = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
            for _ in range(50):
                try:
                    raw.sendall(chunk)
                except OSError:
                    break
            return status_of(raw)

    async with nothing_taken(stack):
        assert await anyio.to_thread.run_sync(send) == 413


async def test_slow_and_silent_connections_slow_nobody(stack: Stack, undisturbed: tuple[str, float]) -> None:
    """A hundred that send a byte now and then, a hundred that send half a body and nothing more, a hundred that vanish."""
    drips = [connection(stack, b"POST /v1/chat/completions HTTP/1.1\r\nX-Slow: ") for _ in range(100)]
    halves = [connection(stack, post(1000, b'{"messages": [')) for _ in range(100)]

    async def abuse() -> None:
        for raw in drips:
            raw.send(b"a")
        gone = [connection(stack, post(10, b"{")) for _ in range(100)]
        for raw in gone:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")  # a reset
            raw.close()
        await anyio.sleep(0.05)

    await beside(stack, undisturbed, abuse)
    for raw in (*drips, *halves):
        raw.close()
    await stack.clean()


async def test_streams_whose_clients_vanish_give_everything_back(stack: Stack) -> None:
    body = completion(PROMPT, max_tokens=4000, ignore_eos=True, stream=True)
    sent = post(len(body), body).replace(b"chat/completions", b"completions")
    open_streams = [connection(stack, sent) for _ in range(8)]
    for raw in open_streams:
        assert await anyio.to_thread.run_sync(status_of, raw) == 200
        raw.close()
    await stack.clean(within_s=2)


# ── NATS ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_replies_only_go_where_clients_may_listen(stack: Stack, wire: Client) -> None:
    decode = subjects.inbox("decode", "decode-0")
    heard: list[str] = []

    async def hear(message: Any) -> None:
        if headers.REQUEST_ID in (message.headers or {}):  # as in every answer; what the gateway asks its workers has none
            heard.append(message.subject)

    async with nothing_taken(stack):
        targets = [
            decode,
            "penstock.v1.cancel.x",
            subjects.chat(MODEL),
            "$JS.API.STREAM.CREATE.x",
            "$SYS.REQ.SERVER.PING",
            "a.>",
        ]
        spies = [await wire.subscribe(target, cb=hear) for target in targets[:2]]
        for target in targets:
            await wire.publish(subjects.chat(MODEL), chat(), reply=target)
        await wire.publish(subjects.chat(MODEL), chat())  # to nobody
        await anyio.sleep(0.3)
        for spy in spies:
            await spy.unsubscribe()
    assert heard == []


async def test_ids_with_wildcards_are_refused_or_do_nothing(stack: Stack, wire: Client) -> None:
    for id in ("*", ">", "a.b", "a b", "x" * 300, "é"):
        inbox = wire.new_inbox()
        replies = await wire.subscribe(inbox)
        await wire.publish(subjects.chat(MODEL), chat(), reply=inbox, headers={headers.REQUEST_ID: id})
        assert ((await replies.next_msg(timeout=10)).headers or {})[headers.ERROR_CODE] == "invalid_parameter", id
        await replies.unsubscribe()
    reply = Reply()
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: stack.complete(PROMPT, reply=reply, max_tokens=NUM_TOKENS, ignore_eos=True))
        for _ in range(20):
            for id in ("*", ">", "a.b", "cmpl-x"):
                await wire.publish(f"penstock.v1.cancel.{id}", b"")
            await anyio.sleep(0.02)
    assert reply.finish == "length"


async def test_an_oversize_payload_costs_its_sender_the_connection_and_nobody_else(
    stack: Stack, undisturbed: tuple[str, float]
) -> None:
    host, port = stack.nats_url.removeprefix("nats://").split(":")
    payload = b"x" * (9 << 20)

    def publish() -> bytes:
        with closing(socket.create_connection((host, int(port)), timeout=10)) as raw:
            raw.sendall(b"CONNECT {}\r\nPUB %s inbox %d\r\n" % (subjects.chat(MODEL).encode(), len(payload)))
            said = b""
            with suppress(OSError):
                raw.sendall(payload)
            with suppress(OSError):
                while chunk := raw.recv(65536):
                    said += chunk
            return said

    assert b"Maximum Payload" in await anyio.to_thread.run_sync(publish)
    await beside(stack, undisturbed, lambda: anyio.to_thread.run_sync(publish))


# ── internal subjects ────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_garbage_on_the_internal_subjects_kills_nobody(
    stack: Stack, wire: Client, undisturbed: tuple[str, float]
) -> None:
    dice = random.Random(7)
    epochs = {name: stack.presence(name).worker.epoch for name in stack.processes}

    async def abuse() -> None:
        for role in ROLES:
            for _ in range(10):
                await wire.publish(subjects.inbox(role, f"{role}-0"), garbage(stack, dice), reply=dice.choice(["", "nowhere"]))
            await wire.publish(subjects.presence(role, f"evil-{dice.randrange(3)}"), garbage(stack, dice))
            await wire.publish(f"{subjects.INTERNAL}.reply.{os.urandom(4).hex()}.1", garbage(stack, dice))
        await wire.flush()
        await anyio.sleep(0.02)

    await beside(stack, undisturbed, abuse)
    assert all(process.poll() is None for process in stack.processes.values())
    await stack.clean(within_s=4)  # what was well-formed was taken, and is freed as nobody renews it
    assert {name: stack.presence(name).worker.epoch for name in stack.processes} == epochs
    assert "service_failed" not in "".join(map(stack.log, stack.processes))
