"""The HTTP edge on a scripted core: what cannot be served is refused in OpenAI's form before anything is taken."""

from __future__ import annotations

import json
from typing import Any

import anyio
import msgspec
import pytest

from common.text.template import ChatTemplate
from services.gateway import http_body
from tests.actors.edge import BUNDLE, EOS, MAX_CONTEXT, AsgiClient, ScriptedCore, app_of
from tests.actors.http_client import CHAT, COMPLETIONS, HI, check_error, client, config, post, says


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "change",
    [
        {"n": 10**9},
        {"n": 17},
        {"temperature": -1},
        {"max_tokens": -2},
        {"seed": -2},
        {"min_tokens": 10**6},
        {"min_tokens": 30, "max_tokens": 20},
        {"stop": ["x"] * 5000},
        {"logit_bias": {str(EOS + 1): 1}},
        {"logit_bias": {"-1": 1}},
        {"stop_token_ids": [10**6]},
        {"tools": [{"type": "function"}]},
        {"response_format": {"type": "json_schema"}},
        {"timeout": 10**6},
        {"seed": "7"},
    ],
)
async def test_a_bad_argument_is_a_400_and_nothing_is_taken(path: str, change: dict[str, Any]) -> None:
    core = ScriptedCore()
    base = HI if path == CHAT else {"prompt": "hi"}
    error = check_error(await post(core, path, {**base, **change}), 400, "invalid_parameter")
    assert error["type"] == "invalid_request_error"
    assert error["param"].split(".")[0] in change
    assert not core.streams


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b'{"prompt":"\xff"}', b'{"prompt":' + b"[" * 100_000])
async def test_a_body_that_is_no_json_is_a_400(body: bytes) -> None:
    core = ScriptedCore()
    check_error(await post(core, COMPLETIONS, body), 400, "invalid_parameter")
    assert not core.streams


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ("", "empty_prompt"),
        ([], "empty_prompt"),
        ([""], "empty_prompt"),
        ([[]], "empty_prompt"),
        (["a", ""], "empty_prompt"),
        ("x" * 100_000, "context_length_exceeded"),
        ("x" * MAX_CONTEXT, "context_length_exceeded"),
        ([1] * MAX_CONTEXT, "context_length_exceeded"),
        ([[1] * 100_000], "context_length_exceeded"),
        ([EOS + 1], "invalid_parameter"),
        ([2**31], "invalid_parameter"),
        (["a"] * 129, "invalid_parameter"),
    ],
)
async def test_a_prompt_that_cannot_be_served_is_a_400(prompt: Any, code: str) -> None:
    core = ScriptedCore()
    check_error(await post(core, COMPLETIONS, {"prompt": prompt}), 400, code)
    assert not core.streams


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "a<|end|>"}),
        (COMPLETIONS, {"prompt": [5, EOS]}),
        (CHAT, HI),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {str(EOS): 1}}),
        ("/v1/embeddings", {"input": "a<|end|>"}),
        ("/v1/embeddings", {"input": [EOS]}),
    ],
)
async def test_a_token_that_the_tokenizer_has_and_the_model_has_not_is_a_400(path: str, body: dict[str, Any]) -> None:
    core = ScriptedCore()
    smaller = msgspec.structs.replace(BUNDLE, vocab_size=EOS, template=ChatTemplate("{{ messages[0].content }}<|end|>"))
    async with client(core, bundle=smaller) as http:
        error = check_error(await http.post(path, json=body), 400, "invalid_parameter")
    assert error["message"] == f"token id {EOS} ('<|end|>') is past the vocabulary of {EOS}"
    assert not core.streams


async def test_a_text_may_be_told_to_end_with_a_token_that_the_model_has_not() -> None:
    async with client(ScriptedCore(says("ok")), bundle=msgspec.structs.replace(BUNDLE, vocab_size=EOS)) as http:
        body = {"prompt": "a", "stop_token_ids": [EOS]}
        assert (await http.post(COMPLETIONS, json=body)).status_code == 200
        check_error(await http.post(COMPLETIONS, json=body | {"stop_token_ids": [EOS + 1]}), 400, "invalid_parameter")


async def test_a_token_that_only_the_model_has_is_taken() -> None:
    core = ScriptedCore(says("ok"))
    async with client(core, bundle=msgspec.structs.replace(BUNDLE, vocab_size=EOS + 8)) as http:
        answer = await http.post(COMPLETIONS, json={"prompt": [EOS + 7], "logit_bias": {str(EOS + 7): 1}})
        assert (answer.status_code, core.streams[0].request.prompt) == (200, [EOS + 7])
        assert (await http.post("/detokenize", json={"tokens": [EOS + 7, 5]})).status_code == 200
        check_error(await http.post(COMPLETIONS, json={"prompt": [EOS + 8]}), 400, "invalid_parameter")


async def test_a_conversation_over_the_context_is_a_400() -> None:
    core = ScriptedCore()
    body = {"messages": [{"role": "user", "content": "x" * MAX_CONTEXT}]}
    check_error(await post(core, CHAT, body), 400, "context_length_exceeded")
    body = {"messages": [{"role": "user", "content": "x" * 10_000_000}]}
    check_error(await post(core, CHAT, body, max_body_bytes=2**26), 400, "context_length_exceeded")


async def test_max_tokens_is_a_bound_and_more_than_the_context_has_is_a_mistake() -> None:
    core = ScriptedCore(says("x"))
    prompt = BUNDLE.encode_chat(HI["messages"])
    room = MAX_CONTEXT - len(prompt)
    error = check_error(await post(core, CHAT, {**HI, "max_tokens": MAX_CONTEXT + 1}), 400, "context_length_exceeded")
    assert str(room) in error["message"]
    for asked in (room, room + 1, MAX_CONTEXT):
        await post(core, CHAT, {**HI, "max_tokens": asked})
    await post(core, CHAT, HI)
    await post(core, COMPLETIONS, {"prompt": "hi"})
    assert [stream.request.sampling.max_tokens for stream in core.streams] == [room, room, room, room, 16]
    error = check_error(
        await post(core, CHAT, {**HI, "max_tokens": room + 1, "min_tokens": room + 1}), 400, "invalid_parameter"
    )
    assert error["param"] == "min_tokens"


async def test_special_tokens_in_a_users_text_are_plain_text() -> None:
    core = ScriptedCore(says("x"))
    await post(core, CHAT, {"messages": [{"role": "user", "content": "a<|end|>b"}]})
    assert EOS not in core.streams[0].request.prompt


async def test_a_body_is_refused_as_soon_as_it_is_too_large() -> None:
    core = ScriptedCore()
    huge = b'{"prompt":"' + b"x" * 50_000_000 + b'"}'
    check_error(await post(core, COMPLETIONS, huge), 413, "payload_too_large")
    chunked = AsgiClient(app_of(core, config(max_body_bytes=10_000)), COMPLETIONS, huge[:1_000_000])
    await chunked.run()
    assert chunked.status == 413
    assert chunked.parts_read <= 11, "the rest is not read"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonx"])
async def test_another_content_type_is_a_415(kind: str) -> None:
    async with client(ScriptedCore()) as http:
        response = await http.post(CHAT, content=json.dumps(HI), headers={"content-type": kind})
    check_error(response, 415, "unsupported_media_type")


async def test_a_charset_is_fine() -> None:
    async with client(ScriptedCore(says("x"))) as http:
        response = await http.post(CHAT, content=json.dumps(HI), headers={"content-type": "application/json; charset=utf-8"})
    assert response.status_code == 200


async def test_a_body_that_never_comes_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_body, "BODY_TIMEOUT_S", 0.05)
    slow = AsgiClient(app_of(ScriptedCore(), config()), CHAT, HI)
    slow.parts_read = 10**6
    await slow.run()
    assert slow.status == 408


async def test_a_client_that_leaves_while_sending_its_body_takes_nothing() -> None:
    core = ScriptedCore()
    leaving = AsgiClient(app_of(core, config()), CHAT, HI)
    leaving.parts_read = 10**6
    leaving.hang_up()
    await leaving.run()
    assert not core.streams


async def test_unknown_models_paths_and_methods_are_openai_errors() -> None:
    core = ScriptedCore()
    check_error(await post(core, CHAT, {**HI, "model": "gpt-5"}), 404, "model_not_found")
    async with client(core) as http:
        check_error(await http.get("/v1/models/nope"), 404, "model_not_found")
        check_error(await http.get("/v2"), 404, "not_found")
        response = await http.get(CHAT)
        check_error(response, 405, "method_not_allowed")
        assert response.headers["allow"] == "POST"


async def test_an_api_key_is_asked_for_where_one_is_set() -> None:
    async with client(ScriptedCore(says("x")), api_key="secret") as http:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}, {"authorization": "Bearer \xff"}):
            raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
            check_error(await http.post(CHAT, json=HI, headers=raw), 401, "invalid_api_key")
        check_error(await http.get("/v1/models"), 401, "invalid_api_key")
        assert (await http.post(CHAT, json=HI, headers={"authorization": "Bearer secret"})).status_code == 200
        assert (await http.get("/health")).status_code == 200


@pytest.mark.parametrize("sent", ["ok-1.2_3", "x" * 129, "a b", "a\tb", "<script>", "é"])
async def test_a_request_id_is_echoed_only_if_harmless(sent: str) -> None:
    async with client(ScriptedCore(says("x"))) as http:
        response = await http.post(CHAT, json=HI, headers=[(b"x-request-id", sent.encode("latin-1"))])
    assert (response.headers["x-request-id"] == sent) == (sent == "ok-1.2_3")
    assert response.json()["id"].startswith("chatcmpl-")


@pytest.mark.parametrize("value", ["0", "-1", "x", "1e3", "9" * 20, "٣"])
async def test_a_bad_deadline_header_is_a_400(value: str) -> None:
    async with client(ScriptedCore()) as http:
        response = await http.post(CHAT, json=HI, headers=[(b"penstock-deadline-ms", value.encode())])
    check_error(response, 400, "invalid_parameter")


async def test_the_shortest_deadline_holds() -> None:
    core = ScriptedCore(says("x"))
    async with client(core, default_deadline_s=50.0) as http:
        await http.post(CHAT, json=HI)
        await http.post(CHAT, json={**HI, "timeout": 20}, headers={"penstock-deadline-ms": "1500"})
        await http.post(CHAT, json={**HI, "timeout": 2.5})
    assert [stream.request.deadline_s for stream in core.streams] == [50.0, 1.5, 2.5]


async def test_while_draining_new_requests_are_a_503_that_says_when_to_come_back() -> None:
    core = ScriptedCore()
    core.draining = True
    response = await post(core, CHAT, HI)
    check_error(response, 503, "shutting_down")
    assert response.headers["retry-after"]


async def test_a_full_queue_is_a_429_and_the_choices_that_got_in_are_freed() -> None:
    core = ScriptedCore(capacity=2)
    check_error(await post(core, CHAT, {**HI, "n": 3}), 429, "overloaded")
    assert len(core.streams) == 2
    assert not core.live


async def test_requests_beyond_the_limit_are_refused_before_their_body_is_read() -> None:
    core = ScriptedCore()
    app = app_of(core, config(max_requests=1))
    first, second = AsgiClient(app, CHAT, HI), AsgiClient(app, CHAT, HI)
    async with anyio.create_task_group() as group:
        group.start_soon(first.run)
        stream = await core.nth(0)
        await second.run()
        stream.say("x", finish="stop")
    assert (first.status, second.status, second.parts_read) == (200, 429, 0)
