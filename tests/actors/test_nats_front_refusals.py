"""The NATS edge on the memory bus: one typed refusal, and nothing published where clients may not publish."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from common.protocol import headers
from common.protocol.errors import ConfigError
from common.runtime.bus import BusMessage
from common.runtime.config import load
from common.testing.memory_bus import MemoryBroker
from services.gateway.config import GatewayConfig
from services.gateway.nats_reply import is_safe_reply
from tests.actors.edge import ScriptedCore, ScriptedStream, until
from tests.actors.nats_client import HI, SLUG, Client, front, says


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


@pytest.mark.parametrize(
    "reply",
    [
        "$JS.API.STREAM.DELETE.PROD",
        f"penstock.v1.chat.{SLUG}",
        "penstock.v1.int.inbox.decode.d",
        "billing.events",
        "_INBOX",
        "_INBOXES.a",
    ],
)
async def test_a_reply_that_would_make_us_publish_elsewhere_is_dropped_and_counted(reply: str) -> None:
    async with front() as setup:
        seen: list[BusMessage] = []
        for subject in ("$JS.>", "penstock.v1.int.inbox.>", "billing.>", "_INBOX", "_INBOXES.>"):
            await setup.client.bus.subscribe(subject, seen.append)
        await setup.client.ask(HI, reply=reply)
        await until(lambda: setup.dropped("unsafe_reply").endswith(" 1.0"))
        assert not seen
        assert not setup.core.streams
        assert setup.front.endpoints[0].last_error == "reply_not_allowed"


async def test_answers_go_to_inboxes_of_the_configured_prefixes() -> None:
    async with front(says("hi"), reply_prefixes=("_INBOX.", "billing.replies.")) as setup:
        for number, (reply, allowed) in enumerate(
            {"_INBOX.a.1": True, "billing.replies.7": True, "billing.events": False, "_INBOX": False}.items()
        ):
            seen: list[BusMessage] = []
            await setup.client.bus.subscribe(reply, seen.append)
            await setup.client.ask(HI, reply=reply)
            if allowed:
                await until(lambda seen=seen: any(headers.FINAL in message.headers for message in seen))
            else:
                await until(lambda count=number - 1: setup.dropped("unsafe_reply").endswith(f" {count}.0"))
                assert not seen


@pytest.mark.parametrize("prefix", ["$JS.", "a.*", ">", "a b", ".a"])
def test_a_prefix_that_would_open_everything_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigError):
        load(GatewayConfig, section="gateway", argv=[f"--reply-prefixes=_INBOX.,{prefix}"], environ={})


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


async def test_clients_may_choose_the_same_id_and_each_cancels_its_own() -> None:
    async with front() as setup:
        other = Client(setup.broker.connect("other"))
        await other.listen()
        await setup.client.ask(HI, Penstock_Request_Id="mine")
        first = await setup.core.nth(0)
        await other.ask(HI, Penstock_Request_Id="mine")
        second = await setup.core.nth(1)
        await other.cancel("mine")
        await other.final()
        other.check_error("cancelled")
        assert setup.core.live == [first] and second.cancelled
        first.say("x", finish="stop")
        await setup.client.final()
        assert setup.client.text == "x"


async def test_nobody_cancels_a_request_by_the_id_that_its_client_chose() -> None:
    async with front() as setup:
        other = Client(setup.broker.connect("other"))
        await setup.client.ask(HI, Penstock_Request_Id="mine")
        stream = await setup.core.nth(0)
        for reply in ("", other.inbox, "_INBOX.guess"):
            await other.cancel("mine", reply=reply)
        await anyio.sleep(0.02)
        assert setup.core.live == [stream]
        stream.say("x", finish="stop")
        await setup.client.final()
        assert headers.ERROR_CODE not in setup.client.last.headers


async def test_a_request_whose_id_was_minted_is_cancelled_by_that_alone() -> None:
    async with front() as setup:
        await setup.client.ask(HI)
        stream = await setup.core.nth(0)
        stream.say("a")
        await until(lambda: setup.client.text == "a")
        await setup.client.cancel(setup.client.last.headers[headers.REQUEST_ID], reply="")
        await setup.client.final()
        setup.client.check_error("cancelled")


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
