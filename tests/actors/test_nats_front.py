"""The NATS edge on the memory bus: numbered chunks, one final message, nothing published where clients may not publish."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from common.protocol import headers, subjects
from common.protocol.errors import NoWorkers, WorkerLost
from common.runtime.bus import BusMessage
from common.runtime.memory_bus import MemoryBroker, MemoryBus
from services.gateway.config import GatewayConfig
from services.gateway.nats_front import NatsFront
from services.gateway.nats_reply import is_safe_reply
from tests.actors.edge import BUNDLE, EOS, ScriptedCore, ScriptedStream, ids, until

SLUG = subjects.slug(BUNDLE.name)
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Client:
    """A raw NATS user with an inbox of its own."""

    def __init__(self, bus: MemoryBus) -> None:
        self.bus = bus
        self.inbox = "_INBOX.user.1"
        self.replies: list[BusMessage] = []
        self._subscription: Any = None

    async def listen(self) -> None:
        self._subscription = await self.bus.subscribe(self.inbox, self.replies.append)

    async def leave(self) -> None:
        await self._subscription.unsubscribe()

    async def ask(self, body: Any, *, kind: str = "chat", slug: str = SLUG, reply: str | None = None, **fields: str) -> None:
        subject = subjects.chat(slug) if kind == "chat" else subjects.completions(slug)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {name.replace("_", "-"): value for name, value in fields.items()}
        await self.bus.publish(subject, data, reply=self.inbox if reply is None else reply, headers=sent)

    async def cancel(self, request: str) -> None:
        await self.bus.publish(subjects.cancel(request), b"")

    @property
    def finals(self) -> list[BusMessage]:
        return [reply for reply in self.replies if headers.FINAL in reply.headers]

    @property
    def last(self) -> BusMessage:
        return self.replies[-1]

    @property
    def text(self) -> str:
        choices = [choice for reply in self.replies for choice in json.loads(reply.data)["choices"]]
        return "".join(choice["delta"].get("content", "") for choice in choices)

    async def final(self) -> BusMessage:
        await until(lambda: bool(self.finals))
        return self.last

    def check_error(self, code: str) -> dict[str, Any]:
        assert self.last.headers[headers.FINAL] == "1"
        assert self.last.headers[headers.ERROR_CODE] == code
        assert self.last.headers[headers.ERROR]
        error = json.loads(self.last.data)["error"]
        assert error["code"] == code
        return error


class Setup:
    def __init__(self, core: ScriptedCore, front: NatsFront, client: Client, broker: MemoryBroker) -> None:
        self.core, self.front, self.client, self.broker = core, front, client, broker

    def dropped(self, reason: str) -> str:
        lines = self.core.metrics.render().decode().splitlines()
        return next((line for line in lines if line.startswith(f'penstock_nats_dropped_total{{reason="{reason}"}}')), "")


@asynccontextmanager
async def front(core: ScriptedCore | None = None, **settings: Any) -> AsyncIterator[Setup]:
    broker = MemoryBroker()
    core = core or ScriptedCore()
    served = NatsFront(core, BUNDLE, broker.connect("gateway"), GatewayConfig(**settings))
    client = Client(broker.connect("client"))
    await client.listen()
    async with anyio.create_task_group() as group:
        await group.start(served.run)
        yield Setup(core, served, client, broker)
        group.cancel_scope.cancel()
    assert served.num_live == 0
    assert not core.live


def says(text: str) -> ScriptedCore:
    return ScriptedCore(lambda stream: stream.say(text, finish="stop"))


# ── abuse ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("subject", "safe"),
    [
        ("_INBOX.abc.1", True),
        ("my.inbox", True),
        (MemoryBroker().connect("cli").new_inbox(), True),
        ("", False),
        ("$JS.API.STREAM.DELETE.PROD", False),
        ("$SYS.REQ.SERVER.PING", False),
        ("$SRV.PING", False),
        ("penstock.v1", False),
        ("penstock.v1.chat.small-model-1", False),
        ("penstock.v1.cancel.x", False),
        ("penstock.v1.int.inbox.decode.decode-1", False),
        ("penstock.v1.int.reply.abc.1", False),
        ("penstock.v1.int.reply.abc-inbox.1.2", False),
        ("penstock.v1.int.reply.abc-inbox.>", False),
        ("a.*", False),
        ("a.>", False),
        ("a b", False),
        ("a..b", False),
        (".a", False),
        ("a\r\nPUB x", False),
        ("é", False),
        ("x" * 257, False),
        (".".join("x" * 17), False),
    ],
)
def test_which_inboxes_are_answered(subject: str, safe: bool) -> None:
    assert is_safe_reply(subject) == safe


@pytest.mark.parametrize("reply", ["$JS.API.STREAM.DELETE.PROD", f"penstock.v1.chat.{SLUG}", "penstock.v1.int.inbox.decode.d"])
async def test_a_reply_that_would_make_us_publish_elsewhere_is_dropped_and_counted(reply: str) -> None:
    async with front() as setup:
        seen: list[BusMessage] = []
        await setup.client.bus.subscribe("$JS.>", seen.append)
        await setup.client.bus.subscribe("penstock.v1.int.inbox.>", seen.append)
        await setup.client.ask(HI, reply=reply)
        await until(lambda: setup.dropped("unsafe_reply").endswith(" 1.0"))
        assert not seen
        assert not setup.core.streams


async def test_a_request_without_a_reply_is_dropped_and_counted() -> None:
    async with front() as setup:
        await setup.client.ask(HI, reply="")
        await until(lambda: setup.dropped("no_reply").endswith(" 1.0"))
        assert not setup.core.streams


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_parameter"),
        (b"\xff", "invalid_parameter"),
        (b"[" * 100_000, "invalid_parameter"),
        ({**HI, "n": 10**9}, "invalid_parameter"),
        ({**HI, "temperature": -1}, "invalid_parameter"),
        ({**HI, "model": "gpt-5"}, "model_not_found"),
        ({"messages": [{"role": "user", "content": "x" * 10_000}]}, "context_length_exceeded"),
        ({**HI, "user": "x" * 100_001}, "payload_too_large"),
    ],
)
async def test_a_bad_request_gets_one_typed_final_message(body: Any, code: str) -> None:
    async with front(max_body_bytes=100_000) as setup:
        await setup.client.ask(body)
        await setup.client.final()
        setup.client.check_error(code)
        assert len(setup.client.replies) == 1
        assert not setup.core.streams


async def test_another_models_subject_is_a_typed_error() -> None:
    async with front() as setup:
        await setup.client.ask(HI, slug="gpt-5")
        await setup.client.final()
        assert SLUG in setup.client.check_error("model_not_found")["message"]


@pytest.mark.parametrize("request_id", ["", "a.b", "a*", ">", "a b", "x" * 129, "é", "a\nb"])
async def test_a_request_id_with_anything_odd_in_it_is_refused(request_id: str) -> None:
    async with front() as setup:
        await setup.client.ask(HI, Penstock_Request_Id=request_id)
        await setup.client.final()
        setup.client.check_error("invalid_parameter")
        assert not setup.core.streams


@pytest.mark.parametrize("deadline", ["0", "-5", "NaN", "1.5", "9" * 30])
async def test_a_bad_deadline_is_refused(deadline: str) -> None:
    async with front() as setup:
        await setup.client.ask(HI, Penstock_Deadline_Ms=deadline)
        await setup.client.final()
        setup.client.check_error("invalid_parameter")


async def test_the_id_of_a_live_request_cannot_be_used_again() -> None:
    async with front() as setup:
        await setup.client.ask(HI, Penstock_Request_Id="mine")
        stream = await setup.core.nth(0)
        await setup.client.ask(HI, Penstock_Request_Id="mine")
        await setup.client.final()
        setup.client.check_error("duplicate_request")
        assert setup.core.live == [stream], "the first one goes on"
        stream.say("x", finish="stop")
        await until(lambda: len(setup.client.finals) == 2)
        await setup.client.ask(HI, Penstock_Request_Id="mine")
        (await setup.core.nth(1)).say("y", finish="stop")
        await until(lambda: len(setup.client.finals) == 3)


async def test_a_cancel_of_anything_else_does_nothing() -> None:
    async with front() as setup:
        await setup.client.ask(HI, Penstock_Request_Id="mine")
        stream = await setup.core.nth(0)
        for guess in ("other", stream.request.id, "mine-0"):
            await setup.client.cancel(guess)
        await anyio.sleep(0.02)
        assert setup.core.live == [stream]
        stream.say("x", finish="stop")
        await setup.client.final()
        assert headers.ERROR_CODE not in setup.client.last.headers


async def test_requests_beyond_the_limit_are_refused_and_a_flood_of_them_is_dropped() -> None:
    async with front(max_requests=2) as setup:
        for _ in range(5000):
            await setup.client.ask(HI)
        await until(lambda: bool(setup.dropped("flood")))
        await until(lambda: len(setup.client.finals) >= 1000)
        setup.client.check_error("overloaded")
        assert len(setup.core.streams) == 2
        for stream in setup.core.streams:
            stream.say("x", finish="stop")
        await until(lambda: setup.front.num_live == 0)


async def test_one_request_never_waits_for_another() -> None:
    def script(stream: ScriptedStream) -> None:
        if len(stream.request.prompt) < 20:
            stream.say("x", finish="stop")

    async with front(ScriptedCore(script)) as setup:
        await setup.client.ask({"prompt": "never answered, but long"}, kind="completion")
        await setup.core.nth(0)
        await setup.client.ask({"prompt": "quick"}, kind="completion")
        await setup.client.final()


async def test_an_answer_over_the_bus_limit_is_a_typed_error() -> None:
    async with front(ScriptedCore(lambda stream: stream.say("x" * 400, finish="stop"))) as setup:
        setup.broker.max_payload = 500
        await setup.client.ask({**HI, "stream": False})
        await setup.client.final()
        setup.client.check_error("payload_too_large")


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_stream_is_numbered_and_its_last_message_says_all() -> None:
    async with front() as setup:
        await setup.client.ask(HI, Penstock_Request_Id="mine", traceparent=TRACE)
        stream = await setup.core.nth(0)
        assert not setup.client.replies
        stream.say("Hel")
        await until(lambda: setup.client.text == "Hel")
        stream.give([*ids("lo"), EOS], finish="stop", cached=2)
        await setup.client.final()
        replies = setup.client.replies
        assert [reply.headers[headers.SEQUENCE] for reply in replies] == [str(number) for number in range(len(replies))]
        assert {reply.headers[headers.REQUEST_ID] for reply in replies} == {"mine"}
        assert [headers.FINAL in reply.headers for reply in replies] == [False] * (len(replies) - 1) + [True]
        assert replies[0].headers[headers.TRACEPARENT] == replies[-1].headers[headers.TRACEPARENT] == TRACE
        chunks = [json.loads(reply.data) for reply in replies]
        assert {chunk["id"] for chunk in chunks} == {"mine"}
        assert setup.client.text == "Hello"
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert chunks[-1]["usage"]["completion_tokens"] == 6
        assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
        assert stream.request.id != "mine", "ids inside are the server's own"


async def test_without_an_id_the_server_mints_one_and_tells_it() -> None:
    async with front() as setup:
        await setup.client.ask(HI)
        (await setup.core.nth(0)).say("x")
        await until(lambda: len(setup.client.replies) >= 2)
        minted = setup.client.last.headers[headers.REQUEST_ID]
        assert minted.startswith("chatcmpl-")
        await setup.client.cancel(minted)
        await setup.client.final()
        setup.client.check_error("cancelled")


async def test_a_whole_answer_is_one_message() -> None:
    async with front(says("hello")) as setup:
        await setup.client.ask({**HI, "stream": False}, Penstock_Request_Id="mine")
        await setup.client.final()
        [reply] = setup.client.replies
        body = json.loads(reply.data)
        assert body["object"] == "chat.completion"
        assert body["id"] == "mine"
        assert body["choices"][0]["message"]["content"] == "hello"


async def test_completions_and_several_choices() -> None:
    async with front(ScriptedCore(lambda stream: stream.say("ab", finish="length"))) as setup:
        await setup.client.ask({"prompt": "hi", "n": 3}, kind="completion")
        await setup.client.final()
        chunks = [json.loads(reply.data) for reply in setup.client.replies]
        texts = dict.fromkeys(range(3), "")
        for chunk in chunks:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == dict.fromkeys(range(3), "ab")
        assert chunks[-1]["usage"]["completion_tokens"] == 6
        assert len(setup.client.finals) == 1


async def test_the_deadline_header_reaches_the_core() -> None:
    async with front(says("x")) as setup:
        await setup.client.ask(HI, Penstock_Deadline_Ms="1500")
        await setup.client.final()
        assert setup.core.streams[0].request.deadline_s == 1.5


@pytest.mark.parametrize("text", ["", "a"])
async def test_an_error_before_or_in_a_stream_is_the_final_message(text: str) -> None:
    async with front() as setup:
        await setup.client.ask(HI)
        stream = await setup.core.nth(0)
        stream.say(text, error=None if text else NoWorkers("none"))
        if text:
            await until(lambda: setup.client.text == "a")
            stream.give([], error=WorkerLost("gone"))
        await setup.client.final()
        setup.client.check_error("worker_lost" if text else "no_workers")


# ── ends ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("n", [1, 3])
async def test_a_cancel_frees_everything_and_is_answered(n: int) -> None:
    async with front() as setup:
        await setup.client.ask({**HI, "n": n}, Penstock_Request_Id="mine")
        await setup.core.nth(n - 1)
        await setup.client.cancel("mine")
        await setup.client.final()
        setup.client.check_error("cancelled")
        await until(lambda: not setup.core.live)
        await setup.client.cancel("mine")
        await anyio.sleep(0.01)
        assert len(setup.client.finals) == 1


async def test_a_client_that_left_is_noticed_and_its_request_freed() -> None:
    async with front() as setup:
        await setup.client.ask(HI)
        stream = await setup.core.nth(0)
        stream.say("a")
        await until(lambda: setup.client.text == "a")
        await setup.client.leave()
        with anyio.fail_after(1):
            while setup.core.live:
                stream.say("b")
                await anyio.sleep(0.01)


async def test_most_chunks_ask_for_no_sign_of_life() -> None:
    async with front() as setup:
        await setup.client.ask(HI)
        stream = await setup.core.nth(0)
        for letter in "abcdefghij":
            stream.say(letter)
            await anyio.sleep(0.001)
        stream.say("", finish="stop")
        await setup.client.final()
        assert sum(bool(reply.reply) for reply in setup.client.replies) == 1


async def test_a_control_message_that_a_client_forges_ends_only_its_own_request() -> None:
    async with front() as setup:
        await setup.client.ask(HI)
        stream = await setup.core.nth(0)
        stream.say("a")
        await until(lambda: setup.client.text == "a")
        control = next(reply.reply for reply in setup.client.replies if reply.reply)
        await setup.client.bus.publish(control, b"anything")
        await anyio.sleep(0.01)
        assert setup.core.live == [stream]
        stream.say("", finish="stop")
        await setup.client.final()


async def test_during_a_drain_nothing_new_is_taken_and_what_runs_ends_well() -> None:
    async with front() as setup, anyio.create_task_group() as group:
        await setup.client.ask(HI)
        stream = await setup.core.nth(0)
        drained = anyio.Event()

        async def drain() -> None:
            await setup.front.drain()
            drained.set()

        group.start_soon(drain)
        await anyio.sleep(0.01)
        await setup.client.ask(HI)
        await anyio.sleep(0.01)
        assert len(setup.core.streams) == 1
        assert not drained.is_set()
        stream.say("x", finish="stop")
        await setup.client.final()
        with anyio.fail_after(1):
            await drained.wait()


async def test_a_front_that_is_stopped_tells_its_clients() -> None:
    async with front() as setup:
        await setup.client.ask(HI)
        (await setup.core.nth(0)).say("a")
        await until(lambda: setup.client.text == "a")
    await until(lambda: bool(setup.client.finals))
    setup.client.check_error("shutting_down")
