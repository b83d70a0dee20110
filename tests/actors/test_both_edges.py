"""What a request may say and what its answer says, the same over HTTP and NATS, chat and completion, streamed and whole."""

from __future__ import annotations

import json
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest
from openai import AsyncOpenAI

from common.text.generation_config import SamplingDefaults
from common.text.template import ChatTemplate
from tests.actors.both_edges import Edge, Kind, Seen, ask, body_of, everywhere, says
from tests.actors.edge import BUNDLE, EOS, MAX_CONTEXT, ScriptedCore, ScriptedStream, ids
from tests.actors.http_client import MODEL, client

# ── unknown and ignored arguments ────────────────────────────────────────────────────────────────────────────────────────


@everywhere
async def test_what_had_no_effect_is_named_in_a_warning_and_counted(edge: Edge, kind: Kind, stream: bool, n: int) -> None:
    core = ScriptedCore(says("ok"))
    seen = await ask(edge, core, kind, body_of(kind, stream, n, user="ann", temprature=1, odd=2))
    assert seen.texts == dict.fromkeys(range(n), "ok")
    assert seen.warning == "ignored: user, temprature (did you mean temperature?), odd"
    page = core.metrics.render().decode()
    assert 'penstock_ignored_arguments_total{argument="user"} 1.0' in page
    assert 'penstock_ignored_arguments_total{argument="unknown"} 2.0' in page
    assert (await ask(edge, core, kind, body_of(kind, stream, n))).warning == ""


@everywhere
async def test_strict_refuses_it_by_name(edge: Edge, kind: Kind, stream: bool, n: int) -> None:
    core = ScriptedCore()
    for argument in ("user", "temprature"):
        seen = await ask(edge, core, kind, body_of(kind, stream, n, **{argument: "x"}), strict=True)
        assert seen.error is not None
        assert (seen.error["code"], seen.error["param"]) == ("invalid_parameter", argument)
    assert not core.streams


@everywhere
async def test_what_would_change_the_answer_is_refused_by_name(edge: Edge, kind: Kind, stream: bool, n: int) -> None:
    core = ScriptedCore()
    seen = await ask(edge, core, kind, body_of(kind, stream, n, guided_regex="a+"))
    assert seen.error is not None and seen.error["param"] == "guided_regex"
    assert not core.streams


# ── obeyed arguments ─────────────────────────────────────────────────────────────────────────────────────────────────────


@everywhere
async def test_minus_one_is_a_random_seed_and_no_limit(edge: Edge, kind: Kind, stream: bool, n: int) -> None:
    core = ScriptedCore(says("ok"))
    for _ in range(2):
        assert (await ask(edge, core, kind, body_of(kind, stream, n, seed=-1, max_tokens=-1))).error is None
    requests = [started.request for started in core.streams]
    assert len({request.sampling.seed for request in requests}) == 2 * n
    assert {request.sampling.max_tokens for request in requests} == {MAX_CONTEXT - len(requests[0].prompt)}


@pytest.mark.parametrize("edge", ["http", "nats"])
@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize("n", [1, 3])
async def test_usage_in_each_chunk(edge: Edge, kind: Kind, n: int) -> None:
    core = ScriptedCore(lambda stream: stream.give([*ids("abc"), EOS], finish="stop"))
    options = {"include_usage": True, "continuous_usage_stats": True}
    seen = await ask(edge, core, kind, body_of(kind, True, n, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in seen.chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 4 * n
    assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in [seen.usage])
    plain = await ask(edge, core, kind, body_of(kind, True, n, stream_options={"continuous_usage_stats": True}))
    assert sum(chunk.get("usage") is not None for chunk in plain.chunks) == (1 if edge == "nats" else 0)


@everywhere
async def test_usage_tells_what_of_a_prediction_was_repeated(edge: Edge, kind: Kind, stream: bool, n: int) -> None:
    core = ScriptedCore(lambda stream: stream.give([*ids("abXcd"), EOS], finish="stop"))
    asked = body_of(kind, stream, n, prediction={"type": "content", "content": "abcdef"})
    if stream:
        asked["stream_options"] = {"include_usage": True}
    usage = (await ask(edge, core, kind, asked)).usage
    details = {"accepted_prediction_tokens": 4 * n, "rejected_prediction_tokens": 2 * n}
    assert usage["completion_tokens_details"] == details
    assert "completion_tokens_details" not in (await ask(edge, core, kind, asked | {"prediction": None})).usage


@everywhere
async def test_special_tokens_are_shown_on_request(edge: Edge, kind: Kind, stream: bool, n: int) -> None:
    core = ScriptedCore(lambda stream: stream.give([*ids("a"), EOS, *ids("b")], finish="length"))
    asked = body_of(kind, stream, n, ignore_eos=True)
    assert (await ask(edge, core, kind, asked)).texts[0] == "ab"
    assert (await ask(edge, core, kind, {**asked, "skip_special_tokens": False})).texts[0] == "a<|end|>b"


@pytest.mark.parametrize("edge", ["http", "nats"])
async def test_a_cache_salt_keeps_prompts_apart(edge: Edge) -> None:
    core = ScriptedCore(says("ok"))
    for salt in ("a", "b", "a", None):
        await ask(edge, core, "chat", body_of("chat", False, 1, cache_salt=salt))
    first, second, third, fourth = (started.request.salt for started in core.streams)
    assert first == third != second and fourth == b"" and len({first, second, fourth}) == 3


TEMPLATES = {
    "thinks": ChatTemplate("{{ reasoning_effort }}|{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"),
    "knows": ChatTemplate("{% for m in messages %}{% if m.role == 'developer' %}D{% endif %}{{ m.role }};{% endfor %}"),
}


@pytest.mark.parametrize("edge", ["http", "nats"])
async def test_a_named_template_and_its_variables(edge: Edge) -> None:
    core = ScriptedCore(says("ok"))
    bundle = msgspec.structs.replace(BUNDLE, named_templates=TEMPLATES)

    async def prompt(**arguments: Any) -> str:
        seen = await ask(edge, core, "chat", body_of("chat", False, 1, **arguments), bundle=bundle)
        assert seen.error is None
        return bundle.tokenizer.decode(core.streams[-1].request.prompt)

    assert await prompt(chat_template="thinks", reasoning_effort="low") == "low|user:hi;"
    assert await prompt(reasoning_effort="none") == "<|user|>hi<|bot|>"
    developer = [{"role": "developer", "content": "x"}]
    assert await prompt(messages=developer) == "<|system|>x<|bot|>"
    assert await prompt(messages=developer, chat_template="knows") == "Ddeveloper;"
    assert await prompt(reasoning_effort="low") == "<|user|>hi<|bot|>"
    body = body_of("chat", False, 1, chat_template="{{ messages }}")
    seen = await ask(edge, core, "chat", body, bundle=bundle)
    assert seen.error is not None and seen.error["param"] == "chat_template"


async def test_the_reasoning_of_a_message_that_is_sent_back_reaches_the_template() -> None:
    core = ScriptedCore(says("ok"))
    source = "{% for m in messages %}[{{ m.reasoning_content }}]{{ m.content }}{% endfor %}"
    bundle = msgspec.structs.replace(BUNDLE, template=ChatTemplate(source))
    messages = [{"role": "assistant", "content": "y", name: "why"} for name in ("reasoning", "reasoning_content")]
    await ask("http", core, "chat", {"messages": messages}, bundle=bundle)
    assert bundle.tokenizer.decode(core.streams[0].request.prompt) == "[why]y[why]y"


# ── the model's own defaults ─────────────────────────────────────────────────────────────────────────────────────────────

RECOMMENDED = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.05)


@everywhere
async def test_a_request_without_values_gets_the_models(edge: Edge, kind: Kind, stream: bool, n: int) -> None:
    core = ScriptedCore(says("ok"))
    bundle = msgspec.structs.replace(BUNDLE, sampling=RECOMMENDED)
    await ask(edge, core, kind, body_of(kind, stream, n), bundle=bundle)
    given = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
    await ask(edge, core, kind, body_of(kind, stream, n, **given), bundle=bundle)
    first, last = core.streams[0].request.sampling, core.streams[-1].request.sampling
    assert {name: getattr(first, name) for name in given} == msgspec.structs.asdict(RECOMMENDED)
    assert {name: getattr(last, name) for name in given} == given


# ── bounds of an answer ──────────────────────────────────────────────────────────────────────────────────────────────────


@everywhere
async def test_an_answer_that_would_be_too_large_is_a_400_with_the_sum(edge: Edge, kind: Kind, stream: bool, n: int) -> None:
    core = ScriptedCore(says("ok"))
    scores = {"logprobs": True, "top_logprobs": 4} if kind == "chat" else {"logprobs": 4}
    limit = n * 10 * 5
    fits = body_of(kind, stream, n, max_tokens=10, **scores)
    assert (await ask(edge, core, kind, fits, max_answer_values=limit)).error is None
    error = (await ask(edge, core, kind, {**fits, "max_tokens": 11}, max_answer_values=limit)).error
    assert error is not None and (error["code"], error["param"]) == ("invalid_parameter", "max_tokens")
    assert f"1 × {n} × 11 × 5 = {n * 55}; at most {limit}" in error["message"]
    del fits["max_tokens"]
    assert (await ask(edge, core, kind, fits, max_answer_values=limit)).error is None
    assert core.streams[-1].request.sampling.max_tokens == 10, "none given: what fits"


@pytest.mark.parametrize("edge", ["http", "nats"])
@pytest.mark.parametrize("kind", ["chat", "completion"])
async def test_whole_answers_hold_no_more_memory_than_they_may(edge: Edge, kind: Kind) -> None:
    core = ScriptedCore(lambda stream: stream.say("x" * 400_000, finish="stop"))
    seen = await ask(edge, core, kind, body_of(kind, False, 2), max_collected_bytes=500_000)
    assert seen.error is not None and seen.error["code"] == "overloaded"
    assert not core.live, "and their requests are given up"
    assert (await ask(edge, core, kind, body_of(kind, True, 2), max_collected_bytes=500_000)).error is None
    assert (await ask(edge, core, kind, body_of(kind, False, 1), max_collected_bytes=500_000)).error is None


@everywhere
async def test_chat_errors_name_the_messages(edge: Edge, kind: Kind, stream: bool, n: int) -> None:
    core = ScriptedCore()
    named = "messages" if kind == "chat" else "prompt"
    for size in (MAX_CONTEXT, 100_000):
        text = "x" * size
        prompt = {"messages": [{"role": "user", "content": text}]} if kind == "chat" else {"prompt": text}
        error = (await ask(edge, core, kind, {**prompt, "stream": stream, "n": n})).error
        assert error is not None and (error["code"], error["param"]) == ("context_length_exceeded", named)
        assert named in error["message"]
    empty = msgspec.structs.replace(BUNDLE, template=ChatTemplate(""))
    if kind == "chat":
        error = (await ask(edge, core, kind, body_of(kind, stream, n), bundle=empty)).error
        assert error is not None and (error["code"], error["param"]) == ("empty_prompt", "messages")


# ── the official client ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("n", [1, 2])
async def test_the_openai_client_sends_what_it_likes(n: int) -> None:
    core = ScriptedCore(says("hello"))
    async with client(core) as http:
        transport: Any = http
        openai = AsyncOpenAI(base_url="http://gateway/v1", api_key="none", http_client=transport)
        messages: list[Any] = [
            {"role": "developer", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
            {"role": "assistant", "content": "y", "reasoning": "z", "provider_specific_fields": {"a": 1}, "id": "m1"},
            {"role": "user", "content": "hi"},
        ]
        extra: dict[str, Any] = {"top_k": 5, "repetition_penalty": 1.1, "chat_id": "c"}
        whole = await openai.chat.completions.with_raw_response.create(
            model=MODEL, messages=messages, n=n, seed=-1, user="ann", metadata={"a": "b"}, extra_body=extra
        )
        assert [choice.message.content for choice in whole.parse().choices] == ["hello"] * n
        assert "chat_id" in whole.headers["warning"] and "messages[].id" in whole.headers["warning"]
        options: Any = {"include_usage": True, "continuous_usage_stats": True}
        stream = await openai.chat.completions.create(
            model=MODEL, messages=messages, n=n, stream=True, stream_options=options, max_tokens=-1
        )
        chunks = [chunk async for chunk in stream]
        assert all(chunk.usage is not None for chunk in chunks)
        text = await openai.completions.create(model=MODEL, prompt="hi", n=n, max_tokens=-1, extra_body={"add_bos": True})
        assert [choice.text for choice in text.choices] == ["hello"] * n


async def test_a_stream_that_arrives_at_once_lets_others_have_their_turn() -> None:
    """A slow reader's backlog is worked off in slices; meanwhile the loop goes round."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await anyio.lowlevel.checkpoint()

    def script(stream: ScriptedStream) -> None:
        stream.give(ids("x" * 20_000), finish="length")

    async def count_while(asked: dict[str, Any]) -> Seen:
        async with anyio.create_task_group() as group:
            group.start_soon(count)
            try:
                return await ask("http", ScriptedCore(script), "chat", asked)
            finally:
                group.cancel_scope.cancel()
        raise AssertionError

    seen = await count_while(body_of("chat", False, 2, logprobs=True, top_logprobs=20))
    assert turns > 500
    assert seen.texts == {0: "x" * 20_000, 1: "x" * 20_000}
    content = seen.chunks[0]["choices"][1]["logprobs"]["content"]
    assert len(content) == 20_000 and len(content[-1]["top_logprobs"]) == 20
    assert json.dumps(content[0]["top_logprobs"][0])
