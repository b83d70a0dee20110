"""`penstock explain` on real processes: one timeline over services, of requests that move or end early, too."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import anyio
import httpx
import pytest
import pytest_asyncio

from common.cli.explain import ask
from common.models.source import ModelFiles
from common.protocol import subjects
from common.protocol.errors import NotFound
from common.protocol.explain_messages import Explanation
from tests.e2e.stack import ROOT, Reply, Stack

SECRET = "the emperor's new clothes"
MODEL = "smollm2-135m-instruct"
KEYS = {"acme": "pk-acme-0123456789", "zoo": "pk-zoo-0123456789"}
ACME, ZOO = ({"authorization": f"Bearer {key}"} for key in KEYS.values())
OPERATOR = "operator-key-0123"

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(nats_server: str, smollm2: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Two gateways, 1 prefill and 2 decode workers; long prompts are handed off."""
    engine = ("--engine", "simulated", "--profile", "h200-llama-8b", "--kv-cache-mb", "64")
    directory = tmp_path_factory.mktemp("explain")
    keys = directory / "keys.toml"
    told = "".join(f"[tenants.{tenant}]\n" for tenant in KEYS)
    for tenant, key in KEYS.items():
        told += f'[[keys]]\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\ntenant = "{tenant}"\n'
    keys.write_text(told)
    async with Stack(nats_server, directory, flags=("--model", smollm2.name), engine_flags=engine) as stack:
        for _ in range(2):
            await stack.start("gateway", "--direct-max-tokens", "-1", "--api-keys", str(keys), "--api-key", OPERATOR)
        for role in ("prefill", "decode", "decode"):
            await stack.start(role)
        stack.client.headers["authorization"] = f"Bearer {OPERATOR}"
        await stack.ready()
        await both_gateways_know_both_decode_workers(stack)
        yield stack


async def both_gateways_know_both_decode_workers(stack: Stack) -> None:
    """A gateway is ready with one decode worker; it hears of the other within a heartbeat. Asks nothing that tests ask: that
    would be cached."""
    body = {"model": MODEL, "prompt": [9, 8, 7], "max_tokens": 1}
    for gateway in ("gateway-0", "gateway-1"):
        known = set[str]()
        with anyio.fail_after(30):
            while known != {"decode-0", "decode-1"}:
                answer = await stack.client.post(f"{stack.url(gateway)}/v1/completions", json=body)
                (one,) = (await ask(stack.bus, answer.json()["id"])).requests
                routed = next(event for event in one.events if event.event == "routed")
                known = {each.worker for each in routed.candidates if each.part == "decode"}


async def penstock(stack: Stack, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "common.cli", "explain", *words, "--nats-url", stack.nats_url]
    return await anyio.to_thread.run_sync(
        lambda: subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    )


async def chat(stack: Stack, gateway: str = "gateway-0", **more: str) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": SECRET}], "max_tokens": 5}
    body |= {"temperature": 0, "ignore_eos": True}
    answer = await stack.client.post(f"{stack.url(gateway)}/v1/chat/completions", json=body, headers=more)
    assert answer.status_code == 200, answer.text
    return answer


async def explained(stack: Stack, id: str) -> Explanation:
    (one,) = (await ask(stack.bus, id)).requests
    return one


def order(one: Explanation, *events: tuple[str, str]) -> list[float]:
    """The times of these events, each (service, name) in the timeline once at least."""
    return [next(e.at_ms for e in one.events if (e.service, e.event) == event) for event in events]


async def test_a_request_is_one_timeline_over_all_services(stack: Stack) -> None:
    id = (await chat(stack)).json()["id"]
    one = await explained(stack, id)
    times = order(
        one,
        ("gateway", "received"),
        ("gateway", "queued"),
        ("gateway", "routed"),
        ("prefill", "prefill chunk"),
        ("prefill", "hand-off"),
        ("decode", "KV received"),
        ("decode", "first step"),
        ("gateway", "last token"),
        ("gateway", "ended"),
    )
    assert times == sorted(times) and times[0] == 0 and times[-1] <= one.duration_ms + 0.1
    assert times[3] <= order(one, ("gateway", "first token"))[0]
    assert (one.gateway, one.model, one.finish, one.code, one.state) == ("gateway-0", MODEL, "length", "", "done")
    assert one.output_tokens == 5 and one.prompt_tokens > 10 and not one.silent
    assert [event.at_ms for event in one.events] == sorted(event.at_ms for event in one.events)
    routed = next(event for event in one.events if event.event == "routed")
    assert routed.facts["prefill"] == "prefill-0" and routed.facts["path"] == "prefill" and routed.facts["reason"]
    decoders = [each for each in routed.candidates if each.part == "decode"]
    assert {each.worker for each in decoders} == {"decode-0", "decode-1"}
    assert [each.worker for each in decoders if each.chosen] == [routed.facts["decode"]]
    assert all(each.cost_ms >= 0 for each in routed.candidates)
    pulled = next(event for event in one.events if event.event == "KV received")
    assert pulled.facts["received_tokens"] == one.prompt_tokens and pulled.facts["recomputed_tokens"] == 0
    assert int(pulled.facts["received_bytes"]) > 0 and pulled.facts["from"] == "prefill-0"


async def test_nothing_that_was_said_is_in_a_timeline(stack: Stack) -> None:
    answer = (await chat(stack)).json()
    ended = await penstock(stack, answer["id"], "--json")
    assert ended.returncode == 0, ended.stderr
    for word in (*SECRET.split()[1:], answer["choices"][0]["message"]["content"]):
        assert not word.strip() or word not in ended.stdout
    (one,) = json.loads(ended.stdout)["requests"]
    assert one["id"] == answer["id"] and one["events"][0]["event"] == "received"


async def test_the_command_prints_it_by_either_name_whichever_gateway_has_it(stack: Stack) -> None:
    answer = await chat(stack, "gateway-1", **{"x-request-id": "my.own-name"})
    assert answer.headers["x-request-id"] == "my.own-name"
    for name in ("my.own-name", answer.json()["id"]):
        ended = await penstock(stack, name)
        assert ended.returncode == 0, ended.stderr
        told = ended.stdout.splitlines()
        assert answer.json()["id"] in told[0] and "my.own-name" in told[0]
        assert "ended with length after" in told[1]
        assert any("routed" in line and "prefill-0 → decode-" in line for line in told)
        assert any("decode on decode-" in line and "chosen" in line for line in told)


async def test_each_choice_has_its_own(stack: Stack) -> None:
    body = {"model": MODEL, "prompt": [1, 2, 3], "n": 3, "max_tokens": 2, "temperature": 1}
    answer = await stack.client.post(f"{stack.url()}/v1/completions", json=body)
    id = answer.json()["id"]
    assert [one.id for one in (await ask(stack.bus, id)).requests] == [f"{id}-{number}" for number in range(3)]
    assert [one.id for one in (await ask(stack.bus, f"{id}-1")).requests] == [f"{id}-1"]


async def test_an_unknown_id_is_one_line_and_an_error(stack: Stack) -> None:
    ended = await penstock(stack, "chatcmpl-unheard-of")
    assert ended.returncode == 1 and ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert "not_found" in line and "chatcmpl-unheard-of" in line


async def test_a_request_that_is_cancelled_shows_how_it_ended(stack: Stack) -> None:
    body: dict[str, Any] = {"model": MODEL, "prompt": [1, 2, 3], "max_tokens": 2000, "ignore_eos": True, "stream": True}
    running: Explanation | None = None
    async with stack.client.stream("POST", f"{stack.url()}/v1/completions", json=body, headers={"x-request-id": "left"}) as got:
        async for _ in got.aiter_lines():
            running = await explained(stack, "left")
            break
    assert running is not None and running.state != "done" and not running.finish
    with anyio.fail_after(10):
        while (one := await explained(stack, "left")).state != "done":
            await anyio.sleep(0.05)
    assert (one.finish, one.code) == ("error", "cancelled")
    assert one.events[-1].event in ("ended", "let go") and 0 < one.output_tokens < 2000


async def test_a_tenant_is_told_of_its_own_requests_only(stack: Stack) -> None:
    id = (await chat(stack, **ACME)).json()["id"]
    url = f"{stack.url()}/v1/explain"
    own = await stack.client.get(f"{url}/{id}", headers=ACME)
    assert own.status_code == 200 and own.json()["requests"][0]["tenant"] == "acme"
    others, nobodys = [await stack.client.get(f"{url}/{name}", headers=ZOO) for name in (id, "chatcmpl-0")]
    assert others.status_code == nobodys.status_code == 404
    assert others.json()["error"]["message"].replace(id, "chatcmpl-0") == nobodys.json()["error"]["message"]
    assert (await stack.client.get(f"{url}/{id}", headers={"authorization": "Bearer x"})).status_code == 401
    assert (await stack.client.get(f"{url}/{id}")).status_code == 200  # the operator


async def test_a_tenant_on_the_bus_is_told_of_its_own_requests_only(stack: Stack) -> None:
    id = (await chat(stack, **ACME)).json()["id"]
    inbox, heard = "_INBOX.zoo.explain", anyio.Event()
    codes: list[str] = []

    def hear(message: Any) -> None:
        codes.append(message.headers.get("Nats-Service-Error-Code", ""))
        if len(codes) == 2:
            heard.set()

    subscription = await stack.bus.subscribe(inbox, hear)
    subject = subjects.of_tenant("zoo", subjects.explain())
    await stack.bus.publish(subject, json.dumps({"request": id}).encode(), reply=inbox)
    with anyio.fail_after(5):
        await heard.wait()
    await subscription.unsubscribe()
    assert codes == ["not_found", "not_found"]


async def test_a_request_whose_decode_worker_is_killed_shows_the_move(stack: Stack) -> None:
    reply, victim = Reply(), ""
    async with anyio.create_task_group() as group:
        group.start_soon(stream_slowly, stack, reply)
        with anyio.fail_after(30):
            while len(reply.times) < 3:
                await anyio.sleep(0.01)
        victim = str(next(e.facts["decode"] for e in (await explained(stack, "moves")).events if e.event == "routed"))
        stack.kill(victim)
    assert reply.error is None and reply.finish == "length"
    one = await explained(stack, "moves")
    moved = next(event for event in one.events if event.event == "moved")
    assert moved.facts == {"error": "worker_lost", "decode": victim}
    first, second = (event for event in one.events if event.event == "routed")
    assert first.facts["decode"] == victim != second.facts["decode"] and second.attempt == 2
    assert first.at_ms < moved.at_ms <= second.at_ms < one.duration_ms
    assert list(one.silent) == [victim] and one.output_tokens == 400
    with pytest.raises(NotFound):
        await ask(stack.bus, "move", others_s=0.5)


async def stream_slowly(stack: Stack, reply: Reply) -> None:
    stack.client.headers["x-request-id"] = "moves"
    await stack.complete([1, 2, 3] * 20, reply=reply, max_tokens=400, ignore_eos=True)
    del stack.client.headers["x-request-id"]


async def test_hits_are_told_by_where_the_kv_was(stack: Stack) -> None:
    """In the prefill worker's own cache; and in a kvstore, for a worker that has just started."""
    prompt = [number % 900 + 5 for number in range(256)]
    await stack.start("kvstore")
    await stack.ready()
    await anyio.sleep(1)  # until workers have heard of it
    await complete(stack, prompt)
    local = await explained(stack, await complete(stack, prompt))
    admitted = next(e for e in local.events if (e.service, e.event) == ("prefill", "admitted"))
    assert int(admitted.facts["local_hit_tokens"]) >= 128
    await anyio.sleep(0.5)  # blocks are offered in the background
    stack.kill("prefill-0")
    await stack.start("prefill")
    await stack.ready()
    await anyio.sleep(1)
    stored = await explained(stack, await complete(stack, prompt))
    copied = next(e for e in stored.events if (e.worker, e.event) == ("prefill-1", "kvstore"))
    assert int(copied.facts["kvstore_hit_tokens"]) >= 128
    assert stored.cached_tokens == copied.facts["kvstore_hit_tokens"]


async def complete(stack: Stack, prompt: list[int]) -> str:
    """Return the request's id."""
    answer = await stack.client.post(f"{stack.url()}/v1/completions", json={"model": MODEL, "prompt": prompt, "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]
