"""A large body makes the same request as a small one, piece by piece, and none of its steps holds the event loop."""

from __future__ import annotations

import gc
import json
import time
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.protocol.errors import ContextLengthExceeded, InvalidParameter, PenstockError
from services.gateway import json_slices, objects, openai, parse
from services.gateway.arguments import Notes
from tests.unit.parsing import decode_chat, decode_completion

PADDING = b" " * (parse.SMALL_BYTES + 1)
"""Behind a body, it makes no difference but to its size."""

TEXT = st.text(max_size=40) | st.text(st.sampled_from('\\"{}[],: \U0001f600\u00e9'), max_size=20)
IDS = st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 99).map(float), max_size=20)
PART = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "input_text"]), "text": TEXT}, optional={"cache_control": st.just({"type": "ephemeral"})}
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "developer"]), "content": TEXT | st.lists(PART, max_size=6)},
    optional={
        "name": TEXT,
        "reasoning": TEXT,
        "provider_specific_fields": st.just({"refusal": None, "x": [1]}),
        "tool_calls": st.sampled_from([None, []]),
        "whatever": st.lists(st.integers(), max_size=3),
    },
)
OTHERS = {
    "temperature": st.floats(0, 2),
    "stop": st.lists(st.text(min_size=1, max_size=5), max_size=3),
    "logit_bias": st.dictionaries(st.integers(0, 99).map(str), st.integers(-5, 5), max_size=3),
    "user": TEXT,
    "seed": st.sampled_from([1.0, 1.5]),
    "temprature": st.integers(),
    "stream_options": st.just({"include_usage": True, "odd": 1}),
    "prediction": st.builds(lambda content: {"type": "content", "content": content}, TEXT),
}


@pytest.fixture(params=[12, 40, 64 * 1024], autouse=True, scope="module")
def slice_bytes(request: pytest.FixtureRequest) -> Any:
    patch = pytest.MonkeyPatch()
    patch.setattr(json_slices, "SLICE_BYTES", request.param)
    patch.setattr(parse, "SLICE_BYTES", request.param)
    patch.setattr(objects, "_TEXT_BYTES", max(16, request.param))
    yield
    patch.undo()


def both(kind: Literal["chat", "completion"], value: Any) -> None:
    """The same request or a refusal, and the same warning, whether small or large."""
    decode: Any = decode_chat if kind == "chat" else decode_completion
    body = json.dumps(value, ensure_ascii=len(str(value)) % 2 == 0).encode()
    results: list[Any] = []
    for padding in (b"", PADDING):
        notes = Notes()
        try:
            results.append((decode(body + padding, notes), sorted(notes.labels)))
        except InvalidParameter as error:
            results.append(type(error))
    assert results[0] == results[1]


@settings(max_examples=120, deadline=None)
@given(
    prompt=TEXT | IDS | st.lists(TEXT, max_size=5) | st.lists(IDS, max_size=5) | st.lists(TEXT | st.integers(), max_size=4),
    others=st.fixed_dictionaries({}, optional=OTHERS),
)
def test_a_large_completion_is_read_like_a_small_one(prompt: Any, others: dict[str, Any]) -> None:
    both("completion", {"prompt": prompt, "stream": True, **others})


@settings(max_examples=120, deadline=None)
@given(messages=st.lists(MESSAGE, min_size=1, max_size=6), others=st.fixed_dictionaries({}, optional=OTHERS))
def test_a_large_chat_is_read_like_a_small_one(messages: list[Any], others: dict[str, Any]) -> None:
    both("chat", {"messages": messages, "stream": True, **others})


# ── the real size ────────────────────────────────────────────────────────────────────────────────────────────────────────

MIB = 1024 * 1024


def steps_of(kind: Literal["chat", "completion"], body: bytes, max_prompt_tokens: int = 8191) -> tuple[Any, float]:
    """(the request or its refusal, CPU seconds of the longest step). Without the garbage collector, as `Intake.run` does it."""
    gc.collect()
    gc.disable()
    try:
        return run_steps(kind, body, max_prompt_tokens)
    finally:
        gc.enable()


def run_steps(kind: Literal["chat", "completion"], body: bytes, max_prompt_tokens: int) -> tuple[Any, float]:
    steps = parse.parse(kind, body, max_prompt_tokens=max_prompt_tokens, notes=Notes())
    longest_s = 0.0
    while True:
        began = time.thread_time()
        try:
            next(steps)
        except StopIteration as end:
            return end.value, max(longest_s, time.thread_time() - began)
        except PenstockError as error:
            return error, max(longest_s, time.thread_time() - began)
        longest_s = max(longest_s, time.thread_time() - began)


def repeated(piece: str, size: int = 8 * MIB) -> str:
    return ",".join([piece] * (size // (len(piece) + 1)))


HUGE: dict[str, tuple[Literal["chat", "completion"], str, type[PenstockError]]] = {
    "ids": ("completion", '{"prompt":[' + repeated("1") + "]}", ContextLengthExceeded),
    "lists": ("completion", '{"prompt":[' + repeated("[1]") + "]}", InvalidParameter),
    "one-list": ("completion", '{"prompt":[[' + repeated("1") + "]]}", ContextLengthExceeded),
    "texts": ("completion", '{"prompt":[' + repeated('""') + "]}", InvalidParameter),
    "nesting": ("completion", '{"prompt":' + ("[" * 8 * MIB) + "}", InvalidParameter),
    "messages": ("chat", '{"messages":[' + repeated('{"role":"user","content":""}') + "]}", InvalidParameter),
    "parts": (
        "chat",
        '{"messages":[{"role":"user","content":[' + repeated('{"type":"text","text":""}') + "]}]}",
        InvalidParameter,
    ),
    "bias": (
        "chat",
        '{"messages":[{"role":"user","content":"x"}],"logit_bias":{' + repeated('"1":0') + "}}",
        InvalidParameter,
    ),
    "tools": ("chat", '{"messages":[{"role":"user","content":"x"}],"tools":[' + repeated("{}") + "]}", InvalidParameter),
    "calls": ("chat", '{"messages":[{"role":"user","content":"x","tool_calls":[' + repeated("{}") + "]}]}", InvalidParameter),
    "members": ("chat", "{" + repeated('"a":1') + "}", InvalidParameter),
    "text-of-ints": ("completion", '{"prompt":{' + repeated('"a":1') + "}}", InvalidParameter),
}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [*[{"role": "user", "content": "x"}] * 900, {"role": "user"}]}, "messages[900].content"),
        ({"messages": [*[{"role": "user", "content": "x"}] * 900, {"content": "x"}]}, "messages[900].role"),
        ({"messages": [*[{"role": "user", "content": "x"}] * 900, {"role": "user", "content": 5}]}, "messages[900].content"),
        ({"messages": [*[{"role": "user", "content": "x"}] * 900, {"role": "function", "content": "x"}]}, "messages[900]"),
        ({"messages": [{"role": "user", "content": "x"}], "documents": [{}] * 1025}, "documents"),
        ({"messages": [{"role": "user", "content": "x"}], "documents": [{"text": "x" * 270_000}]}, "documents"),
        ({"messages": [{"role": "user", "content": "x"}], "documents": [{}, "x"]}, "documents[1]"),
        ({"messages": [{"role": "user", "content": ""}], "chat_template_kwargs": {"a": ["x" * 2**17]}}, "chat_template_kwargs"),
        ({"prompt": [*range(9000), -1]}, "prompt[9000]"),
    ],
)
def test_a_mistake_in_a_large_body_is_named_by_place(body: dict[str, Any], param: str) -> None:
    decode: Any = decode_chat if "messages" in body else decode_completion
    with pytest.raises(InvalidParameter) as caught:
        decode(json.dumps(body).encode() + PADDING)
    assert caught.value.param == param


@pytest.mark.parametrize("slice_bytes", [64 * 1024], indirect=True)
@pytest.mark.parametrize("name", HUGE)
def test_no_step_of_a_huge_body_holds_the_loop(name: str, slice_bytes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (json_slices, parse):
        monkeypatch.setattr(module, "SLICE_BYTES", 64 * 1024)
    kind, body, refusal = HUGE[name]
    result, longest_s = steps_of(kind, body.encode())
    assert type(result) is refusal
    assert longest_s < 0.012


@pytest.mark.parametrize("slice_bytes", [64 * 1024], indirect=True)
@pytest.mark.parametrize("character", ["x", "é", "\U0001f600", "\\n", "\\u00e9", "\\ud83d\\ude00", "\\\\", '\\"'])
def test_a_long_text_is_read_in_steps(character: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (json_slices, parse):
        monkeypatch.setattr(module, "SLICE_BYTES", 64 * 1024)
    monkeypatch.setattr(objects, "_TEXT_BYTES", MIB)
    text = character * (4 * MIB // len(character.encode()))
    body = '{"prompt":"' + text + '"}'
    request, longest_s = steps_of("completion", body.encode())
    assert request.prompt == json.loads(body)["prompt"]
    assert longest_s < 0.015


@pytest.mark.parametrize("slice_bytes", [64 * 1024], indirect=True)
def test_many_ids_that_fit_are_read_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (json_slices, parse):
        monkeypatch.setattr(module, "SLICE_BYTES", 64 * 1024)
    ids = list(range(900_000))
    request, longest_s = steps_of("completion", json.dumps({"prompt": ids}).encode(), 1_000_000)
    assert request.prompt == ids
    assert longest_s < 0.015


def test_what_is_ignored_is_not_read_however_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_slices, "SLICE_BYTES", 64 * 1024)
    body = '{"messages":[{"role":"user","content":"hi"}],"metadata":{' + repeated('"a":[]') + "}}"
    request, _ = steps_of("chat", body.encode())
    assert request.messages == [openai.ChatMessage("user", "hi")]


def test_a_prediction_makes_no_other_argument_too_large() -> None:
    schema = {"type": "object", "description": 30_000 * "a"}
    value = {"messages": [{"role": "user", "content": "hi"}], "structured_outputs": {"json": schema}}
    for size, is_there in ((20_000, True), (40_000, False)):
        notes = Notes()
        body = json.dumps({**value, "prediction": {"type": "content", "content": size * "a"}}).encode() + PADDING
        request = decode_chat(body, notes)
        assert request.structured_outputs == {"json": schema}
        assert (request.prediction is not None) == is_there == (not notes.text)


def test_a_prediction_that_is_too_large_has_no_effect_and_is_named() -> None:
    for size, is_there in ((openai.MAX_PREDICTION_BYTES - 64, True), (openai.MAX_PREDICTION_BYTES, False)):
        prediction = {"type": "content", "content": size * "a"}
        for kind, value in (("chat", {"messages": [{"role": "user", "content": "hi"}]}), ("completion", {"prompt": "hi"})):
            notes = Notes()
            decode: Any = decode_chat if kind == "chat" else decode_completion
            body = json.dumps({**value, "prediction": prediction}).encode() + PADDING
            assert (decode(body, notes).prediction is not None) == is_there
            assert notes.text == ("" if is_there else "ignored: prediction (larger than is looked up)")
            if not is_there:
                with pytest.raises(InvalidParameter, match="no effect"):
                    decode(body, Notes(strict=True))
