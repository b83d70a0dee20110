"""What a request may say and what its answer says, the same over HTTP and NATS, chat and completion, streamed and whole."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest
from openai import AsyncOpenAI

from common.protocol.errors import NoWorkers
from common.runtime import logs
from common.text.generation_config import SamplingDefaults
from common.text.template import ChatTemplate
from services.gateway.http import create_app
from tests.actors.both_edges import Edge, Kind, Seen, ask, body_of, everywhere, nats_edge, says
from tests.actors.edge import BUNDLE, EOS, MAX_CONTEXT, AsgiClient, ScriptedCore, ScriptedStream, ids, until
from tests.actors.http_client import CHAT, MODEL, client, config


def silent() -> ScriptedCore:
    return ScriptedCore()


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
    core = silent()
    for argument in ("user", "temprature"):
        seen = await ask(edge, core, kind, body_of(kind, stream, n, **{argument: "x"}), strict=True)
        assert seen.error is not None
        assert (seen.error["code"], seen.error["param"]) == ("invalid_parameter", argument)
    assert not core.streams


@everywhere
async def test_what_would_change_the_answer_is_refused_by_name(edge: Edge, kind: Kind, stream: bool, n: int) -> None:
    core = silent()
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
    for arguments, param in (
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
    ):
        seen = await ask(edge, core, "chat", body_of("chat", False, 1, **arguments), bundle=bundle)
        assert seen.error is not None and seen.error["param"] == param


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
    core = silent()
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


# ── logs and counters ────────────────────────────────────────────────────────────────────────────────────────────────────


class Records(logging.Handler):
    """`answered`: the access log's lines. `others`: warnings and errors of everybody else."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.answered: list[dict[str, Any]] = []
        self.others: list[str] = []

    def info(self, line: str) -> None:
        self.answered.append(json.loads(line))

    def emit(self, record: logging.LogRecord) -> None:
        self.others.append(str(record.msg))


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Iterator[Records]:
    handler = Records()
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    monkeypatch.setattr(logs._Stderr, "info", lambda _, line: handler.info(line))
    monkeypatch.setattr(logs, "_fast_format", "json")
    yield handler
    root.removeHandler(handler)
    root.setLevel(level)


@everywhere
async def test_one_line_in_the_log_for_each_answered_request(
    records: Records, edge: Edge, kind: Kind, stream: bool, n: int
) -> None:
    core = ScriptedCore(lambda stream: stream.give([*ids("secret"), EOS], finish="stop", cached=2))
    prompt = {"messages": [{"role": "user", "content": "private"}]} if kind == "chat" else {"prompt": "private"}
    await ask(edge, core, kind, {**prompt, "stream": stream, "n": n})
    [line] = records.answered
    assert line["request"].startswith("chatcmpl-" if kind == "chat" else "cmpl-")
    assert line["client_id"]
    expected = {"edge": edge, "status": 200, "code": "", "finish": "stop", "model": MODEL, "stream": stream, "choices": n}
    assert {name: line[name] for name in expected} == expected
    assert (
        line["path"]
        == {
            ("http", "chat"): "/v1/chat/completions",
            ("http", "completion"): "/v1/completions",
            ("nats", "chat"): "penstock.v1.chat.small-model-1",
            ("nats", "completion"): "penstock.v1.completions.small-model-1",
        }[edge, kind]
    )
    assert (line["prompt_tokens"], line["completion_tokens"]) == (len(core.streams[0].request.prompt), 7 * n)
    assert line["cached_tokens"] == 2
    assert 0 <= line["ttft_s"] <= line["duration_s"]
    assert "secret" not in str(line) and "private" not in str(line)
    page = core.metrics.render().decode()
    assert f'vllm:request_success_total{{finished_reason="stop",model_name="{MODEL}"}} 1.0' in page
    assert "penstock_request_errors_total{" not in page


@everywhere
async def test_refused_and_failed_requests_are_logged_and_are_no_successes(
    records: Records, edge: Edge, kind: Kind, stream: bool, n: int
) -> None:
    core = ScriptedCore(lambda stream: stream.give([], error=NoWorkers("none")))
    await ask(edge, core, kind, body_of(kind, stream, n, temperature=-1))
    await ask(edge, core, kind, body_of(kind, stream, n))
    refused, failed = records.answered
    assert (refused["status"], refused["code"]) == (400, "invalid_parameter") and "finish" not in refused
    assert (failed["status"], failed["code"], failed["finish"]) == (503, "no_workers", "")
    page = core.metrics.render().decode()
    assert "vllm:request_success_total{" not in page
    for code in ("invalid_parameter", "no_workers"):
        assert f'penstock_request_errors_total{{code="{code}",edge="{edge}"}} 1.0' in page


async def test_a_line_for_people_says_the_same(records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(logs, "_fast_format", "console")
    monkeypatch.setattr(logs._Stderr, "info", lambda _, line: lines.append(line))
    await ask("http", ScriptedCore(says("ok")), "chat", body_of("chat", False, 1))
    [line] = lines
    assert " [info     ] request_answered " in line and " edge=http " in line and line.endswith("\n")
    logging.getLogger().setLevel(logging.WARNING)
    await ask("http", ScriptedCore(says("ok")), "chat", body_of("chat", False, 1))
    assert len(lines) == 1, "not below the level that is logged"


async def test_the_access_log_can_be_turned_off(records: Records) -> None:
    for edge in ("http", "nats"):
        await ask(edge, ScriptedCore(says("ok")), "chat", body_of("chat", False, 1), access_log=False)
    assert not records.answered


async def test_a_client_s_own_id_is_in_the_log(records: Records) -> None:
    core = ScriptedCore(says("ok"))
    async with client(core) as http:
        await http.post(CHAT, json=body_of("chat", False, 1), headers={"x-request-id": "mine-1"})
    async with nats_edge(core) as nats:
        await nats.ask(body_of("chat", True, 1), Penstock_Request_Id="mine-2")
        await nats.final()
    await until(lambda: len(records.answered) == 2)
    assert [line["client_id"] for line in records.answered] == ["mine-1", "mine-2"]


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize("tokens_before", [0, 1])
async def test_a_client_that_leaves_is_no_fault_of_ours(
    records: Records, kind: Kind, stream: bool, n: int, tokens_before: int
) -> None:
    core = silent()
    path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
    request = AsgiClient(create_app(core, BUNDLE, config()), path, body_of(kind, stream, n))
    async with anyio.create_task_group() as group:
        group.start_soon(request.run)
        await core.nth(n - 1)
        for started in core.streams[: n if tokens_before else 0]:
            started.say("a")
        await anyio.sleep(0.01)
        request.hang_up()
        await until(lambda: not core.live and request.done)
    [line] = records.answered
    assert (line["status"], line["code"]) == (499, "client_closed_request")
    assert not records.others, "nothing is logged as a failure"
    page = core.metrics.render().decode()
    assert "internal_error" not in page and "vllm:request_success_total{" not in page
    assert 'penstock_request_errors_total{code="client_closed_request",edge="http"} 1.0' in page


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_nats_client_that_cancels_is_no_fault_of_ours(records: Records, stream: bool, n: int) -> None:
    core = silent()
    async with nats_edge(core) as nats:
        await nats.ask(body_of("chat", stream, n), Penstock_Request_Id="mine")
        await core.nth(n - 1)
        core.streams[0].say("a")
        await anyio.sleep(0.01)
        await nats.cancel("mine")
        await nats.final()
        await until(lambda: not core.live)
    [line] = records.answered
    assert line["code"] == "cancelled" and not records.others


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
