"""`tool_choice`, `strict`, `parallel_tool_calls` and a form beside tools, over both edges.

The model obeys grammars, and has no opinion otherwise.
"""

from __future__ import annotations

import functools
import json
import random
import threading
from collections.abc import Callable
from typing import Any

import jsonschema
import msgspec
import pytest
from llguidance.gbnf_to_lark import gbnf_to_lark

from common.text.grammar import GrammarCompiler
from common.text.template import ChatTemplate
from services.gateway import structured
from services.gateway.catalog import Catalog
from services.gateway.config import GatewayConfig
from services.gateway.tools import MAX_TOOLS
from tests.actors.both_edges import Edge, Seen
from tests.actors.edge import BUNDLE, EOS, ScriptedCore, ScriptedStream, ids
from tests.actors.test_answer_events import HI, QWEN, TEMPLATE, asked, four_ways, message_of
from tests.unit.walks import walk

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {"weather": CITY, "now": {"type": "object", "maxProperties": 0}}
ANSWER = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
FORM: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": ANSWER}}}
OPEN = msgspec.structs.replace(QWEN, template=ChatTemplate(TEMPLATE.replace("'<|bot|>'", "'<|bot|><think>\\n'")))
HINTS = ["<tool_call>", "<think>", "</think>", '"', "}"]


def tool(name: str, **more: Any) -> dict[str, Any]:
    parameters = {"parameters": SCHEMAS[name]} if name == "weather" else {}
    return {"type": "function", "function": {"name": name, **parameters, **more}}


@functools.cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(BUNDLE.tokenizer)


def strict_function(name: str, keys: list[str]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {key: {"type": "string"} for key in keys}, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "strict": True, "parameters": parameters}}


def obeys(seed: int = 0, end_chance: float = 0.5) -> Callable[[ScriptedStream], None]:
    def script(stream: ScriptedStream) -> None:
        matcher, dice = compiler().compile(stream.request.sampling.grammar), random.Random(seed + stream.request.sampling.seed)
        text = walk(matcher, BUNDLE.tokenizer, dice, hints=HINTS, endings=HINTS[2:], max_tokens=400, end_chance=end_chance)
        assert text is not None
        stream.give([*ids(text), EOS], finish="stop")

    return script


def calls_in(message: dict[str, Any]) -> list[str]:
    """The names of a message's calls, whose arguments match their schemas."""
    calls = message.get("tool_calls", [])
    for call in calls:
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])
    return [call["function"]["name"] for call in calls]


async def messages(edge: Edge, stream: bool, bundle: Any = QWEN, *, end_chance: float = 0.5, **arguments: Any) -> list[Any]:
    seen = await asked(edge, stream, ScriptedCore(obeys(end_chance=end_chance)), bundle=bundle, n=8, seed=1, **arguments)
    assert seen.error is None, seen.error
    return [message_of(seen, index) for index in range(8)]


@four_ways
@pytest.mark.parametrize("bundle", [QWEN, OPEN], ids=["closed", "open"])
async def test_required_is_calls_and_nothing_else(edge: Edge, stream: bool, bundle: Any) -> None:
    found = await messages(edge, stream, bundle, tools=[tool("weather"), tool("now")], tool_choice="required")
    calls = [calls_in(message) for message in found]
    assert min(map(len, calls)) == 1 and max(map(len, calls)) > 1
    assert {name for names in calls for name in names} == {"weather", "now"}
    assert all(message["finish"] == "tool_calls" and not message["content"] for message in found)
    assert any("reasoning_content" in message for message in found)


@four_ways
async def test_a_named_function_is_called_once(edge: Edge, stream: bool) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    for message in await messages(edge, stream, tools=[tool("now"), tool("weather")], tool_choice=choice):
        assert calls_in(message) == ["weather"] and message["finish"] == "tool_calls" and not message["content"]


@four_ways
async def test_one_call_is_required_where_calls_are_not_parallel(edge: Edge, stream: bool) -> None:
    more: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
    for message in await messages(edge, stream, tools=[tool("now"), tool("weather")], **more):
        assert len(calls_in(message)) == 1 and message["finish"] == "tool_calls"


@four_ways
async def test_strict_tools_are_called_by_their_schemas_amid_text(edge: Edge, stream: bool) -> None:
    tools = [tool("weather", strict=True), tool("now", strict=True)]
    found = await messages(edge, stream, tools=tools, end_chance=0.05)
    assert any(map(calls_in, found)) and any(message["content"] for message in found)
    for message in found:
        assert message["finish"] == ("tool_calls" if calls_in(message) else "stop")


@four_ways
async def test_beside_a_form_an_answer_is_a_call_or_the_form(edge: Edge, stream: bool) -> None:
    found = await messages(edge, stream, tools=[tool("weather", strict=True), tool("now", strict=True)], **FORM)
    assert any(map(calls_in, found)) and not all(map(calls_in, found))
    for message in found:
        assert bool(calls_in(message)) != bool(message["content"])
        if message["content"]:
            jsonschema.validate(json.loads(message["content"]), ANSWER)
            assert message["finish"] == "stop"
    for message in await messages(edge, stream, tools=[tool("now")], tool_choice="required", **FORM):
        assert calls_in(message) and not message["content"]
    for message in await messages(edge, stream, tools=[tool("now")], tool_choice="none", **FORM):
        jsonschema.validate(json.loads(message["content"]), ANSWER)


async def test_a_choice_of_the_model_is_not_constrained() -> None:
    core = ScriptedCore(lambda stream: stream.say("So.", finish="stop"))
    free = {"tools": [tool("now", strict=False)]}
    asks: list[dict[str, Any]] = [{}, {"tool_choice": "auto"}, {"parallel_tool_calls": False}, free]
    for more in asks:
        assert (await asked("http", False, core, **more)).error is None
        assert not core.streams[-1].request.sampling.grammar


DEEP: dict[str, Any] = {"type": "string"}
for _ in range(60):
    DEEP = {"type": "array", "items": DEEP}
UNUSABLE: dict[str, Any] = {
    "no schema": {"type": "strin"},
    "elsewhere": {"$ref": "https://example.com/x.json"},
    "negation": {"not": {"type": "string"}},
    "pattern": {"type": "object", "properties": {"a": {"type": "string", "pattern": "((("}}},
    "contradiction": {
        "type": "object",
        "properties": {"a": {"type": "string", "minLength": 9, "maxLength": 2}},
        "required": ["a"],
    },
    "not an object": {"type": "array"},
    "deep": {"type": "object", "properties": {"a": DEEP}},
}


@pytest.mark.parametrize("edge", ["http", "nats"])
@pytest.mark.parametrize("name", UNUSABLE)
@pytest.mark.parametrize("asks", ["required", "strict"])
async def test_a_schema_that_cannot_be_kept_is_a_400_that_names_the_tool(edge: Edge, name: str, asks: str) -> None:
    core = ScriptedCore(lambda stream: stream.say("taken", finish="stop"))
    bad = {"type": "function", "function": {"name": "bad", "parameters": UNUSABLE[name], "strict": asks == "strict"}}
    more: dict[str, Any] = {"tool_choice": "required"} if asks == "required" else {}
    seen = await asked(edge, False, core, tools=[tool("now"), bad], **more)
    assert seen.error is not None and seen.error["code"] == "invalid_parameter", seen
    assert seen.error["param"] in ("tools[1].function.parameters", "tools"), seen.error
    assert "tools[1]" in seen.error["message"] and not core.streams


async def test_recursive_schemas_are_kept() -> None:
    node: dict[str, Any] = {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}
    recursive = {"type": "function", "function": {"name": "f", "parameters": node}}
    seen: Seen = await asked("http", False, ScriptedCore(obeys()), tools=[recursive], tool_choice="required", seed=3)
    assert seen.error is None
    for call in message_of(seen)["tool_calls"]:
        jsonschema.validate(json.loads(call["function"]["arguments"]), node)


async def test_as_many_tools_as_may_be_can_be_required() -> None:
    tools = [{"type": "function", "function": {"name": f"f{index}"}} for index in range(MAX_TOOLS)]
    bundle = msgspec.structs.replace(QWEN, max_context=1_000_000)
    seen = await asked("http", False, ScriptedCore(obeys()), bundle=bundle, tools=tools, tool_choice="required", seed=3)
    assert seen.error is None and message_of(seen)["tool_calls"]


async def test_results_without_calls_go_to_the_template() -> None:
    """Templates show them as they are; those that can't raise an error, which is a 400."""
    core = ScriptedCore(lambda stream: stream.say("So.", finish="stop"))
    orphan = {"role": "tool", "tool_call_id": "call_1", "content": "20 C"}
    assert (await asked("http", False, core, messages=[HI, orphan])).error is None
    refuses = "{% if messages[-1].role == 'tool' %}{{ raise_exception('no call') }}{% endif %}{{ tools }}<tool_call>"
    bundle = msgspec.structs.replace(QWEN, template=ChatTemplate(refuses))
    seen = await asked("http", False, core, bundle=bundle, messages=[HI, orphan])
    assert seen.error is not None and (seen.error["code"], seen.error["param"]) == ("invalid_parameter", "messages")


@pytest.mark.slow
async def test_many_strict_tools_that_are_too_much_together_cost_a_few_compilations(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    compile_one = GrammarCompiler.compile

    def counted(self: GrammarCompiler, grammar: str) -> Any:
        sizes.append(len(grammar))
        return compile_one(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "compile", counted)
    bundle = msgspec.structs.replace(QWEN, max_context=1_000_000)
    many = [strict_function(f"f{index}", [f"key_{index}_{number}" for number in range(6)]) for index in range(MAX_TOOLS)]
    core = ScriptedCore(lambda stream: stream.say("x", finish="stop"))
    seen = await asked("http", False, core, bundle=bundle, tools=many)
    assert seen.error is not None and (seen.error["code"], seen.error["param"]) == ("invalid_parameter", "tools")
    assert len(sizes) <= 24 and not core.streams
    many[700]["function"]["parameters"]["properties"]["key_700_0"] = {"not": {}}
    seen = await asked("http", False, core, bundle=bundle, tools=many[600:800])
    assert seen.error is not None and seen.error["param"] == "tools[100].function.parameters"


async def test_a_long_grammar_is_translated_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def translate(text: str) -> str:
        threads.append(threading.get_ident())
        return gbnf_to_lark(text)

    monkeypatch.setattr(structured, "gbnf_to_lark", translate)
    grammar = "root ::= " + '"a" | ' * 200 + '"b"'
    seen = await asked("http", False, ScriptedCore(obeys()), structured_outputs={"grammar": grammar})
    assert seen.error is None and threads and threading.get_ident() not in threads


@pytest.mark.parametrize("zero_retention", [False, True])
async def test_no_schema_outlives_its_request_with_zero_retention(zero_retention: bool) -> None:
    config = GatewayConfig(zero_retention=zero_retention)
    catalog = Catalog.of_one(ScriptedCore(obeys()), BUNDLE, config)
    body = json.dumps({"messages": [HI]} | FORM).encode()
    model, job, _ = await catalog.prepare("chat", body, id="r1")
    kept = model.preparer.grammars.cached(job.sampling.grammar)
    assert (kept is None) == zero_retention


@pytest.mark.parametrize("form", [{}, FORM])
async def test_an_answer_with_a_form_keeps_the_space_that_it_begins_with(form: dict[str, Any]) -> None:
    """SentencePiece's first space belongs to no text, but a grammar has seen it."""
    catalog = Catalog.of_one(ScriptedCore(obeys()), BUNDLE, GatewayConfig())
    _, job, _ = await catalog.prepare("chat", json.dumps({"messages": [HI]} | form).encode(), id="r1")
    assert job.continues == bool(form)
