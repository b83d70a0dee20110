"""Several gateways on the same workers, in virtual time: what one sends, the others hear of at once."""

from __future__ import annotations

import time
from pathlib import Path

import anyio
import pytest

from common.protocol import messages, subjects
from common.protocol.messages import Presence, SamplingParams
from common.runtime.bus import BusMessage
from services.decode.kept_place import OVERTAKEN_S
from services.gateway.actor import GatewayActor
from services.gateway.generation import GenerationRequest
from tests.chaos.test_cache_groups import play, prompt
from tests.chaos.world import Outcome, World


async def ask(world: World, gateway: str, name: str, tokens: list[int], *, max_tokens: int = 4) -> Outcome:
    """Through one gateway of several, and wait for the whole answer."""
    actor = world.processes[gateway].actor
    assert isinstance(actor, GatewayActor)
    outcome = Outcome(tokens, SamplingParams(seed=1, max_tokens=max_tokens), world.rule)
    world.outcomes.append(outcome)
    request = GenerationRequest(id=name, prompt=tokens, sampling=outcome.sampling, deadline_s=60.0)
    await world._read(actor, request, outcome, None)
    return outcome


@pytest.mark.parametrize("long_tokens", [100, 1000])
def test_workers_tell_of_long_prompts_once_two_gateways_send(
    tmp_path: Path, long_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.worker.early_heartbeats.LONG_TOKENS", long_tokens)
    told: list[float] = []

    async def story(world: World) -> None:
        first = world.alive("gateway")[0]
        second = await world.start("gateway")
        listener = world.broker.connect("listener")

        def hear(message: BusMessage) -> None:
            presence = messages.decode(message.data)
            assert isinstance(presence, Presence)
            if presence.worker.role == "prefill":
                told.append(time.monotonic())

        await listener.subscribe(subjects.presence_of("prefill"), hear)
        await anyio.sleep(2.0)
        for number, gateway in enumerate((first, first, second, first)):
            await anyio.sleep(1.1)
            before, begun = len(told), time.monotonic()
            outcome = await ask(world, gateway, f"asked-{number}", prompt(200, 3 + 50 * number))
            assert outcome.tokens == outcome.expected
            await anyio.sleep(0.01)
            extra = [at for at in told[before:] if at - begun < 0.01]
            assert bool(extra) == (number >= 2 and long_tokens == 100), (number, told[before:])
        await listener.close()

    play(tmp_path, story, ())


def test_a_long_prompt_has_its_turn_although_another_gateway_keeps_the_worker_full(tmp_path: Path) -> None:
    """Its own gateway lets nobody pass in the end; of the other one's requests it does not know."""

    async def story(world: World) -> None:
        first = world.alive("gateway")[0]
        second = await world.start("gateway")
        await anyio.sleep(2.0)
        took: list[float] = []

        async def ask_again_and_again(client: int) -> None:
            number = 0
            while not took:
                number += 1
                await ask(world, second, f"short-{client}-{number}", prompt(24, 50 * client + number), max_tokens=60)

        async with anyio.create_task_group() as clients:
            for client in range(8):
                clients.start_soon(ask_again_and_again, client)
            await anyio.sleep(2.0)
            began = time.monotonic()
            await ask(world, first, "long", prompt(200))
            took.append(time.monotonic() - began)
        assert OVERTAKEN_S <= took[0] < 3 * OVERTAKEN_S, took

    play(tmp_path, story, (), num_blocks=64)
