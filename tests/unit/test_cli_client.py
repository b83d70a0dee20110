"""The commands' NATS client: what it makes of replies, of silence and of presence, and that it cleans up."""

from __future__ import annotations

import anyio
import msgspec
import pytest

from common.cli.client import ChatStream, check_served, served_model, watch_presence
from common.cli.console import first_error
from common.protocol import headers, messages, subjects
from common.protocol.errors import (
    ContextLengthExceeded,
    Forbidden,
    NoWorkers,
    ProtocolError,
    RequestTimeout,
    UnknownModel,
)
from common.runtime.bus import Bus, BusMessage
from common.testing.memory_bus import MemoryBroker
from tests.unit.presences import presence


class FakeGateway:
    """Answers each chat request with the given replies, and remembers cancels."""

    def __init__(self, bus: Bus, replies: list[tuple[dict[str, str], bytes]]) -> None:
        self.bus = bus
        self.replies = replies
        self.requests: list[BusMessage] = []
        self.cancelled: list[str] = []
        self._waiting: list[BusMessage] = []

    async def start(self) -> None:
        await self.bus.subscribe(subjects.any_chat(), self._waiting.append, queue=subjects.GATEWAY_QUEUE)
        await self.bus.subscribe(subjects.any_cancel(), lambda m: self.cancelled.append(subjects.last_token(m.subject)))

    async def answer(self) -> None:
        await anyio.sleep(0.01)  # what was published is delivered in a later turn of the loop
        while self._waiting:
            request = self._waiting.pop(0)
            self.requests.append(request)
            for fields, data in self.replies:
                await self.bus.publish(request.reply, data, headers=fields)


def text_chunk(text: str) -> bytes:
    return msgspec.json.encode({"choices": [{"index": 0, "delta": {"content": text}}]})


LAST = msgspec.json.encode({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})


async def talk(replies: list[tuple[dict[str, str], bytes]], *, timeout_s: float = 5) -> tuple[str, ChatStream, FakeGateway]:
    broker = MemoryBroker()
    gateway = FakeGateway(broker.connect("gateway"), replies)
    await gateway.start()
    bus = broker.connect("client")
    parts: list[str] = []
    async with ChatStream(bus, "Tiny/Model", {"messages": []}, timeout_s=timeout_s) as stream:
        await gateway.answer()
        async for chunk in stream:
            parts.append(chunk.text)
    return "".join(parts), stream, gateway


async def test_a_stream_yields_its_text_and_counts_the_servers_tokens() -> None:
    text, stream, gateway = await talk(
        [
            ({headers.SEQUENCE: "0"}, text_chunk("Hel")),
            ({headers.SEQUENCE: "1"}, text_chunk("lo")),
            ({headers.SEQUENCE: "2", headers.FINAL: "1"}, LAST),
        ]
    )
    assert text == "Hello"
    assert stream.timing.tokens == 2
    assert gateway.requests[0].subject == "penstock.v1.chat.tiny-model"
    assert gateway.requests[0].headers[headers.REQUEST_ID] == stream.request_id
    assert msgspec.json.decode(gateway.requests[0].data)["stream"] is True
    assert gateway.cancelled == []


async def test_an_error_header_becomes_the_error_it_names() -> None:
    failed = {headers.FINAL: "1", headers.ERROR_CODE: "context_length_exceeded", headers.ERROR: "the prompt is too long"}
    with pytest.raises(ContextLengthExceeded, match="too long"):
        await talk([(failed, b"")])


async def test_a_reply_that_is_sent_again_counts_once() -> None:
    text, stream, _ = await talk(
        [
            ({headers.SEQUENCE: "0"}, text_chunk("Hel")),
            ({headers.SEQUENCE: "1"}, text_chunk("lo")),
            ({headers.SEQUENCE: "0"}, text_chunk("Hel")),
            ({headers.SEQUENCE: "1"}, text_chunk("lo")),
            ({headers.SEQUENCE: "2", headers.FINAL: "1"}, LAST),
        ]
    )
    assert text == "Hello" and stream.timing.tokens == 2


async def test_a_number_that_is_none_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="numbered 'two'"):
        await talk([({headers.SEQUENCE: "two"}, text_chunk("Hel"))])


async def test_a_gap_in_the_sequence_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="lost"):
        await talk([({headers.SEQUENCE: "0"}, text_chunk("a")), ({headers.SEQUENCE: "2"}, text_chunk("c"))])


async def test_silence_ends_in_a_timeout_and_cancels_the_request() -> None:
    broker = MemoryBroker()
    gateway = FakeGateway(broker.connect("gateway"), [])
    await gateway.start()
    stream = ChatStream(broker.connect("client"), "tiny", {"messages": []}, timeout_s=0.05)
    with pytest.raises(RequestTimeout, match="penstock status"):
        async with stream:
            await anext(stream)
    await gateway.answer()
    assert gateway.cancelled == [stream.request_id]


async def test_a_request_that_the_bus_does_not_take_is_an_error_at_once() -> None:
    broker = MemoryBroker()
    gateway = FakeGateway(broker.connect("gateway"), [])
    await gateway.start()
    bus = broker.connect("client")
    bus.denied = ['nats: permissions violation for publish to "penstock.v1.chat.tiny"']  # pyright: ignore[reportAttributeAccessIssue]
    with anyio.fail_after(5), pytest.raises(Forbidden, match="may not send requests"):
        async with ChatStream(bus, "tiny", {"messages": []}, timeout_s=60) as stream:
            await anext(stream)


async def test_a_request_that_nobody_hears_says_how_to_start() -> None:
    with pytest.raises(NoWorkers, match="penstock up"):
        async with ChatStream(MemoryBroker().connect("client"), "tiny", {"messages": []}, timeout_s=5) as stream:
            await anext(stream)


async def test_a_model_that_nobody_serves_names_those_that_are() -> None:
    broker = MemoryBroker()
    bus, gateways = broker.connect("client"), broker.connect("gateways")

    async def beat() -> None:
        while True:
            for number, (role, model) in enumerate((("gateway", "Org/A"), ("gateway", "b"), ("decode", "c"))):
                said = presence(role, number, model=model)  # pyright: ignore[reportArgumentType]
                await gateways.publish(subjects.presence(role, said.worker.id), messages.encode(said))
            await anyio.sleep(0.05)

    async def ask(model: str) -> None:
        async with ChatStream(bus, model, {"messages": []}, timeout_s=5) as stream:
            await anext(stream)

    async with anyio.create_task_group() as group:
        group.start_soon(beat)
        with pytest.raises(UnknownModel, match="'gpt-5' is not served on this bus; Org/A, b are"):
            await ask("gpt-5")
        with pytest.raises(NoWorkers, match="the gateway of 'b' takes no requests now"):
            await ask("b")
        with pytest.raises(UnknownModel, match="'gpt-5' is not served on this bus; Org/A, b are"):
            await check_served(bus, "gpt-5")
        await check_served(bus, "b")
        group.cancel_scope.cancel()


async def test_a_model_is_not_looked_for_where_it_can_not_be_heard() -> None:
    bus = MemoryBroker().connect("client")
    with pytest.raises(NoWorkers, match="penstock up"):
        await check_served(bus, "mine")
    bus.denied = ['nats: permissions violation for subscription to "penstock.v1.int.presence.>"']  # pyright: ignore[reportAttributeAccessIssue]
    await check_served(bus, "mine")


async def test_the_served_model_is_what_a_ready_gateway_says() -> None:
    broker = MemoryBroker()
    bus, gateway = broker.connect("client"), broker.connect("gateway")

    async def beat() -> None:
        for state in ("starting", "ready"):
            beat = presence("gateway", state=state, model=f"model-{state}")
            await gateway.publish(subjects.presence("gateway", "gateway-0"), messages.encode(beat))

    heard: list[str] = []
    await bus.subscribe(subjects.any_presence(), lambda message: heard.append(message.subject))

    async with anyio.create_task_group() as tasks:

        async def beat_soon() -> None:
            await anyio.sleep(0.05)
            await beat()

        tasks.start_soon(beat_soon)
        assert await served_model(bus) == "model-ready"
    assert await served_model(bus, "mine") == "mine"
    assert len(heard) == 2


async def served_beside(*models: str, wanted: str = "") -> str:
    """What a command would ask for on a bus whose gateways serve `models`."""
    broker = MemoryBroker()
    bus, gateways = broker.connect("client"), broker.connect("gateways")
    found = ""

    async with anyio.create_task_group() as tasks:

        async def beat() -> None:
            for _ in range(40):
                for number, model in enumerate(models):
                    beat = presence("gateway", number, model=model)
                    await gateways.publish(subjects.presence("gateway", f"gateway-{number}"), messages.encode(beat))
                await anyio.sleep(0.05)

        tasks.start_soon(beat)
        found = await served_model(bus, wanted)
        tasks.cancel_scope.cancel()
    return found


async def test_of_several_models_one_must_be_chosen() -> None:
    assert await served_beside("a", "a") == "a"
    assert await served_beside("a", "b", wanted="b") == "b"
    with pytest.raises(BaseExceptionGroup) as raised:
        await served_beside("b", "a")
    assert "this bus serves a, b: choose one with --model" in str(first_error(raised.value))


async def test_a_path_means_the_model_that_it_is_served_as() -> None:
    assert await served_beside("my-model", wanted="./models/my-model.gguf") == "my-model"
    assert await served_beside("Qwen/Qwen3-0.6B", wanted="Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert await served_beside("my-model", wanted="/srv/my-model/") == "my-model"


async def test_noise_on_the_presence_subject_is_ignored() -> None:
    broker = MemoryBroker()
    bus, other = broker.connect("client"), broker.connect("other")

    async with anyio.create_task_group() as tasks:

        async def publish_noise() -> None:
            await anyio.sleep(0.02)
            await other.publish(subjects.presence("decode", "decode-0"), b"\xff not msgpack")

        tasks.start_soon(publish_noise)
        assert await watch_presence(bus, 0.1) == {}
