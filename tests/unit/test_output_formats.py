"""Which parser reads a model's answers: by its chat template, or by a setting. And what parsers know of tools."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.text.output.call_ids import call_id, with_short_ids
from common.text.output.formats import REASONING_FORMATS, TOOL_FORMATS, Dialect, dialect_of
from common.text.output.python_literals import MAX_CHARS, to_json
from common.text.output.tools import ToolSet

TEMPLATES = {
    # the words of published templates that tell families apart
    "Llama 3.1": (
        'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.<|python_tag|>',
        Dialect("llama_json"),
    ),
    "Llama 4": ("format of [func_name1(params_name1=params_value1, params_name2=params_value2...)]", Dialect("pythonic")),
    "Qwen2.5": ('within <tool_call></tool_call> XML tags:\n<tool_call>\\n{\\"name\\": <function-name>', Dialect("hermes")),
    "Qwen3": ("<tool_call></tool_call> {%- set content = content.split('</think>')[-1] %} <think>", Dialect("hermes", "think")),
    "Qwen3-Coder": ("<tool_call>\\n<function=example_function_name>\\n<parameter=example>", Dialect("qwen3_coder")),
    "Seed-OSS": (
        "<seed:think></seed:think> <seed:tool_call>\\n<function=example_function_name>\\n<parameter=example>",
        Dialect("seed", "seed"),
    ),
    "Granite 3.1": ("only with <|tool_call|> followed by a JSON list of tools used", Dialect("granite")),
    "Granite 4": ('<tool_call></tool_call> XML tags:\\n<tool_call>\\n{\\"name\\": <function-name>', Dialect("hermes")),
    "EXAONE 4": ('<tool_call>{"name": ...}</tool_call> <think></think>', Dialect("hermes", "think")),
    "Mistral": ("{{- '[TOOL_CALLS][' }}", Dialect("mistral")),
    "Magistral": ("{{- '[TOOL_CALLS]' }} [THINK]", Dialect("mistral", "magistral")),
    "DeepSeek R1": ("<｜tool▁calls▁begin｜> <｜Assistant｜><think>\\n", Dialect("deepseek", "think")),
    "DeepSeek V3": ("<｜tool▁calls▁begin｜>", Dialect("deepseek")),
    "DeepSeek V3.2": ("{%- set dsml_token = '｜DSML｜' -%}<think>", Dialect("dsml", "think")),
    "GLM 4.6": ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key> </think>", Dialect("glm", "think")),
    "gpt-oss": ("<|start|>assistant<|channel|>analysis<|message|>", Dialect("harmony", "harmony")),
    "SmolLM2": ("<|im_start|>assistant", Dialect()),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_template_tells_the_family(name: str) -> None:
    template, dialect = TEMPLATES[name]
    assert dialect_of(template) == dialect
    assert dialect_of(template, "none", "none") == Dialect()


def test_a_setting_overrides_the_template() -> None:
    assert dialect_of("[TOOL_CALLS]", "hermes", "think") == Dialect("hermes", "think")
    assert dialect_of("[TOOL_CALLS]", "auto", "think") == Dialect("mistral", "think")


@pytest.mark.parametrize(
    ("prompt_end", "continues", "is_open"),
    [
        ("<|assistant|><think>\n", False, True),
        ("<|assistant|><think>\n\n</think>\n\n", False, False),
        ("<|assistant|>", False, False),
        ("tell me of <think> tags<|assistant|>", False, False),
        ("<think>I was thinking", True, True),
        ("<think>done</think>So", True, False),
        ("So", True, False),
    ],
)
def test_the_prompt_says_whether_reasoning_is_open(prompt_end: str, continues: bool, is_open: bool) -> None:
    assert Dialect("hermes", "think").is_open(prompt_end, continues=continues) is is_open
    assert Dialect("hermes").is_open(prompt_end, continues=continues) is False


def test_only_marks_that_are_needed_are_shown() -> None:
    dialect = Dialect("mistral", "magistral")
    assert dialect.marks(tools=False, reasoning=True) == {"[THINK]", "[/THINK]"}
    assert "[TOOL_CALLS]" in dialect.marks(tools=True, reasoning=False)
    assert "<|channel|>" in Dialect("harmony", "none").marks(tools=False, reasoning=False)


def test_every_family_says_where_its_format_comes_from() -> None:
    for name, entry in TOOL_FORMATS.items():
        module = __import__(entry.read.__module__, fromlist=["x"])
        assert "Source:" in module.__doc__, name
    assert all(entry.signs for entry in [*TOOL_FORMATS.values(), *REASONING_FORMATS.values()])


def test_ids_of_calls_are_stable_and_as_long_as_a_template_wants() -> None:
    assert call_id("r", 0, 0) == call_id("r", 0, 0) != call_id("r", 0, 1)
    assert call_id("r", 0, 0).startswith("call_") and len(call_id("r", 0, 0, 9)) == 9
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1"}, {"id": "abcdefgh9"}]},
        {"role": "tool", "content": "x", "tool_call_id": "call_1"},
        {"role": "tool", "content": "x", "tool_call_id": "abcdefgh9"},
    ]
    short: list[dict[str, Any]] = with_short_ids(messages, 9)
    first, second = (call["id"] for call in short[0]["tool_calls"])
    assert len(first) == 9 and first.isalnum() and second == "abcdefgh9"
    assert [message.get("tool_call_id") for message in short] == [None, first, second]


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({"type": "string"}, "string"),
        ({"enum": ["a", "b"]}, "string"),
        ({"const": "a"}, "string"),
        ({"type": ["string", "null"]}, "nullable"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "nullable"),
        ({"type": "integer"}, "json"),
        ({"type": ["string", "integer"]}, "json"),
        ({"enum": ["a", 1]}, "json"),
        ({"$ref": "#/$defs/x"}, "unknown"),
        ({}, "unknown"),
        (True, "unknown"),
        ({"type": 5, "enum": "x", "anyOf": [7]}, "unknown"),
    ],
)
def test_a_schema_says_what_an_argument_is(schema: Any, kind: str) -> None:
    tools = ToolSet([{"function": {"name": "f", "parameters": {"properties": {"x": schema}}}}])
    assert tools.kind_of("f", "x") == kind
    assert tools.kind_of("f", "y") == tools.kind_of("g", "x") == "unknown"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("'a\\'b'", "a'b"),
        ('"\\x41\\u00e9\\U0001F600\\n\\q"', "Aé\U0001f600\n\\q"),
        ("'\\ud83d\\ude00'", "\U0001f600"),
        ("[1, -2.5e3, (True, None), {'a': {}},]", [1, -2500.0, [True, None], {"a": {}}]),
        (" .5 ", 0.5),
        ("1_000", 1000),
        ("true", True),
    ],
)
def test_pythons_literals_become_json(text: str, value: Any) -> None:
    result = to_json(text)
    assert result is not None and json.loads(result) == value


@pytest.mark.parametrize("text", ["", "a", "{1: 2}", "[1", "'a", "1 2", "f()", "1e999", "{'a' 1}", "[" * 5000, "b'x'", "[1 2]"])
def test_what_is_no_literal_of_pythons_is_left_alone(text: str) -> None:
    assert to_json(text) is None


def test_a_literal_as_long_as_a_book_is_left_alone() -> None:
    """A parser runs in the gateway's event loop."""
    longest = "['" + "a" * (MAX_CHARS - 4) + "']"
    assert to_json(longest) is not None
    assert to_json(longest + " ") is None
