"""One gateway, several models: each request is answered by its own model's workers, and what happens to one model is nothing to
the others."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import msgspec
import pytest

from common.protocol import headers, subjects
from common.protocol.errors import NoWorkers, Overloaded
from common.protocol.messages import Presence, SamplingParams
from common.runtime.routing import is_no_responders
from common.testing.memory_bus import MemoryBroker
from services.gateway.config import GatewayConfig
from services.gateway.model_core import Served
from services.gateway.requests import GenerationRequest
from tests.actors.edge import BUNDLE
from tests.actors.gateway_site import LONG, SHORT, TIMES, Site, expected, read, read_some
from tests.actors.nats_client import Client

pytestmark = pytest.mark.virtual_time

ONE, TWO = "Org/One", "two"
ALIASES = {ONE: ("assistant", "gpt"), TWO: ()}
BOTH = (ONE, TWO)


def settings_of(model: str, **settings: Any) -> GatewayConfig:
    options: dict[str, Any] = {"canary": False, "task_timeout_s": 0.5, "stall_s": 0.2, "direct_max_tokens": 4, **TIMES}
    return GatewayConfig(**{**options, "model": model, "aliases": ALIASES[model], **settings})


def served(model: str, config: GatewayConfig) -> Served:
    return Served(config, msgspec.structs.replace(BUNDLE, name=model))


@asynccontextmanager
async def models(
    *names: str, broker: MemoryBroker | None = None, workers: bool = True, gateway: str = "gateway-1", **settings: Any
) -> AsyncIterator[Site]:
    """A gateway of these models, with a prefill and a decode worker for each."""
    configs = [settings_of(name, worker_id=gateway, **settings) for name in names]
    async with anyio.create_task_group() as group:
        at = Site(group, configs[0], [served(name, each) for name, each in zip(names, configs, strict=True)], broker=broker)
        for name in names if workers else ():
            await at.add("prefill", model=name, fingerprint=name)
            await at.add("decode", model=name, fingerprint=name)
        await group.start(at.gateway.run)
        for core in at.gateway.cores:
            await at.until(lambda core=core: core.router.decode.usable and core.router.prefill.usable)
        yield at
        group.cancel_scope.cancel()


def text_of(model: str, prompt: list[int], count: int) -> str:
    detokenizer = BUNDLE.detokenizer(continues=True)
    return detokenizer.push(expected(prompt, count, model=model)) + detokenizer.finish()


@asynccontextmanager
async def over_http(at: Site) -> AsyncIterator[httpx.AsyncClient]:
    app = at.gateway.http_app()
    assert app is not None
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway") as http:
        yield http


async def complete(http: httpx.AsyncClient, prompt: list[int], model: str | None, count: int = 12) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    return await http.post("/v1/completions", json=body if model is None else body | {"model": model})


# ── routes ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_every_request_is_answered_by_its_own_models_workers() -> None:
    async with models(*BOTH) as at, over_http(at) as http:

        async def one(number: int) -> None:
            model = BOTH[number % 2]
            prompt = [number, *(LONG if number % 3 else SHORT)]
            answer = (await complete(http, prompt, model)).json()
            assert answer["model"] == model
            assert answer["choices"][0]["text"] == text_of(model, prompt, 12)

        async with anyio.create_task_group() as group:
            for number in range(60):
                group.start_soon(one, number)
        assert all(len(double.tasks) >= 10 for double in at.workers)
        await at.nothing_held()


async def test_an_alias_is_the_model_under_the_name_that_was_asked_for() -> None:
    async with models(*BOTH) as at, over_http(at) as http:
        for name in (ONE, *ALIASES[ONE]):
            answer = (await complete(http, SHORT, name)).json()
            assert (answer["model"], answer["choices"][0]["text"]) == (name, text_of(ONE, SHORT, 12))
        assert "# " not in at.gateway.metrics.render().decode().splitlines()[-1]
        assert (
            'request_success_total{finished_reason="length",model_name="Org/One"} 3.0' in at.gateway.metrics.render().decode()
        )


async def test_an_unknown_model_is_a_404_that_lists_what_there_is_and_none_a_400() -> None:
    async with models(*BOTH) as at, over_http(at) as http:
        answer = await complete(http, SHORT, "gpt-5")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert "'gpt-5' is not served here; Org/One, assistant, gpt, two are" in answer.json()["error"]["message"]
        answer = await complete(http, SHORT, None)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
        assert "Org/One, assistant, gpt, two" in answer.json()["error"]["message"]
        assert not any(double.tasks for double in at.workers)


async def test_with_one_model_none_need_be_named() -> None:
    async with models(ONE) as at, over_http(at) as http:
        answer = (await complete(http, SHORT, None)).json()
        assert (answer["model"], answer["choices"][0]["text"]) == (ONE, text_of(ONE, SHORT, 12))


async def test_the_models_are_listed_with_their_aliases() -> None:
    async with models(*BOTH) as at, over_http(at) as http:
        listed = (await http.get("/v1/models")).json()["data"]
        assert [(model["id"], model["root"], model["parent"]) for model in listed] == [
            (ONE, ONE, None),
            ("assistant", ONE, ONE),
            ("gpt", ONE, ONE),
            (TWO, TWO, None),
        ]
        assert (await http.get("/v1/models/assistant")).json()["root"] == ONE
        assert (await http.get("/v1/models/none")).status_code == 404


async def test_each_name_has_a_subject_and_a_subject_has_one_model() -> None:
    async with models(*BOTH) as at:
        listed = {endpoint.subject: endpoint for endpoint in at.gateway.endpoints()}
        expected_subjects = {subjects.chat(subjects.slug(name)) for name in (ONE, *ALIASES[ONE], TWO)}
        assert expected_subjects <= listed.keys()
        assert len({endpoint.name for endpoint in listed.values()}) == len(listed)
        client = Client(at.broker.connect("client"))
        await client.listen()
        body = {"prompt": SHORT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "stream": False}
        for slug, model in (("org-one", ONE), ("assistant", ONE), ("two", TWO)):
            await client.ask(body, kind="completion", slug=slug)
            await at.until(lambda: headers.FINAL in client.replies[-1].headers if client.replies else False)
            answer = json.loads(client.replies[-1].data)
            assert (answer["model"], answer["choices"][0]["text"]) == (model, text_of(model, SHORT, 12))
            client.replies.clear()
        await client.ask(body | {"model": TWO}, kind="completion", slug="org-one")
        await at.until(lambda: client.replies)
        assert client.replies[-1].headers[headers.ERROR_CODE] == "model_not_found"
        assert "publish to the subject of two" in client.replies[-1].headers[headers.ERROR]
        assert listed[subjects.completions("org-one")].num_errors == 1
        assert listed[subjects.completions("two")].num_requests == 1


# ── pools ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_pool_that_dies_is_its_own_models_trouble_and_comes_back() -> None:
    async with models(*BOTH, no_workers_grace_s=0.3) as at, over_http(at) as http:
        one, two = at.gateway.cores
        stays = two.generate(_request("stays", LONG))
        lost = one.generate(_request("lost", LONG))
        assert len(await read_some(stays, 3)) >= 3 and len(await read_some(lost, 3)) >= 3
        await at.kill(at.decode[0])
        with pytest.raises(NoWorkers):
            await read(lost)
        answer = await complete(http, SHORT, ONE)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_workers")
        assert (await complete(http, SHORT, TWO)).json()["choices"][0]["text"] == text_of(TWO, SHORT, 12)
        assert (await read(stays))[-1:] == expected(LONG, 200, model=TWO)[-1:]
        await at.until(lambda: not one.ready and two.ready)
        assert (await http.get("/ready")).status_code == (await http.get("/ready?model=two")).status_code == 200
        assert (await http.get(f"/ready?model={ONE}")).status_code == 503
        assert (await http.get("/ready?model=none")).status_code == 404
        health = await http.get("/health")
        assert health.status_code == 200
        assert health.json()["models"] == [{"id": ONE, "ready": False}, {"id": TWO, "ready": True}]
        await at.add("decode", model=ONE, fingerprint=ONE)
        await at.until(lambda: one.ready)
        assert (await complete(http, SHORT, ONE)).json()["choices"][0]["text"] == text_of(ONE, SHORT, 12)


async def test_a_full_queue_of_one_model_refuses_nobody_elses_requests() -> None:
    async with models(*BOTH, max_queue=2) as at:
        one, two = at.gateway.cores
        for double in at.workers:
            if double.model == ONE:
                double.credits = 0
        await at.until(lambda: not one.router.has_room)
        waiting = [one.generate(_request(f"w{number}", SHORT)) for number in range(2)]
        with pytest.raises(Overloaded):
            one.generate(_request("more", SHORT))
        assert await read(two.generate(_request("other", SHORT, count=8))) == expected(SHORT, 8, model=TWO)
        for stream in waiting:
            stream.cancel()
        await at.nothing_held()


async def test_the_limit_of_all_requests_is_the_gateways() -> None:
    async with models(*BOTH, max_requests=3) as at:
        one, two = at.gateway.cores
        streams = [core.generate(_request(f"r{number}", LONG)) for number, core in enumerate((one, two, one))]
        for core in (one, two):
            with pytest.raises(Overloaded, match="3 requests are running"):
                core.generate(_request("more", LONG))
        for stream in streams:
            stream.cancel()


async def test_streams_of_every_model_outlive_a_gateways_new_epoch() -> None:
    async with models(*BOTH) as at:
        streams = {core.name: core.generate(_request(core.name.replace("/", "-"), LONG)) for core in at.gateway.cores}
        heads = {name: await read_some(stream, 3) for name, stream in streams.items()}
        at.gateway._begin_anew(at.gateway.ref.epoch)
        for name, stream in streams.items():
            assert heads[name] + await read(stream) == expected(LONG, 200, model=name)
        await at.nothing_held()


# ── several gateways ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_gateways_of_the_same_models_share_their_requests() -> None:
    broker = MemoryBroker()
    async with (
        models(*BOTH, broker=broker) as first,
        models(*BOTH, broker=broker, workers=False, gateway="gateway-2") as second,
    ):
        client = Client(broker.connect("client"))
        await client.listen()
        for number in range(40):
            body = {"prompt": [number], "max_tokens": 2, "stream": False}
            await client.ask(body, kind="completion", slug=("org-one", "two")[number % 2])
        await first.until(lambda: len(client.finals) == 40)
        assert not any(headers.ERROR in reply.headers for reply in client.replies)
        for at in (first, second):
            counted = {endpoint.name: endpoint.num_requests for endpoint in at.gateway.endpoints()}
            assert counted["completions"] > 0 and counted["completions-two"] > 0


async def test_a_gateway_of_one_model_works_beside_one_of_both() -> None:
    broker = MemoryBroker()
    async with models(*BOTH, broker=broker) as both, models(TWO, broker=broker, workers=False, gateway="gateway-2") as alone:
        client = Client(broker.connect("client"))
        await client.listen()
        body = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "stream": False}
        asked: dict[str, tuple[str, list[int]]] = {}
        for number in range(40):
            model = BOTH[number % 2]
            id = f"r{number}"
            asked[id] = (model, [number])
            await client.ask(
                body | {"prompt": [number], "model": model},
                kind="completion",
                slug=subjects.slug(model),
                **{headers.REQUEST_ID: id},
            )
        await both.until(lambda: len(client.finals) == 40)
        for reply in client.finals:
            model, prompt = asked[reply.headers[headers.REQUEST_ID]]
            answer = json.loads(reply.data)
            assert (answer["model"], answer["choices"][0]["text"]) == (model, text_of(model, prompt, 12))
        assert len(alone.gateway.endpoints()) == 2 + len(subjects.VIEWS)  # and cancel and explain
        assert alone.gateway.endpoints()[1].num_requests > 0
        await both.gateway.stop()
        client.replies.clear()
        await client.ask(body | {"prompt": [1]}, kind="completion", slug="two")
        await client.ask(body | {"prompt": [1]}, kind="completion", slug="org-one")
        await both.until(lambda: len(client.replies) == 2)
        assert sorted(map(is_no_responders, client.replies)) == [False, True]


async def test_the_heartbeat_names_every_model() -> None:
    async with models(*BOTH) as at:
        heard: list[Presence] = []
        listener = at.broker.connect("listener")
        await listener.subscribe(
            subjects.presence_of("gateway"), lambda message: heard.append(msgspec.msgpack.decode(message.data, type=Presence))
        )
        await at.until(lambda: heard and all(model.ready for model in heard[-1].models))
        assert [(model.name, model.aliases) for model in heard[-1].models] == [(ONE, ["assistant", "gpt"]), (TWO, [])]
        assert heard[-1].model == ONE


def _request(id: str, prompt: list[int], *, count: int = 200) -> GenerationRequest:
    return GenerationRequest(id=id, prompt=prompt, sampling=SamplingParams(max_tokens=count, temperature=0.0), deadline_s=20.0)
