"""Answers as models of each family write them, for tests of their parsers. All call tools of `TOOLS`."""

from __future__ import annotations

from typing import Any

from common.text.output.events import CallArguments, CallStart, Event, Reasoning, Text, merged
from common.text.output.formats import Dialect
from common.text.output.parser import OutputParser
from common.text.output.tools import ToolSet

PROPERTIES = {
    "days": {"type": "integer"},
    "city": {"type": "string"},
    "unit": {"enum": ["C", "F"]},
    "near": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "tags": {"type": "array"},
}
FUNCTIONS: list[dict[str, Any]] = [
    {"name": "weather", "parameters": {"type": "object", "properties": PROPERTIES}},
    {"name": "now", "description": "The time."},
]
TOOLS = ToolSet([{"type": "function", "function": function} for function in FUNCTIONS])

JSON_ARGUMENTS = r'{"city": "a\"}{\u00e9\ud83d\ude00 </tool_call>", "tags": [{"x": []}], "days": 3}'
"""What a naive search for brackets or marks gets wrong."""
NAMED = '{"name": "weather", "arguments": ' + JSON_ARGUMENTS + "}"
PARAMETERS = '{"name": "weather", "parameters": ' + JSON_ARGUMENTS + "}"

Call = tuple[str, str]

CASES: list[tuple[str, str, str | None, list[Call]]] = [
    # family, answer, its text (None: all of it), its calls
    ("hermes", f"<tool_call>\n{NAMED}\n</tool_call>", "", [("weather", JSON_ARGUMENTS)]),
    (
        "hermes",
        'I look.\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n<tool_call>' + NAMED + "</tool_call>\nSo.",
        "I look.So.",
        [("now", "{}"), ("weather", JSON_ARGUMENTS)],
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {"days": 1}, "id": 7, "name": "weather"}</tool_call>',
        "",
        [("weather", '{"days": 1}')],
    ),
    ("hermes", '<tool_call>{"name": "now", "arguments": {}}}\n</tool_call>', "", [("now", "{}")]),
    ("hermes", '<tool_call>{"name": "now"}\n{"name": "now", "arguments": null}</tool_call>', "", [("now", "{}")] * 2),
    ("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"days\\": 1}"}</tool_call>', "", [("weather", '{"days": 1}')]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "A\n</tool_call>B', "B", [("weather", '{"city": "A\n')]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "A', "", [("weather", '{"city": "A')]),
    ("hermes", '<tool_call>{"name": "weather", "argum', '<tool_call>{"name": "weather", "argum', []),
    ("hermes", "the tag <tool_call> and {braces}", "the tag <tool_call> and {braces}", []),
    ("hermes", "<tool_call><tool_call>" + NAMED + "</tool_call>", "<tool_call>", [("weather", JSON_ARGUMENTS)]),
    ("hermes", '<tool_call>{"name": "no such\\u0000 name", "arguments": {}}</tool_call>', None, []),
    ("llama_json", PARAMETERS, "", [("weather", JSON_ARGUMENTS)]),
    ("llama_json", "<|python_tag|>" + PARAMETERS, "", [("weather", JSON_ARGUMENTS)]),
    ("llama_json", PARAMETERS + '; {"name": "now", "parameters": {}}', "", [("weather", JSON_ARGUMENTS), ("now", "{}")]),
    ("llama_json", "I look:\n" + PARAMETERS + "\nSo.", "I look:So.", [("weather", JSON_ARGUMENTS)]),
    ("llama_json", '{"type": "function", "function": "now", "parameters": {}}', "", [("now", "{}")]),
    ("llama_json", '{"name": "Ann", "parameters": {"age": 3}}', '{"name": "Ann", "parameters": {"age": 3}}', []),
    ("llama_json", '{"name": "weather", "parameters": {"city": "A\nB', "", [("weather", '{"city": "A\nB')]),
    ("llama_json", 'as {"name": "now", "parameters": {}} says', 'as {"name": "now", "parameters": {}} says', []),
    (
        "pythonic",
        "[weather(city='a\\'),]', days=+3, tags=[{'x': (1, None)}], unit=\"C\"), now()]",
        "",
        [("weather", '{"city": "a\'),]", "days": 3, "tags": [{"x": [1, null]}], "unit": "C"}'), ("now", "{}")],
    ),
    ("pythonic", "<|python_start|>[now()]<|python_end|>", "", [("now", "{}")]),
    ("pythonic", "[weather(city=Berlin, days=1e999)]", "", [("weather", '{"city": "Berlin", "days": 1e999}')]),
    ("pythonic", "[weather(city='Ber", "", [("weather", '{"city": \'Ber')]),
    ("pythonic", "[weather(3)] said", ")] said", [("weather", "3")]),
    ("pythonic", "[1, 2, now()]\n[x](y)", "[1, 2, now()]\n[x](y)", []),
    (
        "qwen3_coder",
        "Well.\n<tool_call>\n<function=weather>\n<parameter=city>\n12\n</b>\n</parameter>\n<parameter=days>\n12\n</parameter>\n"
        "<parameter=near>\nnull\n</parameter>\n</function>\n</tool_call>\nSo.",
        "Well.So.",
        [("weather", '{"city": "12\\n</b>", "days": 12, "near": null}')],
    ),
    ("qwen3_coder", "<function=now>\n</function>", "", [("now", "{}")]),
    (
        "qwen3_coder",
        "<tool_call>\n<function=weather>\n<parameter=other>\n1\n</parameter>\n</function>\n</tool_call>",
        "",
        [("weather", '{"other": "1"}')],
    ),
    ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\nBer", "", [("weather", '{"city": "Ber')]),
    ("qwen3_coder", "<tool_call>\n<function=weather>\n<param", "", [("weather", "")]),
    ("qwen3_coder", "<tool_call>\nnothing</tool_call>", "<tool_call>\nnothing</tool_call>", []),
    (
        "glm",
        '<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>A "B"</arg_value>\n'
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
        "<arg_key>other</arg_key>\n<arg_value>[1]</arg_value>\n</tool_call><tool_call>now</tool_call>",
        "",
        [("weather", '{"city": "A \\"B\\"", "days": 3, "other": [1]}'), ("now", "{}")],
    ),
    (
        "glm",
        "<tool_call>weather<arg_key>days</arg_key><arg_value>x</arg_value></tool_call>",
        "",
        [("weather", '{"days": "x"}')],
    ),
    ("glm", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_va", "", [("weather", "")]),
    ("glm", "<tool_call> some words here\n", "<tool_call> some words here\n", []),
    (
        "dsml",
        'Well.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">5</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="tags" string="false">[1]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        "Well.",
        [("weather", '{"city": "5", "tags": [1]}'), ("now", "{}")],
    ),
    (
        "dsml",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        "",
        [("now", "{}")],
    ),
    (
        "dsml",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Be',
        "",
        [("weather", '{"city": "Be')],
    ),
    ("dsml", "<｜DSML｜tool_calls>\n<｜DSML｜other>", "<｜DSML｜tool_calls>\n<｜DSML｜other>", []),
    (
        "mistral",
        "[TOOL_CALLS][" + NAMED + ', {"name": "now", "arguments": {}, "id": "123456789"}]',
        "",
        [("weather", JSON_ARGUMENTS), ("now", "{}")],
    ),
    (
        "mistral",
        "Well.[TOOL_CALLS]weather[ARGS]" + JSON_ARGUMENTS + "[TOOL_CALLS]now[CALL_ID]abc[ARGS]{}",
        "Well.",
        [("weather", JSON_ARGUMENTS), ("now", "{}")],
    ),
    ("mistral", '[TOOL_CALLS]weather{"days": 1', "", [("weather", '{"days": 1')]),
    ("mistral", "[TOOL_CALLS] none", "[TOOL_CALLS] none", []),
    (
        "granite",
        "Well. <|tool_call|> [" + NAMED + ', {"name": "now", "arguments": {}}]',
        "Well.",
        [("weather", JSON_ARGUMENTS), ("now", "{}")],
    ),
    ("granite", '<|tool_call|>[{"name": "weather", "arguments": {"days": 1', "", [("weather", '{"days": 1')]),
    ("granite", "<|tool_call|>none", "<|tool_call|>none", []),
    ("granite", "<|tool_call|><|tool_call|>[" + NAMED + "]", "<|tool_call|>", [("weather", JSON_ARGUMENTS)]),
    (
        "seed",
        "Well.\n<seed:tool_call>\n<function=weather>\n<parameter=city>\nBerlin\n</parameter>\n</function>\n</seed:tool_call>"
        "\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
        "Well.",
        [("weather", '{"city": "Berlin"}'), ("now", "{}")],
    ),
    ("seed", "<seed:tool_call>\n<function=weather>\n<parameter=city>\nBer", "", [("weather", '{"city": "Ber')]),
    ("seed", "<seed:tool_call>\nnothing</seed:tool_call>", "<seed:tool_call>\nnothing</seed:tool_call>", []),
    (
        "deepseek",
        "Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>" + JSON_ARGUMENTS + "<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Well.",
        [("weather", JSON_ARGUMENTS), ("now", "{}")],
    ),
    (
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        + JSON_ARGUMENTS
        + "\n```<｜tool▁call▁end｜>\n"
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [("weather", JSON_ARGUMENTS), ("now", "{}")],
    ),
    ("deepseek", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"days": ', "", [("weather", '{"days": ')]),
    ("deepseek", "<｜tool▁calls▁begin｜>hm", "<｜tool▁calls▁begin｜>hm", []),
    (
        "harmony",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        '<|constrain|>json<|message|>{"days": 1}<|call|>',
        "I look.",
        [("weather", '{"days": 1}')],
    ),
    ("harmony", "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>", "", [("now", "{}")]),
    ("harmony", "<|channel|>final<|message|>So.<|return|>", "So.", []),
    ("harmony", "no marks at all", "no marks at all", []),
    ("harmony", '<|channel|>commentary to=functions.weather<|message|>{"da', "", [("weather", '{"da')]),
]


def parser_of(family: str, reasoning: str = "none", **more: Any) -> OutputParser:
    return OutputParser(Dialect(family, reasoning), **{"tools": TOOLS, **more})


def events_of(parser: OutputParser, pieces: list[str]) -> list[Event]:
    """All events, with neighbouring pieces put together."""
    return merged([event for piece in pieces for event in parser.push(piece)] + parser.finish())


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))


def reasoning_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Reasoning))


def calls_of(events: list[Event]) -> list[Call]:
    starts = [event for event in events if isinstance(event, CallStart)]
    pieces = [event for event in events if isinstance(event, CallArguments)]
    return [(start.name, "".join(piece.text for piece in pieces if piece.index == start.index)) for start in starts]
