"""Arguments beyond those that are obeyed: named in a warning, refused by name, or (strict) refused all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.protocol.errors import InvalidParameter
from services.gateway.arguments import (
    IGNORED,
    MESSAGE_IGNORED,
    MESSAGE_REFUSED,
    PART_IGNORED,
    PART_REFUSED,
    REFUSED,
    UNKNOWN,
    Notes,
)
from services.gateway.openai import ChatRequest, CompletionRequest
from services.gateway.token_bodies import TokenizeRequest
from services.gateway.vectors import EmbeddingRequest, ScoreRequest
from services.gateway.views.messages_body import MessagesRequest
from services.gateway.views.responses_body import ResponsesRequest
from tests.unit.cpu_cost import costs_at_most
from tests.unit.parsing import decode_chat, decode_completion

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


def noted(body: dict[str, Any], *, strict: bool = False) -> Notes:
    notes = Notes(strict=strict)
    (decode_chat if "messages" in body else decode_completion)(json.dumps(body).encode(), notes)
    return notes


def refusal(body: dict[str, Any], *, strict: bool = False) -> InvalidParameter:
    with pytest.raises(InvalidParameter) as caught:
        noted(body, strict=strict)
    return caught.value


CLIENTS: dict[str, tuple[dict[str, Any], str]] = {
    "guidellm": (
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_completion_tokens": 16,
            "max_tokens": 16,
            "stop": None,
            "ignore_eos": True,
        },
        "",
    ),
    "litellm": (
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
                {
                    "id": "msg_1",
                    "role": "assistant",
                    "content": "y",
                    "provider_specific_fields": {"refusal": None, "citations": []},
                    "reasoning": "because",
                    "tool_calls": None,
                    "function_call": None,
                    "annotations": [],
                },
                *MESSAGES,
            ],
            "seed": -1,
            "max_tokens": -1,
            "extra_body": {},
        },
        "ignored: messages[].content[].cache_control, messages[].id, messages[].provider_specific_fields",
    ),
    "openai-python": (
        {"messages": MESSAGES, "model": "m", "user": "ann", "store": False, "metadata": None, "service_tier": "auto"},
        "ignored: user",
    ),
    "langchain": ({"messages": MESSAGES, "model": "m", "stream": False, "n": 1, "parallel_tool_calls": True}, ""),
    "lm-eval": (
        {"prompt": [[1, 2]], "model": "m", "max_tokens": 1, "temperature": 0, "seed": 1234, "stop": ["\n\n"], "logprobs": 1},
        "",
    ),
    "vllm-bench": (
        {
            "prompt": "x",
            "model": "m",
            "temperature": 0.0,
            "repetition_penalty": 1.0,
            "max_tokens": 8,
            "logprobs": None,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "best_of": 1,
        },
        "",
    ),
    "sillytavern": (
        {
            "prompt": "x",
            "top_k": -1,
            "typical_p": 1,
            "tfs": 1,
            "top_a": 0,
            "mirostat_mode": 0,
            "mirostat_tau": 5,
            "mirostat_eta": 0.1,
            "xtc_probability": 0,
            "dry_multiplier": 0,
            "dry_base": 1.75,
            "add_bos_token": True,
        },
        "ignored: add_bos_token",
    ),
    "open-webui": ({"messages": MESSAGES, "chat_id": "c", "session_id": "s"}, "ignored: chat_id, session_id"),
    "openrouter": (
        {"messages": MESSAGES, "provider": {"order": ["x"]}, "usage": {"include": True}},
        "ignored: provider, usage",
    ),
    "llama.cpp": ({"messages": MESSAGES, "cache_prompt": False, "id_slot": 3}, "ignored: cache_prompt, id_slot"),
}


@pytest.mark.parametrize("client", CLIENTS)
def test_what_clients_send_is_taken_and_what_had_no_effect_is_named(client: str) -> None:
    body, warning = CLIENTS[client]
    assert noted(body).text == warning
    if warning:
        refusal(body, strict=True)
    else:
        noted(body, strict=True)


def test_a_typo_is_named_with_what_was_meant() -> None:
    assert noted({"messages": MESSAGES, "temprature": 1}).text == "ignored: temprature (did you mean temperature?)"
    message = [{"role": "user", "content": "x", "nmae": "y"}]
    assert noted({"messages": message}).text == "ignored: messages[].nmae (did you mean name?)"


def test_strict_refuses_the_unknown_and_the_ignored_by_name() -> None:
    error = refusal({"messages": MESSAGES, "temprature": 1}, strict=True)
    assert error.param == "temprature" and "did you mean temperature?" in str(error)
    assert refusal({"messages": MESSAGES, "user": "ann"}, strict=True).param == "user"
    message = [*MESSAGES, {"role": "user", "content": "x", "conten": 1}]
    assert refusal({"messages": message}, strict=True).param == "messages[1].conten"
    options = {"messages": MESSAGES, "stream": True, "stream_options": {"odd": 1}}
    assert refusal(options, strict=True).param == "stream_options.odd"


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("strict", [True, False])
def test_what_would_change_the_answer_is_refused_by_name(name: str, strict: bool) -> None:
    for kind, fields in (("messages", ChatRequest), ("prompt", CompletionRequest)):
        if name in fields.__struct_fields__:
            continue
        error = refusal({kind: MESSAGES if kind == "messages" else "x", name: {"some": "thing"}}, strict=strict)
        assert error.param == name
        assert "not supported yet" in str(error)


@pytest.mark.parametrize(("name", "values"), [*REFUSED.items(), *IGNORED.items()])
def test_values_that_ask_for_nothing_are_not_even_named(name: str, values: tuple[Any, ...]) -> None:
    for value in (None, *(value for value in values if isinstance(value, str | int | float | list | dict))):
        if name not in ChatRequest.__struct_fields__:
            assert noted({"messages": MESSAGES, name: value}, strict=True).text == ""


def test_thousands_of_unknown_arguments_cost_milliseconds() -> None:
    body = {"messages": MESSAGES, **{f"temperatur{number}": 1 for number in range(3000)}}
    with costs_at_most(0.1):
        notes = noted(body)
    assert len(notes.labels) == 3000 and "did you mean temperature?" in notes.text


def test_an_argument_is_in_one_table() -> None:
    obeyed_everywhere = set(ChatRequest.__struct_fields__) & set(CompletionRequest.__struct_fields__)
    assert not obeyed_everywhere & (REFUSED.keys() | IGNORED.keys())
    for refused, ignored in ((REFUSED, IGNORED), (MESSAGE_REFUSED, MESSAGE_IGNORED), (PART_REFUSED, PART_IGNORED)):
        assert not refused.keys() & ignored.keys()


def test_every_argument_that_is_obeyed_is_documented() -> None:
    documented = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
    kinds = (
        ChatRequest,
        CompletionRequest,
        ResponsesRequest,
        MessagesRequest,
        EmbeddingRequest,
        ScoreRequest,
        TokenizeRequest,
    )
    fields = {name for kind in kinds for name in kind.__struct_fields__}
    assert [name for name in sorted(fields) if f"`{name}`" not in documented] == []


def test_a_message_with_a_call_of_old_is_refused() -> None:
    error = refusal({"messages": [*MESSAGES, {"role": "assistant", "content": "x", "function_call": "call"}]})
    assert error.param == "messages[1]" and "tools" in str(error)


def test_another_spelling_of_prefix_is_refused_with_a_hint() -> None:
    error = refusal({"messages": [*MESSAGES, {"role": "assistant", "content": "x", "partial": True}]})
    assert error.param == "messages[1].partial" and "prefix" in str(error)


def test_a_picture_is_refused_by_place() -> None:
    part = {"type": "image_url", "image_url": {"url": "data:..."}}
    assert refusal({"messages": [{"role": "user", "content": [part]}]}).param == "messages[0].content"


def test_clients_words_are_neither_labels_nor_header_lines() -> None:
    notes = noted({"messages": MESSAGES, 'x"\r\nset-cookie: a=b': 1, "é" * 200: 2, "z": 3})
    assert notes.labels == [UNKNOWN] * 3
    assert notes.text.isascii() and notes.text.isprintable() and '"' not in notes.text
    many = noted({"messages": MESSAGES, **{f"argument_{index}": 1 for index in range(500)}})
    assert len(many.text) < 2000 and many.text.endswith("more")


@pytest.mark.parametrize("value", [1, 3])
@pytest.mark.parametrize("asked", [{"prompt": "x"}, {"messages": MESSAGES}])
def test_best_of_may_say_what_n_says(asked: dict[str, Any], value: int) -> None:
    assert not noted({**asked, "best_of": value, "n": value}, strict=True).text
    assert refusal({**asked, "best_of": value + 1, "n": value}).param == "best_of"


def test_null_is_not_given_whatever_the_name() -> None:
    assert not noted({"messages": MESSAGES, "temprature": None, "best_of": None, "metadata": None}, strict=True).text
