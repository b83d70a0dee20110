"""The HTTP edge on a scripted core: whole answers and their errors in OpenAI's form, and what else it serves."""

from __future__ import annotations

from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, InternalServerError

from common.protocol.errors import DeadlineExceeded, InvalidLogits, NoWorkers, PenstockError, WorkersDied
from services.gateway.choices import choice_seed
from tests.actors.edge import BUNDLE, EOS, MAX_CONTEXT, ScriptedCore, ScriptedStream, ids
from tests.actors.http_client import CHAT, COMPLETIONS, HI, MODEL, check_error, client, post, says

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


async def test_what_one_choice_computed_of_a_prompt_is_not_cached_although_the_others_found_it() -> None:
    def answer(stream: ScriptedStream) -> None:
        number = len(core.streams) - 1
        stream.say("x", finish="length", cached=(1, 3, 0, 2)[number])

    core = ScriptedCore(answer)
    response = await post(core, COMPLETIONS, {"prompt": ["abcd", "efgh"], "n": 2})
    assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 1 + 0


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


# ── the rest ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_context_is_what_workers_hold_if_that_is_less_than_the_models() -> None:
    core = ScriptedCore(says("abc"))
    async with client(core) as http:
        for longest, context in ((0, MAX_CONTEXT), (MAX_CONTEXT + 1, MAX_CONTEXT), (100, 100)):
            core.longest, core.longest_read = longest, 2 * longest
            assert (await http.get("/v1/models")).json()["data"][0]["max_model_len"] == context
            refused = await http.post(COMPLETIONS, json={"prompt": [5] * 50, "max_tokens": context + 1})
            check_error(refused, 400, "context_length_exceeded")
            assert f"50 of {context} tokens" in refused.text
        check_error(await http.post(COMPLETIONS, json={"prompt": [5] * 100}), 400, "context_length_exceeded")
        assert len(core.streams) == 0
        assert (await http.post(COMPLETIONS, json={"prompt": [5] * 50, "max_tokens": -1})).status_code == 200
        assert core.streams[0].request.sampling.max_tokens == 50


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
    assert f'vllm:generation_tokens_total{{model_name="{MODEL}"}} 3.0' in page
    assert f'vllm:time_to_first_token_seconds_count{{model_name="{MODEL}"}} 1.0' in page
    assert 'penstock_request_errors_total{code="invalid_parameter",edge="http"} 1.0' in page


@pytest.mark.parametrize("error", [DeadlineExceeded("late"), WorkersDied("killed two"), InvalidLogits("NaN")])
@pytest.mark.parametrize("stream", [True, False])
async def test_the_official_client_does_not_send_again_what_would_fail_again(error: PenstockError, stream: bool) -> None:
    core = ScriptedCore(lambda scripted: scripted.give([], error=error))
    async with client(core) as http:
        transport: Any = http
        openai = AsyncOpenAI(base_url="http://gateway/v1", api_key="none", http_client=transport)
        with pytest.raises(InternalServerError):
            await openai.completions.create(model=MODEL, prompt="hi", stream=stream)
    assert len(core.streams) == 1


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
