"""A model's answer becomes reasoning, text and calls: the same for every way in which its text is cut, and nothing is lost."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.text.output.events import CallArguments, CallEnd, CallStart, Event, Reasoning, Text
from common.text.output.formats import REASONING_FORMATS, TOOL_FORMATS
from common.text.output.scan import MAX_AHEAD
from tests.unit.cpu_cost import costs_at_most
from tests.unit.output_cases import CASES, NAMED, TOOLS, calls_of, events_of, parser_of, reasoning_of, text_of

FAMILIES = sorted(TOOL_FORMATS)
REASONING = {
    "think": ("<think>", "</think>"),
    "magistral": ("[THINK]", "[/THINK]"),
    "seed": ("<seed:think>", "</seed:think>"),
}
FRAGMENTS = sorted(
    {mark for entry in TOOL_FORMATS.values() for mark in entry.marks}
    | {"<function=", "weather", "now", ">", "</function>", "<parameter=", "city", "</parameter>", "[", "]", "(", ")", "{", "}"}
    | {
        '"name"',
        '"arguments"',
        '"parameters"',
        ":",
        ",",
        '"',
        "\\",
        "'",
        "=",
        " ",
        "\n",
        ";",
        "1",
        "null",
        "é",
        "\U0001f600",
        "x",
    }
    | {
        ' name="now"',
        ' string="true"',
        "</｜DSML｜invoke>",
        "<｜DSML｜invoke",
        "<｜DSML｜tool_calls>",
        "<｜DSML｜parameter",
        "```json",
    }
    | {'{"name": "now", "arguments": {', NAMED, "<think>", "</think>", "to=functions.now", "<", "\ud7ff"}
)


def cut(text: str, at: list[int]) -> list[str]:
    places = [0, *sorted({index % (len(text) + 1) for index in at}), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(places)]


@pytest.mark.parametrize(("family", "answer", "text", "calls"), CASES)
def test_calls_and_text_are_told_apart(family: str, answer: str, text: str | None, calls: list[tuple[str, str]]) -> None:
    events = events_of(parser_of(family), [answer])
    assert calls_of(events) == calls
    assert text_of(events) == (answer if text is None else text)
    assert [type(event) for event in events].count(CallStart) == [type(event) for event in events].count(CallEnd)
    assert events_of(parser_of(family), list(answer)) == events


@pytest.mark.parametrize("reasoning", sorted(REASONING))
@pytest.mark.parametrize(("family", "answer", "text", "calls"), [case for case in CASES if case[0] != "harmony"])
def test_reasoning_comes_before_all_that(
    family: str, answer: str, text: str | None, calls: list[tuple[str, str]], reasoning: str
) -> None:
    opening, closing = REASONING[reasoning]
    thought = f"maybe {answer.replace(closing, '')} or not"
    for begun, is_open in ((f"\n{opening}\n{thought}\n{closing}\n\n", False), (f"\n{thought}\n{closing}\n\n", True)):
        events = events_of(parser_of(family, reasoning, is_open=is_open), [begun + answer])
        assert isinstance(events[0], Reasoning) and events[0].text == thought
        assert calls_of(events) == calls
        assert text_of(events) == (answer if text is None else text).lstrip()
        assert events_of(parser_of(family, reasoning, is_open=is_open), list(begun + answer)) == events


@given(st.sampled_from(CASES), st.lists(st.integers(0, 10_000)), st.integers(0, 10_000), st.sampled_from(["none", "think"]))
def test_any_cut_of_a_part_of_an_answer_gives_the_same_events(
    case: tuple[str, str, str | None, list[tuple[str, str]]], at: list[int], size: int, reasoning: str
) -> None:
    family, answer = case[0], f"<think>\nhm </thin\n</think>\n{case[1]}" if reasoning == "think" else case[1]
    part = answer[: size % (len(answer) + 1)]
    assert events_of(parser_of(family, reasoning), cut(part, at)) == events_of(parser_of(family, reasoning), [part])


@given(st.sampled_from(FAMILIES), st.lists(st.sampled_from(FRAGMENTS), max_size=24), st.lists(st.integers(0, 10_000)))
def test_any_cut_of_anything_gives_the_same_events(family: str, fragments: list[str], at: list[int]) -> None:
    text = "".join(fragments)
    for reasoning in ("none", "think"):
        events = events_of(parser_of(family, reasoning), cut(text, at))
        assert events == events_of(parser_of(family, reasoning), [text])
        indices = [event.index for event in events if isinstance(event, CallStart)]
        assert indices == list(range(len(indices)))


@given(st.sampled_from(FAMILIES), st.text(alphabet="ab {}[]()<>\"'\\:,=|\n", max_size=60))
def test_what_is_no_call_is_delivered_as_it_is(family: str, text: str) -> None:
    events: list[Event] = events_of(parser_of(family), [text])
    assert events == ([Text(text)] if text else [])


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "harmony"])
def test_without_tools_a_call_is_text(family: str) -> None:
    for answer in [case[1] for case in CASES if case[0] == family]:
        assert events_of(parser_of(family, tools=None), list(answer)) == [Text(answer)]


def test_arguments_are_delivered_while_they_come() -> None:
    parser = parser_of("hermes")
    assert parser.push('<tool_call>{"name": "weather", "arguments": {') == [
        CallStart(0, "call_0", "weather"),
        CallArguments(0, "{"),
    ]
    assert parser.push('"city": "Ber') == [CallArguments(0, '"city": "Ber')]
    assert parser.num_held == 0


def test_text_is_held_only_while_it_may_be_a_mark() -> None:
    parser = parser_of("hermes")
    assert parser.push("a <tool") == [Text("a")]
    assert parser.num_held == len(" <tool")
    assert parser.push("box") == [Text(" <toolbox")]


def test_after_the_last_call_that_is_wanted_nothing_is_delivered() -> None:
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    parser = parser_of("hermes", max_calls=1)
    events = events_of(parser, [call + call + "text"])
    assert parser.is_full and calls_of(events) == [("now", "{}")] and text_of(events) == ""


def test_an_answer_that_ends_in_reasoning_has_no_text() -> None:
    events = events_of(parser_of("hermes", "think"), ["<think>\nhm\n"])
    assert events == [Reasoning("hm")]
    assert reasoning_of(events_of(parser_of("none", "think", tools=None, is_open=True), ["hm </thi"])) == "hm </thi"


def test_harmonys_channels_are_reasoning_and_text() -> None:
    answer = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>So.<|return|>"
    for tools in (None, TOOLS):
        parser = parser_of("harmony", "harmony", tools=tools)
        assert events_of(parser, [answer]) == [Reasoning("hm"), Text("So.")]


HOSTILE = {
    "openings": "<tool_call>" * 20_000,
    "half-openings": "<tool_cal" * 20_000,
    "braces": '<tool_call>{"arguments": ' + "{" * 200_000,
    "keys": '<tool_call>{"a": 1, ' + '"b": 2, ' * 30_000,
    "long-key": '<tool_call>{"' + "a" * 200_000,
    "escapes": '<tool_call>{"name": "' + "\\u0041" * 30_000,
    "spaces": "a" + " " * 200_000 + "b" + "<tool_call>" + "\n" * 200_000 + "{",
    "brackets": "[" * 200_000,
    "calls": "[" + "now(" * 50_000,
    "value": "[weather(city='" + "a" * 200_000,
    "headers": "<|channel|>" * 20_000,
    "quotes": "<function=weather>\n<parameter=tags>\n" + '"' * 200_000,
    "lines": "\n" * 200_000,
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_answers_take_linear_time_and_bounded_memory(family: str, name: str) -> None:
    text, parser = HOSTILE[name], parser_of(family, "none")
    size = 0
    with costs_at_most(3):
        for at in range(0, len(text), 7):
            size += sum(len(getattr(event, "text", "")) for event in parser.push(text[at : at + 7]))
            assert parser.num_held <= 2 * MAX_AHEAD
        parser.finish()


def test_every_reasoning_format_is_tested() -> None:
    assert REASONING_FORMATS.keys() == {*REASONING, "harmony"}
