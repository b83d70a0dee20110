"""The gateway with its real edges between worker doubles: a client's bytes in, a client's bytes out."""

from __future__ import annotations

import json

import anyio
import httpx
import pytest

from common.protocol import headers, subjects
from common.runtime.bus import BusMessage
from tests.actors.edge import BUNDLE, ids
from tests.actors.gateway_site import Site, expected, site

pytestmark = pytest.mark.virtual_time

PROMPT = "A prompt that is long enough to go through prefill"


def client(at: Site) -> httpx.AsyncClient:
    app = at.gateway.http_app()
    assert app is not None
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")


def body(prompt: str, max_tokens: int = 12, **more: object) -> dict[str, object]:
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more}


def text_of(prompt: str, max_tokens: int = 12) -> str:
    detokenizer = BUNDLE.detokenizer()
    return detokenizer.push(expected(ids(prompt), max_tokens)) + detokenizer.finish()


async def test_http_gives_the_tokens_that_the_workers_made() -> None:
    async with site(bundle=BUNDLE) as at, client(at) as http:
        answer = (await http.post("/v1/completions", json=body(PROMPT))).json()
        assert answer["choices"][0]["text"] == text_of(PROMPT)
        assert answer["usage"]["completion_tokens"] == 12
        await at.nothing_held()


async def test_several_choices_are_several_requests_and_all_are_freed() -> None:
    async with site(bundle=BUNDLE, decode=2) as at, client(at) as http:
        answer = (await http.post("/v1/completions", json=body(PROMPT, n=3))).json()
        assert [choice["text"] for choice in answer["choices"]] == [text_of(PROMPT)] * 3
        await at.nothing_held()


async def test_the_core_s_refusals_and_errors_have_their_status() -> None:
    async with site(bundle=BUNDLE, max_queue=0, prefill=0) as at, client(at) as http:
        at.decode[0].credits = 0
        await anyio.sleep(0.15)
        assert (await http.post("/v1/completions", json=body(PROMPT))).status_code == 429
        at.decode[0].credits = 64
        await anyio.sleep(0.15)
        at.decode[0].mute = True
        late = await http.post("/v1/completions", json=body(PROMPT), headers={headers.DEADLINE_MS: "200"})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        at.decode[0].mute = False
        await at.nothing_held()


async def test_ready_and_metrics_are_the_actor_s() -> None:
    async with site(bundle=BUNDLE, canary=True) as at, client(at) as http:
        await at.until(lambda: at.gateway.ready)
        assert (await http.get("/ready")).status_code == 200
        assert "vllm:num_requests_waiting" in (await http.get("/metrics")).text
        at.broker.stop()
        assert (await http.get("/ready")).status_code == 503
        at.broker.start()


async def test_nats_streams_through_a_killed_worker() -> None:
    async with site(bundle=BUNDLE, decode=2) as at:
        bus = at.broker.connect("client")
        replies: list[BusMessage] = []
        inbox = bus.new_inbox()
        await bus.subscribe(inbox, replies.append)
        subject = subjects.completions(subjects.slug(BUNDLE.name))
        await bus.publish(subject, json.dumps(body(PROMPT, 60)).encode(), reply=inbox)
        await at.until(lambda: len(replies) > 5)
        await at.kill(next(double for double in at.decode if double.held))
        await at.until(lambda: replies[-1].headers.get(headers.FINAL))
        chunks = [json.loads(reply.data) for reply in replies]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text_of(PROMPT, 60)
        await at.nothing_held()


async def test_a_drain_ends_after_the_nats_client_has_its_answer() -> None:
    async with site(bundle=BUNDLE) as at:
        bus = at.broker.connect("client")
        replies: list[BusMessage] = []
        inbox = bus.new_inbox()
        await bus.subscribe(inbox, replies.append)
        subject = subjects.completions(subjects.slug(BUNDLE.name))
        await bus.publish(subject, json.dumps(body(PROMPT, 60)).encode(), reply=inbox)
        await at.until(lambda: replies)
        at.gateway.begin_drain()
        await at.until(lambda: not at.gateway.running)
        assert replies[-1].headers.get(headers.FINAL)
        assert not replies[-1].headers.get(headers.ERROR_CODE)
