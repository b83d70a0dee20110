"""Gateways of several models on one bus: each hears of its own model alone, and the bus says what they listen to."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

import anyio
import pytest

from common.protocol import headers, messages, subjects
from common.protocol.errors import ConfigError
from common.protocol.handles import WorkerRef
from common.protocol.messages import Presence, ServedModel
from common.runtime.routing import is_no_responders
from common.testing.memory_bus import MemoryBroker, MemoryBus
from services.gateway.config import GatewayConfig
from services.gateway.nats_front import NatsFront
from tests.actors.edge import BUNDLE, ScriptedCore, front_of, until
from tests.actors.nats_client import HI, SLUG, front, says


async def test_each_models_requests_go_to_its_own_gateway() -> None:
    broker = MemoryBroker()
    async with (
        front(says("one"), broker=broker, name="Org/One") as one,
        front(says("two"), broker=broker, name="two") as two,
    ):
        for _ in range(20):
            await one.client.ask({**HI, "model": "Org/One"}, slug="org-one")
            await two.client.ask({**HI, "model": "two"}, slug="two")
        await until(lambda: len(one.client.finals) == len(two.client.finals) == 20)
        assert (one.client.text, two.client.text) == ("one" * 20, "two" * 20)
        assert not any(headers.ERROR in reply.headers for reply in one.client.replies + two.client.replies)


async def test_two_gateways_of_one_model_share_its_load() -> None:
    broker = MemoryBroker()
    async with front(says("x"), broker=broker) as first, front(says("x"), broker=broker) as second:
        for _ in range(10):
            await first.client.ask(HI)
        await until(lambda: len(first.client.finals) == 10)
        assert min(len(first.core.streams), len(second.core.streams)) > 0
        assert len(first.core.streams) + len(second.core.streams) == 10


async def test_a_model_that_nobody_serves_has_no_responders_at_once() -> None:
    async with front(says("hi")) as setup:
        await setup.client.ask(HI, slug="gpt-5")
        await until(lambda: len(setup.client.replies) == 1, within_s=0.5)
        assert is_no_responders(setup.client.last)
        assert not setup.core.streams


async def test_the_endpoints_are_the_models_subjects_with_what_came_there() -> None:
    async with front(says("hi")) as setup:
        listed = {endpoint.name: endpoint for endpoint in setup.front.endpoints}
        assert {(endpoint.subject, endpoint.queue) for endpoint in listed.values()} == {
            (subjects.chat(SLUG), subjects.GATEWAY_QUEUE),
            (subjects.completions(SLUG), subjects.GATEWAY_QUEUE),
            (subjects.responses(SLUG), subjects.GATEWAY_QUEUE),
            (subjects.messages(SLUG), subjects.GATEWAY_QUEUE),
            (subjects.embeddings(SLUG), subjects.GATEWAY_QUEUE),
            (subjects.score(SLUG), subjects.GATEWAY_QUEUE),
            (subjects.input_tokens(SLUG), subjects.GATEWAY_QUEUE),
            (subjects.count_tokens(SLUG), subjects.GATEWAY_QUEUE),
            (subjects.tokenize(SLUG), subjects.GATEWAY_QUEUE),
            (subjects.detokenize(SLUG), subjects.GATEWAY_QUEUE),
            (subjects.any_cancel(), ""),
        }
        for body in (HI, HI, {**HI, "temperature": -1}):
            await setup.client.ask(body)
        await setup.client.ask({"prompt": "x"}, kind="completion")
        await setup.client.ask(HI, reply="")
        await setup.client.ask(HI, reply="$JS.API.X")
        await setup.client.cancel("unknown")
        await until(lambda: len(setup.client.finals) == 4 and listed["cancel"].num_requests == 1)
        chat, completions = listed["chat"], listed["completions"]
        assert (chat.num_requests, chat.num_errors, chat.last_error) == (5, 3, "invalid_parameter")
        assert (completions.num_requests, completions.num_errors, completions.last_error) == (1, 0, "")
        assert 0 < completions.processing_ns < 10**9


async def test_a_draining_gateway_listens_to_nothing() -> None:
    async with front(says("hi")) as setup:
        await setup.front.drain()
        assert setup.front.endpoints == []
        await setup.client.ask(HI)
        await until(lambda: len(setup.client.replies) == 1)
        assert is_no_responders(setup.client.last)


async def beat(bus: MemoryBus, worker: str, epoch: int, model: str, *served: ServedModel) -> None:
    presence = Presence(worker=WorkerRef("gateway", worker, epoch), state="ready", model=model, models=list(served))
    await bus.publish(subjects.presence("gateway", worker), messages.encode(presence))


async def run_beside(model: str, *theirs: ServedModel, epoch: int, mine: Sequence[ServedModel] = ()) -> NatsFront:
    """A front for Small/Model-1 of epoch 1000, which hears a gateway of `model` and of `epoch`, that serves all of `theirs`.
    `mine`: what this front's gateway serves, if not that model alone.

    :raises ConfigError: what ended it.
    """
    broker = MemoryBroker()
    core = ScriptedCore()
    core.ref = WorkerRef("gateway", "gateway-mine", 1000)
    served, bus = front_of(core, broker.connect("gateway"), GatewayConfig()), broker.connect("other")
    async with AsyncExitStack() as stack:
        group = await stack.enter_async_context(anyio.create_task_group())
        await group.start(served.run)
        await beat(bus, "gateway-mine", 1000, BUNDLE.name, *mine)
        await beat(bus, "gateway-theirs", epoch, model, *theirs)
        for _ in range(20):  # turns of the loop, also where the machine pauses
            await anyio.sleep(0.001)
        group.cancel_scope.cancel()
    return served


@pytest.mark.parametrize("model", ["small-model-1", "small/model-1", "Small Model-1"])
async def test_of_two_names_with_one_subject_the_later_gateway_ends_with_a_line(model: str) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await run_beside(model, epoch=999)
    assert [type(error) for error in caught.value.exceptions] == [ConfigError], "else it would be a crash"
    pattern = f"'Small/Model-1' and '{model}', which gateway-theirs serves, .*chat.small-model-1: .*--served-model-name"
    assert caught.group_contains(ConfigError, match=pattern)


@pytest.mark.parametrize(("model", "epoch"), [("small-model-1", 1001), (BUNDLE.name, 999), ("other", 999)])
async def test_the_earlier_one_goes_on_and_so_do_two_of_one_name(model: str, epoch: int) -> None:
    await run_beside(model, epoch=epoch)


MINE = (ServedModel("One", ["assistant"]), ServedModel("two", identity="weights"))


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        (ServedModel("TWO"), "'two' and 'TWO', which gateway-theirs serves,"),
        (ServedModel("other", ["Assistant"]), "'assistant' and 'Assistant', which gateway-theirs serves,"),
        (ServedModel("other", ["two"]), "'two' is 'two' here and 'other' at gateway-theirs"),
        (ServedModel("two", identity="others"), "'two' has other weights here than at gateway-theirs, and requests for it"),
        (ServedModel("other", ["assistant"]), "'assistant' is 'One' here and 'other' at gateway-theirs"),
    ],
)
async def test_every_name_of_every_model_is_protected(theirs: ServedModel, says: str) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        await run_beside("x", ServedModel("x"), theirs, epoch=999, mine=MINE)
    assert caught.group_contains(ConfigError, match=says)
    await run_beside("x", ServedModel("x"), theirs, epoch=1001, mine=MINE)


@pytest.mark.parametrize(
    "served",
    [MINE, MINE[:1], MINE[1:], (ServedModel("One", ["assistant", "gpt"]),), (ServedModel("two"),), (ServedModel("x"),)],
)
async def test_gateways_share_models_as_they_like(served: tuple[ServedModel, ...]) -> None:
    await run_beside(served[0].name, *served, epoch=999, mine=MINE)


async def test_noise_on_the_presence_subject_ends_nobody() -> None:
    broker = MemoryBroker()
    async with front(says("hi"), broker=broker) as setup:
        bus = broker.connect("noise")
        await bus.publish(subjects.presence("gateway", "x"), b"\xff")
        await bus.publish(subjects.presence("gateway", "x"), messages.encode(messages.Cancel(requests=[])))
        await beat(bus, "gateway-theirs", 0, "small-model-1")  # this front has not heard its own name yet
        await setup.client.ask(HI)
        await setup.client.final()
        assert setup.client.text == "hi"
