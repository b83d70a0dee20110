"""Request bodies: every mistake is a typed 400 that names the argument, and nothing odd is taken for something sensible."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.protocol.errors import InvalidParameter
from services.gateway.arguments import Notes
from services.gateway.openai import CompletionRequest, template_message
from tests.unit.cpu_cost import costs_at_most
from tests.unit.parsing import decode_chat, decode_completion

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**arguments: Any) -> bytes:
    return json.dumps({"messages": MESSAGES, **arguments}).encode()


def completion(**arguments: Any) -> bytes:
    return json.dumps({"prompt": "hi", **arguments}).encode()


def nested(depth: int) -> list[Any]:
    return [nested(depth - 1)] if depth > 1 else []


def refusal(body: bytes) -> InvalidParameter:
    with pytest.raises(InvalidParameter) as caught:
        decode_chat(body)
    return caught.value


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("n", 10**9),
        ("n", 10**40),
        ("n", 0),
        ("n", -1),
        ("n", "2"),
        ("n", 1.5),
        ("n", True),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "1"),
        ("temperature", [1]),
        ("top_p", -1),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 2**40),
        ("min_p", 2),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("max_tokens", 0),
        ("max_tokens", -2),
        ("max_tokens", 10**12),
        ("max_completion_tokens", 0),
        ("min_tokens", -1),
        ("seed", -2),
        ("seed", 2**63),
        ("seed", 1.5),
        ("top_logprobs", 21),
        ("top_logprobs", -1),
        ("logprobs", 5),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"1": -101}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {str(i): 0 for i in range(1025)}),
        ("logit_bias", [1]),
        ("stop", [""]),
        ("stop", ""),
        ("stop", ["x"] * 17),
        ("stop", ["x"] * 5000),
        ("stop", "x" * 257),
        ("stop", [1]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", list(range(129))),
        ("stop_token_ids", ["1"]),
        ("timeout", 0),
        ("timeout", -3),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("model", 7),
        ("model", "m" * 513),
        ("messages", []),
        ("messages", "hi"),
        ("chat_template_kwargs", [1]),
        ("chat_template_kwargs", {"a": nested(24)}),
        ("documents", {"text": "x"}),
        ("documents", ["x"]),
        ("documents", [{"text": nested(24)}]),
        ("documents", [{}] * 1025),
        ("chat_template_kwargs", {str(i): 0 for i in range(17)}),
        ("prediction", "a text"),
    ],
)
def test_an_argument_out_of_its_bounds_is_refused_by_name(argument: str, value: Any) -> None:
    assert (refusal(chat(**{argument: value})).param or "").split("[")[0] == argument


@pytest.mark.parametrize(
    ("argument", "sent", "taken"),
    [
        ("n", 2.0, 2),
        ("seed", -1.0, -1),
        ("seed", 1e3, 1000),
        ("top_k", -0.0, 0),
        ("min_tokens", 3.0, 3),
        ("max_tokens", 8.0, 8),
        ("top_logprobs", 5.0, 5),
        ("prompt_logprobs", 1.0, 1),
        ("priority", -2.0, -2),
        ("stop_token_ids", [1, 2.0], [1, 2]),
    ],
)
def test_a_float_without_a_fraction_is_an_integer(argument: str, sent: Any, taken: Any) -> None:
    others = {"logprobs": True, "temperature": 1.0, "tools": [], "metadata": {"a": 1.5}}
    value = getattr(decode_chat(chat(**{argument: sent}, **others)), argument)
    assert (value, repr(value)) == (taken, repr(taken))


def test_floats_in_free_objects_stay_floats() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"default": 1.0}}}}}]
    messages = [{**MESSAGES[0], "unknown": 1}]
    request = decode_chat(json.dumps({"messages": messages, "n": 2.0, "tools": tools}).encode())
    assert (request.n, repr(request.tools)) == (2, repr(tools))


@pytest.mark.parametrize("n", ["2.5", "1e400", "129.0", '"2.0"', "1e-400000", "[2.0]"])
def test_other_floats_are_no_integers(n: str) -> None:
    error = refusal(b'{"messages":[{"role":"user","content":"hi"}],"seed":2.0,"n":%s}' % n.encode())
    assert error.param == "n" or n == "1e400"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "0x10", "01", "+1", "1_0", "9" * 5000])
@pytest.mark.parametrize("argument", ["temperature", "n", "seed", "logit_bias"])
def test_numbers_that_are_no_json_numbers_or_out_of_range_are_refused(argument: str, number: str) -> None:
    value = '{"1":' + number + "}" if argument == "logit_bias" else number
    refusal(b'{"messages":[{"role":"user","content":"hi"}],"%s":%s}' % (argument.encode(), value.encode()))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"42",
        b'"text"',
        b"{",
        b"{}x",
        b'{"messages":[{"role":"user","content":"\xff"}]}',
        b'{"messages":[{"role":"user","content":"\xed\xa0\x80"}]}',
        b'{"messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"messages":[{"role":"user","content":"\\udc00x"}]}',
        b"\xff\xfe{\x00}\x00",
        b'\xef\xbb\xbf{"messages":[]}',
        b'{"messages":' + b"[" * 200_000,
        b'{"messages":[{"role":"user","content":"x"}],"metadata":' + b'{"a":' * 100_000,
        b'{"messages":[{"role":"user","content":"x"}],"tools":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_bodies_that_are_no_json_object_of_ours_are_refused(body: bytes) -> None:
    assert len(str(refusal(body))) < 300


def test_an_unknown_argument_with_a_huge_name_makes_no_huge_error() -> None:
    notes = Notes()
    decode_chat(chat(**{"x" * 50_000: 1}), notes)
    assert len(notes.text) < 300
    for length, strict in ((50_000, True), (100_000, False)):
        with pytest.raises(InvalidParameter) as caught:
            decode_chat(chat(**{"x" * length: 1}), Notes(strict=strict))
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("functions", [{}]),
        ("function_call", {"name": "f"}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
    ],
)
def test_what_is_not_supported_says_so(argument: str, value: Any) -> None:
    error = refusal(chat(**{argument: value}))
    assert error.param == argument
    assert "not supported yet" in str(error)


@pytest.mark.parametrize(
    ("argument", "value"),
    [("tools", []), ("tool_choice", "none"), ("modalities", ["text"]), ("tools", None)],
)
def test_asking_for_nothing_unsupported_is_fine(argument: str, value: Any) -> None:
    decode_chat(chat(**{argument: value}))


def test_what_clients_send_by_habit_is_ignored() -> None:
    decode_chat(
        chat(
            user="u",
            metadata={"a": "b"},
            store=False,
            service_tier="auto",
            parallel_tool_calls=True,
            safety_identifier="s",
            prompt_cache_key="k",
        )
    )


def test_null_means_not_given() -> None:
    fields = [field for field in decode_chat(chat()).__struct_fields__ if field != "messages"]
    given, absent = decode_chat(chat(**dict.fromkeys(fields))), decode_chat(chat())
    obeyed = [field for field in fields if not isinstance(getattr(absent, field), msgspec.Raw)]
    assert [getattr(given, field) for field in obeyed] == [getattr(absent, field) for field in obeyed]


@pytest.mark.parametrize("argument", ["user", "metadata", "prompt_cache_key"])
def test_what_is_ignored_is_not_even_built(argument: str) -> None:
    million = b"{" + b",".join(b'"%d":[]' % index for index in range(1_000_000)) + b"}"
    body = b'{"messages":[{"role":"user","content":"hi"}],"%s":%s}' % (argument.encode(), million)
    with costs_at_most(0.5):
        decode_chat(body)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content"),
        ({"role": "function", "content": "x", "name": "f"}, "messages[0]"),
        ({"role": "tool", "tool_call_id": "1"}, "messages[0].content"),
        ({"role": "user", "content": "x", "tool_calls": [{}]}, "messages[0].tool_calls"),
        ({"role": "user", "content": "x", "prefix": True}, "messages[0].prefix"),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, "messages[0]"),
    ],
)
def test_a_message_that_cannot_be_served_is_refused_by_place(message: dict[str, Any], param: str) -> None:
    assert refusal(chat(messages=[message])).param == param


def test_text_parts_reach_the_template_and_other_fields_do_not() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = decode_chat(chat(messages=[{"role": "user", "content": parts, "name": "Ann", "refusal": None}])).messages[0]
    assert template_message(message) == {"role": "user", "content": parts, "name": "Ann"}


def test_an_assistant_message_of_the_openai_client_can_be_sent_back() -> None:
    resent = {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "audio": None, "tool_calls": None}
    decode_chat(chat(messages=[*MESSAGES, resent, *MESSAGES]))


def test_stop_is_a_string_or_a_list() -> None:
    assert decode_chat(chat(stop="a")).stops == ["a"]
    assert decode_chat(chat(stop=["a", "b"])).stops == ["a", "b"]
    assert decode_chat(chat()).stops == []


def test_a_prediction_is_text_or_parts_of_text() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "text"}]
    for content in ("a text", parts):
        asked = decode_chat(chat(prediction={"type": "content", "content": content}))
        assert asked.prediction is not None and asked.prediction.text == "a text"
    assert decode_chat(chat(prediction=None)).prediction is None
    for wrong in ({"type": "diff", "content": "a text"}, {"content": "a text"}):
        assert refusal(chat(prediction=wrong)).param == "prediction.type"
    for wrong in ({"type": "content"}, {"type": "content", "content": 7}):
        assert refusal(chat(prediction=wrong)).param == "prediction.content"
    for part in ({"type": "image_url", "text": "x"}, {"type": "text"}):
        assert refusal(chat(prediction={"type": "content", "content": [part]})).param == "prediction.content"


def test_contradictions_are_refused() -> None:
    assert refusal(chat(max_tokens=5, max_completion_tokens=6)).param == "max_completion_tokens"
    assert refusal(chat(top_logprobs=2)).param == "top_logprobs"
    with pytest.raises(InvalidParameter, match="echo"):
        decode_completion(completion(max_tokens=0, logprobs=1))
    assert decode_completion(completion(max_tokens=0, echo=True, logprobs=1)).echo


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([1.0, 2], [[1, 2]]),
        ([[1], [2, 3.0]], [[1], [2, 3]]),
        ([], []),
    ],
)
def test_a_prompt_is_text_texts_ids_or_lists_of_ids(prompt: Any, prompts: Any) -> None:
    assert decode_completion(completion(prompt=prompt)).prompts == prompts


@pytest.mark.parametrize("prompt", [["a", 1], [1, [2]], ["a", [1]], [1, "a"]])
def test_mixed_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidParameter) as caught:
        _ = decode_completion(completion(prompt=prompt)).prompts
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("prompt", [None, 5, 1.5, [1.5], [-1], [2**40], [[-1]], [["a"]], {"a": 1}, [None], [True]])
def test_prompts_of_other_kinds_are_refused(prompt: Any) -> None:
    with pytest.raises(InvalidParameter):
        decode_completion(completion(prompt=prompt))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=10), children, max_size=4),
    max_leaves=12,
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(CompletionRequest.__struct_fields__), JSON, max_size=6))
def test_any_json_is_a_request_or_a_typed_refusal(arguments: dict[str, Any]) -> None:
    try:
        assert isinstance(decode_completion(json.dumps(arguments).encode()).prompts, list)
    except InvalidParameter as error:
        assert str(error)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_a_typed_refusal(body: bytes) -> None:
    with pytest.raises(InvalidParameter):
        decode_chat(body)
