"""However an answer comes, a view's stream adds up to the body that is not streamed, and its events are in order."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from common.text.output.events import CallArguments, CallEnd, CallStart, Event, Reasoning, Text
from services.gateway.bodies import Usage
from services.gateway.choices import Delta, Finish
from services.gateway.logprobs import TokenNames
from services.gateway.views.messages_answer import MessageHead, MessageStream, WholeMessage
from services.gateway.views.responses_answer import Envelope, ResponseStream, Scores, WholeResponse
from services.gateway.views.responses_tools import Callee
from tests.actors.edge import BUNDLE
from tests.actors.views_site import message_of, response_of, sse

SCORES = Scores(TokenNames.of(BUNDLE.tokenizer), -1)
USAGE = Usage(prompt_tokens=9, completion_tokens=5, cached_tokens=4, reasoning_tokens=2)
TEXT = st.text(min_size=1, max_size=6) | st.sampled_from(['"', "\\", "\n\n", "é\U0001f600", "event: x\n"])

CALLEES = {"n__f": Callee("f", "n"), "c": Callee("c", is_custom=True), "n__c": Callee("c", "n", is_custom=True)}


@st.composite
def answers(draw: st.DrawFn) -> list[Delta]:
    """Deltas as a choice makes them: text alone as text, everything else as events."""
    events: list[Event] = []
    num_calls = 0
    for kind in draw(st.lists(st.sampled_from(["text", "reasoning", "call"]), max_size=6)):
        if kind == "call":
            events.append(CallStart(num_calls, f"call_{num_calls}", draw(TEXT | st.sampled_from(list(CALLEES)))))
            arguments = draw(
                st.sampled_from(["", "{}", '{"a": "\\u00e9"}', '{"b": [1, {"c": "\\""}]}', '{"input": "a\\n\\ud83d\\ude00"}'])
            )
            cut = draw(st.integers(0, len(arguments)))
            events += [CallArguments(num_calls, piece) for piece in (arguments[:cut], arguments[cut:]) if piece]
            events.append(CallEnd(num_calls))
            num_calls += 1
        else:
            events += [Text(piece) if kind == "text" else Reasoning(piece) for piece in draw(st.lists(TEXT, max_size=3))]
    deltas: list[Delta] = []
    while events:
        size = draw(st.integers(1, len(events)))
        part, events = events[:size], events[size:]
        if len(part) == 1 and isinstance(part[0], Text):
            deltas.append(Delta(part[0].text))
        else:
            deltas.append(Delta("", events=part))
    finish: Finish = draw(st.sampled_from(["stop", "length", "tool_calls"]))
    if draw(st.booleans()) and deltas:
        deltas[-1].finish = finish
    else:
        deltas.append(Delta("", finish=finish))
    deltas[-1].stopped_by = draw(st.sampled_from([None, "END"]))
    return deltas


def written(writer: Any, deltas: list[Delta], *, sse_form: bool) -> list[dict[str, Any]]:
    chunks = writer.opening()
    for delta in deltas[:-1]:
        chunks += writer.delta(0, delta)
    chunks += writer.ending(0, deltas[-1])
    return sse(b"".join(chunks).decode()) if sse_form else [json.loads(chunk) for chunk in chunks]


def whole(writer: Any, deltas: list[Delta]) -> dict[str, Any]:
    for delta in deltas:
        writer.add(0, delta)
    pieces = writer.finish(USAGE)
    body = b"".join(pieces)
    assert pieces.size == len(body)
    return json.loads(body)


@settings(max_examples=100, deadline=None)
@given(deltas=answers(), as_sse=st.booleans())
def test_a_response_is_what_its_events_add_up_to(deltas: list[Delta], as_sse: bool) -> None:
    head = {"id": "resp_1", "object": "response", "created_at": 5, "model": "m"}
    envelope = Envelope(head, {"store": False}, CALLEES)
    streamed = response_of(written(ResponseStream(envelope, SCORES, lambda: USAGE, sse=as_sse), deltas, sse_form=as_sse))
    assert streamed == whole(WholeResponse(envelope, SCORES), deltas)
    is_cut = deltas[-1].finish == "length"
    assert streamed["status"] == ("incomplete" if is_cut else "completed")
    assert streamed["incomplete_details"] == ({"reason": "max_output_tokens"} if is_cut else None)
    assert streamed["usage"] == {
        "input_tokens": 9, "input_tokens_details": {"cached_tokens": 4},
        "output_tokens": 5, "output_tokens_details": {"reasoning_tokens": 2}, "total_tokens": 14,
    }  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(deltas=answers(), as_sse=st.booleans())
def test_a_message_is_what_its_events_add_up_to(deltas: list[Delta], as_sse: bool) -> None:
    head = MessageHead("msg_1", "m", "max_tokens")
    streamed = message_of(written(MessageStream(head, lambda: USAGE, sse=as_sse), deltas, sse_form=as_sse))
    assert streamed == whole(WholeMessage(head), deltas)
    reasons = {"tool_calls": "tool_use", "length": "max_tokens"}
    by_stop = "end_turn" if deltas[-1].stopped_by is None else "stop_sequence"
    assert streamed["stop_reason"] == reasons.get(deltas[-1].finish or "", by_stop)
    assert streamed["usage"] == {
        "input_tokens": 5, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4,
        "output_tokens": 5, "output_tokens_details": {"thinking_tokens": 2},
    }  # fmt: skip


def test_arguments_that_are_no_object_are_told_as_they_are() -> None:
    for text in ('{"a": ', "[1]", "nonsense"):
        events: list[Event] = [CallStart(0, "c", "f"), CallArguments(0, text), CallEnd(0)]
        message = whole(WholeMessage(MessageHead("m", "m", "max_tokens")), [Delta("", events=events, finish="tool_calls")])
        assert message["content"] == [{"type": "tool_use", "id": "c", "name": "f", "input": {"invalid_json": text}}]


def test_what_is_kept_of_a_stream_is_counted() -> None:
    envelope = Envelope({"id": "resp_1"}, {"instructions": "x" * 5000}, {})
    stream = ResponseStream(envelope, SCORES, lambda: USAGE, sse=True)
    before = stream.size
    assert before > 5000
    stream.opening()
    stream.delta(0, Delta("y" * 1000))
    assert stream.size == before + 1000
    assert MessageStream(MessageHead("m", "m", "max_tokens"), lambda: USAGE, sse=True).size == 0
    assert msgspec.json.decode(b"".join(envelope.body(b"failed", [])))["status"] == "failed"
