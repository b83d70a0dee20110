"""Tenants over HTTP: whose key it is, what each may take, and what a changed file of keys does."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from common.cli import keys
from common.protocol.errors import ConfigError, DeadlineExceeded, NoWorkers
from common.runtime import api_keys
from services.gateway.catalog import Catalog
from services.gateway.config import GatewayConfig
from services.gateway.door import Door
from services.gateway.http import create_app
from tests.actors.edge import BUNDLE, AsgiClient, ScriptedCore
from tests.actors.http_client import CHAT, HI, check_error, says
from tests.actors.http_site import serving

ACME, ZOO = "pk-of-acme", "pk-of-zoo"


def key_file(tmp_path: Path, tables: str = "[tenants.acme]\n[tenants.zoo]\n") -> Path:
    path = tmp_path / "keys.toml"
    lines = (api_keys.lines_for(key, name, known=["acme", "zoo"]) for key, name in ((ACME, "acme"), (ZOO, "zoo")))
    path.write_text(tables + "".join(lines))
    return path


@asynccontextmanager
async def gateway(
    path: Path, core: ScriptedCore | None = None, **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Door]]:
    core = core or ScriptedCore(says("hello"))
    config = GatewayConfig(api_keys=str(path), **settings)
    door = Door(config)
    app = create_app(core, Catalog.of_one(core, BUNDLE, config), config, door=door)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway") as http:
        yield http, door


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_a_key_is_sent_as_openai_or_as_anthropic_clients_do(tmp_path: Path) -> None:
    async with gateway(key_file(tmp_path)) as (http, _):
        for sent in (bearer(ACME), {"x-api-key": ACME}, {"authorization": "Basic eDp5", "x-api-key": ACME}):
            assert (await http.post(CHAT, json=HI, headers=sent)).status_code == 200
        for sent in ({}, bearer("pk-of-nobody"), {"x-api-key": ""}, bearer(""), {"authorization": ACME}, bearer(ACME + "\t x")):
            refused = await http.post(CHAT, json=HI, headers=sent)
            check_error(refused, 401, "invalid_api_key")
            assert refused.headers["www-authenticate"] == "Bearer"
        assert (await http.get("/v1/models")).status_code == 401
        assert (await http.get("/v1/models", headers=bearer(ZOO))).status_code == 200


async def test_keys_with_line_ends_and_headers_by_the_megabyte_are_clear_errors(tmp_path: Path) -> None:
    body = json.dumps(HI).encode()
    core = ScriptedCore(says("hello"))
    async with serving(core, api_keys=str(key_file(tmp_path))) as port:
        for key, status in (
            (b"pk\n-of-acme", b"400"),
            (b"x" * 60_000, b"401"),
            (b"x" * 2_000_000, b"431"),
            (b"\xff\xfe", b"401"),
        ):
            head = b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n" % (
                CHAT.encode(),
                len(body),
            )
            answer = await _raw(port, head + b"authorization: Bearer " + key + b"\r\n\r\n" + body)
            assert answer.startswith(b"HTTP/1.1 " + status), (status, answer[:200])
    assert not core.streams


async def _raw(port: int, request: bytes) -> bytes:
    async with await anyio.connect_tcp("127.0.0.1", port) as stream:
        with contextlib.suppress(anyio.BrokenResourceError):
            await stream.send(request)
        with anyio.fail_after(10):
            try:
                return await stream.receive(65536)
            except anyio.BrokenResourceError:
                return b""


async def test_a_limit_of_requests_is_429_with_the_time_to_wait_and_stops_nobody_else(tmp_path: Path) -> None:
    path = key_file(tmp_path, "[tenants.acme]\nrequests_per_minute = 2\n[tenants.zoo]\n")
    async with gateway(path) as (http, _):
        for _ in range(2):
            assert (await http.post(CHAT, json=HI, headers=bearer(ACME))).status_code == 200
        refused = await http.post(CHAT, json=HI, headers=bearer(ACME))
        error = check_error(refused, 429, "rate_limit_exceeded")
        assert error["type"] == "rate_limit_error" and 28 <= int(refused.headers["retry-after"]) <= 30
        for _ in range(5):
            assert (await http.post(CHAT, json=HI, headers=bearer(ZOO))).status_code == 200


async def test_tokenizing_is_for_models_that_a_tenant_may_use(tmp_path: Path) -> None:
    path = key_file(tmp_path, '[tenants.acme]\nmodels = ["another"]\n[tenants.zoo]\n')
    async with gateway(path) as (http, _):
        for route, body in (("/tokenize", {"prompt": "hello"}), ("/detokenize", {"tokens": [5]})):
            check_error(await http.post(route, json=body, headers=bearer(ACME)), 403, "forbidden")
            assert (await http.post(route, json=body, headers=bearer(ZOO))).status_code == 200
            assert (await http.post(route, json=body)).status_code == 401
        assert (await http.get("/tokenizer_info", headers=bearer(ACME))).status_code == 403


async def test_tokens_are_settled_by_what_was_used(tmp_path: Path) -> None:
    path = key_file(tmp_path, "[tenants.acme]\ntokens_per_minute = 300\n[tenants.zoo]\n")
    async with gateway(path) as (http, door):
        body = {**HI, "max_tokens": 100}
        used = 0
        for _ in range(5):  # 5 reservations would not fit
            usage = (await http.post(CHAT, json=body, headers=bearer(ACME))).json()["usage"]
            used += usage["total_tokens"]
        assert door.tenants["acme"]._tokens.level == pytest.approx(300 - used, abs=20)
        refused = await http.post(CHAT, json={**HI, "max_tokens": 290}, headers=bearer(ACME))
        assert "max_tokens" in check_error(refused, 429, "rate_limit_exceeded")["message"]
        assert door.tenants["acme"].num_running == 0


async def test_nothing_is_charged_where_nobody_could_be_served_which_is_503(tmp_path: Path) -> None:
    path = key_file(tmp_path, "[tenants.acme]\ntokens_per_minute = 1000\nmax_concurrent = 1\n[tenants.zoo]\n")
    core = ScriptedCore(lambda stream: stream.say(error=NoWorkers("none")))
    async with gateway(path, core) as (http, door):
        for _ in range(3):
            check_error(await http.post(CHAT, json=HI, headers=bearer(ACME)), 503, "no_workers")
        assert door.tenants["acme"]._tokens.level == 1000 and door.tenants["acme"].num_running == 0


async def test_a_prompt_whose_client_does_not_wait_is_charged(tmp_path: Path) -> None:
    path = key_file(tmp_path, "[tenants.acme]\ntokens_per_minute = 1000\n[tenants.zoo]\n")
    core = ScriptedCore()
    config = GatewayConfig(api_keys=str(path))
    door = Door(config)
    app = create_app(core, Catalog.of_one(core, BUNDLE, config), config, door=door)
    client = AsgiClient(app, CHAT, {**HI, "stream": True}, headers=bearer(ACME))
    async with anyio.create_task_group() as group:
        group.start_soon(client.run)
        await core.nth(0)
        client.hang_up()
    took = len(core.streams[0].request.prompt)
    assert took > 5 and door.tenants["acme"]._tokens.level == pytest.approx(1000 - took, abs=1)
    late = ScriptedCore(lambda stream: stream.say(error=DeadlineExceeded("too late")))
    async with gateway(path, late) as (http, door):
        check_error(await http.post(CHAT, json=HI, headers=bearer(ACME)), 504, "deadline_exceeded")
        assert door.tenants["acme"]._tokens.level == pytest.approx(1000 - took, abs=1)


async def test_a_request_whose_answer_cannot_be_sent_or_that_is_cancelled_leaves_its_place(tmp_path: Path) -> None:
    class Broken(AsgiClient):
        async def _send(self, message: Any) -> None:
            raise OSError("broken pipe")

    core, config = ScriptedCore(), GatewayConfig(api_keys=str(key_file(tmp_path)))
    door = Door(config)
    app = create_app(core, Catalog.of_one(core, BUNDLE, config), config, door=door)
    broken = Broken(app, "/tokenize", {"prompt": 5}, headers=bearer(ACME))
    with pytest.raises(OSError, match="broken pipe"):
        await broken.run()
    assert door.tenants["acme"].num_running == 0
    async with anyio.create_task_group() as group:
        group.start_soon(AsgiClient(app, CHAT, HI, headers=bearer(ACME)).run)
        await core.nth(0)
        assert door.tenants["acme"].num_running == 1
        group.cancel_scope.cancel()
    assert door.tenants["acme"].num_running == 0


async def test_a_tenant_has_as_much_context_as_it_was_given(tmp_path: Path) -> None:
    path = key_file(tmp_path, "[tenants.acme]\nmax_context = 64\n[tenants.zoo]\n")
    core = ScriptedCore(says("hello"))
    async with gateway(path, core) as (http, _):
        long = {"messages": [{"role": "user", "content": "x" * 100}]}
        check_error(await http.post(CHAT, json=long, headers=bearer(ACME)), 400, "context_length_exceeded")
        check_error(await http.post(CHAT, json={**HI, "max_tokens": 65}, headers=bearer(ACME)), 400, "context_length_exceeded")
        for body in (HI, {**HI, "max_tokens": 64}):
            assert (await http.post(CHAT, json=body, headers=bearer(ACME))).status_code == 200
            asked = core.streams[-1].request
            assert len(asked.prompt) + asked.sampling.max_tokens == 64
        assert (await http.post(CHAT, json=long, headers=bearer(ZOO))).status_code == 200


async def test_a_model_that_a_tenant_may_not_use_is_403_and_not_listed(tmp_path: Path) -> None:
    path = key_file(tmp_path, '[tenants.acme]\nmodels = ["other"]\n[tenants.zoo]\nmodels = ["Small/Model-1"]\n')
    async with gateway(path) as (http, _):
        check_error(await http.post(CHAT, json=HI, headers=bearer(ACME)), 403, "forbidden")
        check_error(await http.get("/v1/models/Small/Model-1", headers=bearer(ACME)), 403, "forbidden")
        for unknown in ("/v1/models/x", "/tokenizer_info?model=x"):
            assert "Small" not in (await http.get(unknown, headers=bearer(ACME))).text
            assert "Small" in (await http.get(unknown, headers=bearer(ZOO))).text
        error = check_error(await http.post(CHAT, json={**HI, "model": "x"}, headers=bearer(ACME)), 404, "model_not_found")
        assert "Small" not in error["message"]
        assert (await http.get("/v1/models", headers=bearer(ACME))).json()["data"] == []
        assert len((await http.get("/v1/models", headers=bearer(ZOO))).json()["data"]) == 1
        assert (await http.post(CHAT, json=HI, headers=bearer(ZOO))).status_code == 200


async def test_the_operators_key_stands_beside_tenants_and_sees_what_concerns_all(tmp_path: Path) -> None:
    path = key_file(tmp_path, "[tenants.acme]\nrequests_per_minute = 1\n[tenants.zoo]\ndashboard = true\n")
    async with gateway(path, api_key="operators") as (http, _):
        for _ in range(3):
            assert (await http.post(CHAT, json=HI, headers=bearer("operators"))).status_code == 200
        assert (await http.get("/metrics")).status_code == 401
        check_error(await http.get("/metrics", headers=bearer(ACME)), 403, "forbidden")
        for key in (ZOO, "operators"):
            assert (await http.get("/metrics", headers=bearer(key))).status_code == 200
        assert (await http.get("/health")).status_code == (await http.get("/ready")).status_code == 200


async def test_a_changed_file_takes_effect_as_a_whole_and_a_broken_one_changes_nothing(
    tmp_path: Path,
) -> None:
    path = key_file(tmp_path, "[tenants.acme]\nrequests_per_minute = 2\n[tenants.zoo]\n")
    async with gateway(path) as (http, door):

        async def status(key: str) -> int:
            return (await http.post(CHAT, json=HI, headers=bearer(key))).status_code

        assert await status(ACME) == 200
        keys.append(path, "pk-new", "newcomer")
        assert await status("pk-new") == 401
        await door.look(path)
        assert await status("pk-new") == 200
        assert [await status(ACME) for _ in range(2)] == [200, 429]  # what was used stays used
        whole = path.read_text()
        for broken in ("", "[tenants.acme", "[tenants.acme]\nweight = 'x'\n", "\0" * 100):
            path.write_text(broken)
            await door.look(path)
            assert await status(ZOO) == 200
        path.unlink()
        await door.look(path)
        assert await status(ZOO) == 200
        path.write_text(whole.replace("[tenants.zoo]", "[tenants.gone]").replace('"zoo"', '"gone"').replace("= 2", "= 9"))
        await door.look(path)
        assert await status(ACME) == 200
        assert set(door.tenants) == {"acme", "gone", "newcomer"}


@pytest.mark.parametrize("content", [None, "", "nonsense = 1"])
def test_without_a_usable_file_the_gateway_does_not_start(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "keys.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError) as refused:
        Door(GatewayConfig(api_keys=str(path)))
    assert str(path) in str(refused.value)


async def test_prompts_of_tenants_never_share_cached_kv_and_have_their_share_and_priority(tmp_path: Path) -> None:
    core = ScriptedCore(says("hello"))
    path = key_file(tmp_path, "[tenants.acme]\nweight = 3\n[tenants.zoo]\n")
    async with gateway(path, core, api_key="operators") as (http, _):
        for key in (ACME, ZOO, "operators"):
            for salt in ({}, {"cache_salt": "mine"}):
                await http.post(CHAT, json={**HI, **salt, "priority": -2}, headers=bearer(key))
    asked = [stream.request for stream in core.streams]
    assert len({request.salt for request in asked}) == 6 and asked[4].salt == b""
    assert [(request.tenant, request.weight) for request in asked[::2]] == [("acme", 3.0), ("zoo", 1.0), ("", 1.0)]
    assert {request.priority for request in asked} == {-2}


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/score", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"])
async def test_every_endpoint_asks_for_a_key_and_counts_its_requests(tmp_path: Path, path: str) -> None:
    file = key_file(tmp_path, "[tenants.acme]\nrequests_per_minute = 1\n[tenants.zoo]\n")
    async with gateway(file) as (http, door):
        assert (await http.post(path, json={})).status_code == 401
        assert (await http.post(path, json={}, headers=bearer(ACME))).status_code == 400
        refused = await http.post(path, json={}, headers=bearer(ACME))
        assert refused.status_code == 429 and "retry-after" in refused.headers
        assert door.tenants["acme"].num_running == 0
