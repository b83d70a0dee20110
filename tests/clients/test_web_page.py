"""A page of another site, as its browser sends for it: with --allow-origin it may ask and read, other pages may not."""

from __future__ import annotations

import httpx
from running import KEY, MODEL, PAGE, Penstock

CHAT = "/v1/chat/completions"
STAINLESS = "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-os,x-stainless-runtime"


def test_a_page_may_ask_and_read(penstock: Penstock) -> None:
    with httpx.Client(base_url=penstock.url, headers={"origin": PAGE}, timeout=60) as page:
        asked = {"access-control-request-method": "POST", "access-control-request-headers": STAINLESS}
        preflight = page.options(CHAT, headers=asked)
        assert preflight.status_code == 204
        assert preflight.headers["access-control-allow-origin"] == PAGE
        assert preflight.headers["access-control-allow-headers"] == STAINLESS
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        key = {"authorization": f"Bearer {KEY}"}
        for more, headers, status in (({}, key, 200), ({"stream": True}, key, 200), ({"n": 0}, key, 400), ({}, {}, 401)):
            answer = page.post(CHAT, json=body | more, headers=headers)
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, PAGE)


def test_another_page_may_not(penstock: Penstock) -> None:
    with httpx.Client(base_url=penstock.url, headers={"origin": "https://other.example"}, timeout=60) as page:
        for answer in (page.post(CHAT, json={}), page.options(CHAT, headers={"access-control-request-method": "POST"})):
            assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers
