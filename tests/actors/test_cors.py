"""Which web pages may read answers: `--allow-origin`, on whole answers, streams, errors and preflights."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest

from common.protocol.errors import ConfigError
from common.runtime import config as configuration
from common.runtime.http_access import HttpAccess
from common.runtime.http_cors import with_cors
from services.gateway.config import GatewayConfig
from tests.actors.edge import ScriptedCore, app_of
from tests.actors.http_client import CHAT, HI, config, says

PAGE = "https://chat.example"
ASKED = "authorization,content-type,x-api-key,x-stainless-arch,x-stainless-lang,x-stainless-retry-count"


def client(*origins: str, **settings: Any) -> httpx.AsyncClient:
    app = with_cors(app_of(ScriptedCore(says("ok")), config(**settings)), origins)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway")


def cors_of(response: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name.startswith("access-control-")}


async def preflight(http: httpx.AsyncClient, origin: str = PAGE) -> httpx.Response:
    asked = {"origin": origin, "access-control-request-method": "POST", "access-control-request-headers": ASKED}
    return await http.options(CHAT, headers=asked)


@pytest.mark.parametrize(("origins", "said"), [([PAGE, "http://other.example:3000"], PAGE), (["*"], "*")])
async def test_whole_answers_streams_and_errors_may_be_read(origins: list[str], said: str) -> None:
    async with client(*origins, api_key="key") as http:
        allowed = {"authorization": "Bearer key", "origin": PAGE}
        answers = {
            200: [
                await http.post(CHAT, json=HI, headers=allowed),
                await http.post(CHAT, json={**HI, "stream": True}, headers=allowed),
                await http.post("/tokenize", json={"prompt": "x"}, headers=allowed),
                await http.get("/v1/models", headers=allowed),
            ],
            400: [await http.post(CHAT, json={"messages": []}, headers=allowed)],
            401: [await http.post(CHAT, json=HI, headers={"origin": PAGE})],
            404: [await http.get("/nothing", headers=allowed), await http.get("/v1/models/nothing", headers=allowed)],
            405: [await http.get(CHAT, headers=allowed)],
        }
        for status, responses in answers.items():
            for response in responses:
                assert response.status_code == status
                assert response.headers["access-control-allow-origin"] == said
                assert "x-request-id" in response.headers["access-control-expose-headers"]
                assert ("vary" in response.headers) == (said != "*")
                assert "access-control-allow-credentials" not in response.headers


async def test_a_preflight_is_answered_without_a_key() -> None:
    async with client(PAGE, api_key="key") as http:
        response = await preflight(http)
        assert (response.status_code, response.content) == (204, b"")
        assert response.headers["access-control-allow-headers"] == ASKED
        assert "POST" in response.headers["access-control-allow-methods"]
        odd = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "a\nb"}
        assert "access-control-allow-headers" not in (await http.options(CHAT, headers=odd)).headers


async def test_other_pages_get_nothing_and_without_the_setting_nobody_does() -> None:
    async with client(PAGE) as http:
        for response in (await preflight(http, "https://other.example"), await http.post(CHAT, json=HI)):
            assert not cors_of(response)
        assert (await preflight(http, "https://other.example")).status_code == 405
    async with client() as http:
        assert not cors_of(await http.post(CHAT, json=HI, headers={"origin": PAGE}))
        response = await preflight(http)
        assert (response.status_code, cors_of(response)) == (405, {})


def test_the_flag_is_repeated_and_lets_requests_in() -> None:
    argv = ["--allow-origin", PAGE, "--allow-origin=http://localhost:3000,null"]
    settings = configuration.load(GatewayConfig, section="gateway", argv=argv, environ={})
    assert settings.allow_origin == (PAGE, "http://localhost:3000", "null")
    access = HttpAccess("0.0.0.0", allowed_origins=settings.page_origins)
    access.check([(b"host", b"api.example"), (b"origin", PAGE.encode())])


@pytest.mark.parametrize("origin", ["chat.example", "https://chat.example/page", "https://a b", "https://*.example"])
def test_what_no_browser_sends_as_an_origin_is_refused(origin: str) -> None:
    with pytest.raises((ConfigError, msgspec.ValidationError), match="origin"):
        configuration.load(GatewayConfig, section="gateway", argv=[f"--allow-origin={origin}"], environ={})
