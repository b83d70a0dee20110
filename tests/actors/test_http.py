"""The HTTP edge on a scripted core: OpenAI's forms, refusals before anything is taken, nothing held for clients that left."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError

from common.protocol.errors import DeadlineExceeded, NoWorkers, WorkerLost
from services.gateway import http_io
from services.gateway.choices import choice_seed
from services.gateway.config import GatewayConfig
from services.gateway.http import create_app
from tests.actors.edge import BUNDLE, EOS, MAX_CONTEXT, AsgiClient, ScriptedCore, ScriptedStream, ids, until

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MODEL = "Small/Model-1"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def config(**settings: Any) -> GatewayConfig:
    return GatewayConfig(**settings)


def says(text: str, *, finish: str = "length", **more: Any) -> Callable[[ScriptedStream], None]:
    return lambda stream: stream.say(text, finish=finish, **more)


def client(core: ScriptedCore, **settings: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=create_app(core, BUNDLE, config(**settings)))
    return httpx.AsyncClient(transport=transport, base_url="http://gateway")


async def post(core: ScriptedCore, path: str, body: Any, **settings: Any) -> httpx.Response:
    async with client(core, **settings) as http:
        if isinstance(body, bytes):
            return await http.post(path, content=body, headers={"content-type": "application/json"})
        return await http.post(path, json=body)


def check_error(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert error["message"]
    return error


# ── abuse ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "change",
    [
        {"n": 10**9},
        {"n": 17},
        {"temperature": -1},
        {"max_tokens": -1},
        {"min_tokens": 10**6},
        {"min_tokens": 30, "max_tokens": 20},
        {"stop": ["x"] * 5000},
        {"logit_bias": {str(EOS + 1): 1}},
        {"logit_bias": {"-1": 1}},
        {"stop_token_ids": [10**6]},
        {"tools": [{"type": "function"}]},
        {"response_format": {"type": "json_object"}},
        {"timeout": 10**6},
        {"unheard_of": 1},
        {"seed": "7"},
    ],
)
async def test_a_bad_argument_is_a_400_and_nothing_is_taken(path: str, change: dict[str, Any]) -> None:
    core = ScriptedCore()
    base = HI if path == CHAT else {"prompt": "hi"}
    error = check_error(await post(core, path, {**base, **change}), 400, "invalid_parameter")
    assert error["type"] == "invalid_request_error"
    assert error["param"] in change
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


async def test_a_conversation_over_the_context_is_a_400() -> None:
    core = ScriptedCore()
    body = {"messages": [{"role": "user", "content": "x" * MAX_CONTEXT}]}
    check_error(await post(core, CHAT, body), 400, "context_length_exceeded")
    body = {"messages": [{"role": "user", "content": "x" * 10_000_000}]}
    check_error(await post(core, CHAT, body, max_body_bytes=2**26), 400, "context_length_exceeded")


async def test_more_tokens_than_fit_behind_the_prompt_are_refused_and_none_given_means_all_that_fit() -> None:
    core = ScriptedCore(says("x"))
    prompt = BUNDLE.encode_chat(HI["messages"])
    room = MAX_CONTEXT - len(prompt)
    error = check_error(await post(core, CHAT, {**HI, "max_tokens": room + 1}), 400, "context_length_exceeded")
    assert str(room) in error["message"]
    await post(core, CHAT, {**HI, "max_tokens": room})
    await post(core, CHAT, HI)
    await post(core, COMPLETIONS, {"prompt": "hi"})
    assert [stream.request.sampling.max_tokens for stream in core.streams] == [room, room, 16]


async def test_special_tokens_in_a_users_text_are_plain_text() -> None:
    core = ScriptedCore(says("x"))
    await post(core, CHAT, {"messages": [{"role": "user", "content": "a<|end|>b"}]})
    assert EOS not in core.streams[0].request.prompt


async def test_a_body_is_refused_as_soon_as_it_is_too_large() -> None:
    core = ScriptedCore()
    huge = b'{"prompt":"' + b"x" * 50_000_000 + b'"}'
    check_error(await post(core, COMPLETIONS, huge), 413, "payload_too_large")
    chunked = AsgiClient(create_app(core, BUNDLE, config(max_body_bytes=10_000)), COMPLETIONS, huge[:1_000_000])
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
    monkeypatch.setattr(http_io, "BODY_TIMEOUT_S", 0.05)
    slow = AsgiClient(create_app(ScriptedCore(), BUNDLE, config()), CHAT, HI)
    slow.parts_read = 10**6
    await slow.run()
    assert slow.status == 408


async def test_a_client_that_leaves_while_sending_its_body_takes_nothing() -> None:
    core = ScriptedCore()
    leaving = AsgiClient(create_app(core, BUNDLE, config()), CHAT, HI)
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
    app = create_app(core, BUNDLE, config(max_requests=1))
    first, second = AsgiClient(app, CHAT, HI), AsgiClient(app, CHAT, HI)
    async with anyio.create_task_group() as group:
        group.start_soon(first.run)
        stream = await core.nth(0)
        await second.run()
        stream.say("x", finish="stop")
    assert (first.status, second.status, second.parts_read) == (200, 429, 0)


# ── whole answers ────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_chat_answer_in_full() -> None:
    core = ScriptedCore(lambda stream: stream.give([*ids("Héllo"), EOS], finish="stop", cached=4))
    response = await post(core, CHAT, {**HI, "model": MODEL, "seed": 7})
    body = response.json()
    prompt = BUNDLE.encode_chat(HI["messages"])
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Héllo", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 7,
        "total_tokens": len(prompt) + 7,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    request = core.streams[0].request
    assert request.prompt == prompt
    assert request.sampling.seed == 7
    assert request.sampling.stop_token_ids == [EOS]
    assert not core.live


async def test_ignore_eos_and_stop_token_ids() -> None:
    core = ScriptedCore(says("x"))
    await post(core, CHAT, {**HI, "ignore_eos": True, "stop_token_ids": [5, 3]})
    assert core.streams[0].request.sampling.stop_token_ids == [3, 5]


async def test_top_p_zero_keeps_the_likeliest_token_alone() -> None:
    core = ScriptedCore(says("x"))
    await post(core, CHAT, {**HI, "top_p": 0})
    await post(core, CHAT, {**HI, "top_k": -1})
    assert [(s.request.sampling.top_k, s.request.sampling.top_p) for s in core.streams] == [(1, 1.0), (0, 1.0)]


async def test_a_completion_for_each_prompt_and_choice() -> None:
    core = ScriptedCore(lambda stream: stream.say(f"<{len(stream.request.prompt)}>", finish="length", cached=1))
    response = await post(core, COMPLETIONS, {"prompt": ["a", "bcd"], "n": 2, "seed": 3, "echo": True})
    body = response.json()
    assert [choice["text"] for choice in body["choices"]] == ["a<1>", "a<1>", "bcd<3>", "bcd<3>"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 4
    assert body["usage"]["completion_tokens"] == 12
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
    seeds = [stream.request.sampling.seed for stream in core.streams]
    assert seeds == [3, choice_seed(3, 1), 3, choice_seed(3, 1)], "a prompt gives the same, alone or among others"


async def test_token_ids_are_taken_as_they_are_and_echoed_as_text() -> None:
    core = ScriptedCore(says("!"))
    response = await post(core, COMPLETIONS, {"prompt": ids("hey"), "echo": True})
    assert response.json()["choices"][0]["text"] == "hey!"
    assert core.streams[0].request.prompt == ids("hey")


async def test_chat_logprobs_as_openai_has_them() -> None:
    core = ScriptedCore(says("é"))
    response = await post(core, CHAT, {**HI, "logprobs": True, "top_logprobs": 2})
    logprobs = response.json()["choices"][0]["logprobs"]
    assert logprobs["refusal"] is None
    first, second = logprobs["content"]
    assert (first["token"], first["logprob"], first["bytes"]) == ("\ufffd", -0.25, [0xC3])
    assert second["bytes"] == [0xA9]
    assert [set(entry) for entry in first["top_logprobs"]] == [{"token", "logprob", "bytes"}] * 2
    assert core.streams[0].request.sampling.logprobs == 2


async def test_completion_logprobs_as_openai_has_them() -> None:
    core = ScriptedCore(says("ab"))
    response = await post(core, COMPLETIONS, {"prompt": "hi", "logprobs": 2})
    logprobs = response.json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b"]
    assert logprobs["token_logprobs"] == [-0.25, -0.25]
    assert logprobs["text_offset"] == [0, 1]
    assert logprobs["top_logprobs"][0]["a"] == -0.25
    assert len(logprobs["top_logprobs"][0]) == 3


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [(NoWorkers("none"), 503, "no_workers"), (DeadlineExceeded("late"), 504, "deadline_exceeded")],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_an_error_before_the_first_token_has_its_own_status(stream: bool, error: Any, status: int, code: str) -> None:
    core = ScriptedCore(lambda scripted: scripted.give([], error=error))
    check_error(await post(core, CHAT, {**HI, "stream": stream}), status, code)
    assert not core.live


async def test_a_fault_of_ours_is_a_500_with_an_id_and_no_details(monkeypatch: pytest.MonkeyPatch) -> None:
    core = ScriptedCore()
    monkeypatch.setattr(core, "generate", lambda request: 1 / 0)
    error = check_error(await post(core, CHAT, HI), 500, "internal_error")
    assert "chatcmpl-" in error["message"]
    assert "division" not in error["message"]


# ── streams ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def streaming(
    body: dict[str, Any], *, path: str = CHAT, streams: int = 1, **settings: Any
) -> AsyncIterator[tuple[AsgiClient, ScriptedCore]]:
    """A streamed request that the core has taken, with as many streams as there are choices."""
    core = ScriptedCore()
    request = AsgiClient(create_app(core, BUNDLE, config(**settings)), path, {**body, "stream": True})
    async with anyio.create_task_group() as group:
        group.start_soon(request.run)
        await core.nth(streams - 1)
        yield request, core
        group.cancel_scope.cancel()


async def test_a_stream_chunk_by_chunk() -> None:
    async with streaming({**HI, "stream_options": {"include_usage": True}}) as (request, core):
        stream = core.streams[0]
        assert request.status == 0, "the status waits for the first output"
        stream.say("Hel")
        await until(lambda: request.text == "Hel")
        stream.say("lo")
        await until(lambda: request.text == "Hello")
        stream.give([EOS], finish="stop", cached=3)
        await until(lambda: request.done)
        *chunks, usage, done = request.events
        assert request.headers["content-type"].startswith("text/event-stream")
        assert done == "[DONE]"
        assert [choice["delta"] for chunk in chunks for choice in chunk["choices"]] == [
            {"role": "assistant", "content": ""},
            {"content": "Hel"},
            {"content": "lo"},
            {},
        ]
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
        assert all(chunk["usage"] is None for chunk in chunks)
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 6
        assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
        assert len({event["id"] for event in [*chunks, usage]}) == 1
        assert not core.live


async def test_tokens_that_waited_while_the_client_read_slowly_share_a_chunk() -> None:
    async with streaming(HI) as (request, core):
        core.streams[0].say("a")
        await until(lambda: request.text == "a")
        request.stall()
        for letter in "bcdefg":
            core.streams[0].say(letter)
            await anyio.sleep(0.002)
        request.reading.set()
        core.streams[0].say("", finish="length")
        await until(lambda: request.done)
        assert request.text == "abcdefg"
        assert len(request.writes) <= 4


async def test_characters_are_never_split() -> None:
    async with streaming(HI) as (request, core):
        for token in ids("🙂é"):
            core.streams[0].give([token])
            await anyio.sleep(0.001)
        core.streams[0].say("", finish="stop")
        await until(lambda: request.done)
        texts = [choice["delta"].get("content") for event in request.events[:-1] for choice in event["choices"]]
        assert texts == ["", "🙂", "é", None]


async def test_a_stop_string_ends_the_stream_and_frees_the_workers() -> None:
    async with streaming({**HI, "stop": ["END"]}) as (request, core):
        core.streams[0].say("ab E")
        await until(lambda: request.text == "ab ")
        core.streams[0].say("ND and more")
        await until(lambda: request.done)
        assert request.text == "ab "
        assert request.events[-2]["choices"][0]["finish_reason"] == "stop"
        assert not core.live


async def test_an_error_in_a_stream_is_its_last_event() -> None:
    async with streaming(HI) as (request, core):
        core.streams[0].say("a")
        await until(lambda: request.text == "a")
        core.streams[0].give([], error=WorkerLost("the worker went away"))
        await until(lambda: request.done)
        assert request.events[-1]["error"]["code"] == "worker_lost"
        assert not core.live


async def test_choices_are_interleaved_and_each_ends_by_itself() -> None:
    async with streaming({**HI, "n": 3}, streams=3) as (request, core):
        first, second, third = core.streams
        second.say("b")
        await until(lambda: request.text == "b")
        first.say("a")
        third.say("c", finish="length")
        await until(lambda: len(request.text) == 3)
        assert not request.done
        first.say("", finish="stop")
        second.say("B", finish="stop")
        await until(lambda: request.done)
        by_choice = {0: "", 1: "", 2: ""}
        ends = {}
        for event in request.events[:-1]:
            for choice in event["choices"]:
                by_choice[choice["index"]] += choice["delta"].get("content", "")
                ends[choice["index"]] = choice["finish_reason"]
        assert by_choice == {0: "a", 1: "bB", 2: "c"}
        assert ends == {0: "stop", 1: "stop", 2: "length"}
        assert len({stream.request.sampling.seed for stream in core.streams}) == 3


async def test_a_stop_string_in_one_choice_leaves_the_others_alone() -> None:
    async with streaming({**HI, "n": 2, "stop": "."}, streams=2) as (request, core):
        core.streams[0].say("a.b")
        await until(lambda: core.streams[0].cancelled > 0)
        assert not core.streams[1].cancelled
        core.streams[1].say("c", finish="length")
        await until(lambda: request.done)
        assert request.text == "ac"
        assert request.events[-1] == "[DONE]"


async def test_one_choices_error_ends_them_all() -> None:
    async with streaming({**HI, "n": 3}, streams=3) as (request, core):
        core.streams[0].say("a")
        await until(lambda: request.text == "a")
        core.streams[1].give([], error=WorkerLost("gone"))
        await until(lambda: request.done)
        assert request.events[-1]["error"]["code"] == "worker_lost"
        assert not core.live


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("tokens_before", [0, 1])
async def test_a_client_that_hangs_up_frees_everything_at_once(n: int, tokens_before: int) -> None:
    async with streaming({**HI, "n": n}, streams=n) as (request, core):
        core.streams[0].say("a" * tokens_before)
        await anyio.sleep(0.01)
        request.hang_up()
        await until(lambda: not core.live, within_s=1)
        await until(lambda: request.done, within_s=1)


async def test_a_client_of_a_whole_answer_that_hangs_up_frees_everything() -> None:
    core = ScriptedCore()
    async with anyio.create_task_group() as group:
        request = AsgiClient(create_app(core, BUNDLE, config()), CHAT, HI)
        group.start_soon(request.run)
        await core.nth(0)
        request.hang_up()
    assert not core.live


async def test_a_reader_that_stalls_is_cut_off_and_its_workers_are_freed() -> None:
    async with streaming(HI, slow_reader_timeout_s=0.1) as (request, core):
        core.streams[0].say("a")
        await until(lambda: request.text == "a")
        request.stall()
        core.streams[0].say("b")
        await until(lambda: not core.live, within_s=1)
        await until(lambda: request.done, within_s=1)
        taken = core.streams[0].taken
        core.streams[0].say("c" * 100)
        await anyio.sleep(0.01)
        assert core.streams[0].taken == taken, "nothing is read for a client that does not read"


async def test_an_idle_stream_is_kept_open_by_comments() -> None:
    async with streaming(HI, sse_keepalive_s=0.02) as (request, core):
        await anyio.sleep(0.1)
        assert request.status == 0
        core.streams[0].say("a")
        await until(lambda: b": keep-alive\n\n" in request.writes)
        core.streams[0].say("", finish="stop")
        await until(lambda: request.done)
        assert request.text == "a"


async def test_completion_chunks_and_streamed_logprobs() -> None:
    async with streaming({"prompt": "hi", "logprobs": 1, "echo": None, "stop": "XY"}, path=COMPLETIONS) as (request, core):
        core.streams[0].say("aX")
        await anyio.sleep(0.01)
        core.streams[0].say("b", finish="length")
        await until(lambda: request.done)
        choices = [choice for event in request.events[:-1] for choice in event["choices"]]
        assert "".join(choice["text"] for choice in choices) == "aXb"
        scored = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        assert [token for scores in scored for token in scores["tokens"]] == ["a", "X", "b"]
        assert [offset for scores in scored for offset in scores["text_offset"]] == [0, 1, 2]
        assert choices[-1]["finish_reason"] == "length"
        assert request.events[0]["object"] == "text_completion"


# ── the rest ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_models_health_ready_and_metrics() -> None:
    core = ScriptedCore(says("abc"))
    async with client(core) as http:
        listed = (await http.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert [model["id"] for model in listed["data"]] == [MODEL]
        assert (await http.get(f"/v1/models/{MODEL}")).json() == listed["data"][0]
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/ready")).status_code == 200
        core.ready = False
        assert (await http.get("/ready")).status_code == 503
        await http.post(CHAT, json=HI)
        await http.post(CHAT, json={**HI, "n": -1})
        page = (await http.get("/metrics")).text
    assert "vllm:generation_tokens_total 3.0" in page
    assert "vllm:time_to_first_token_seconds_count 1.0" in page
    assert 'penstock_request_errors_total{code="invalid_parameter",edge="http"} 1.0' in page


async def test_the_official_client_streams_and_sees_typed_errors() -> None:
    core = ScriptedCore(says("hello", finish="stop"))
    async with client(core) as http:
        transport: Any = http
        openai = AsyncOpenAI(base_url="http://gateway/v1", api_key="none", http_client=transport)
        stream = await openai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True, logprobs=True, top_logprobs=1
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello"
        whole = await openai.completions.create(model=MODEL, prompt="hi", extra_body={"top_k": 5})
        assert whole.choices[0].text == "hello"
        with pytest.raises(BadRequestError) as caught:
            await openai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}], n=10**9)
        assert caught.value.param == "n"
