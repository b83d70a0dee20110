"""Slices of a body find what a JSON parser finds, wherever it is cut, and no body makes a slice slow."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.protocol.errors import InvalidParameter
from services.gateway import json_slices
from services.gateway.json_slices import MAX_DEPTH, Span, elements, members
from tests.unit.parsing import finish

TEXT = st.text(st.sampled_from('ab"\\{}[]:, \n\u00e9\U0001f600'), max_size=12) | st.text(max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda children: st.lists(children, max_size=5) | st.dictionaries(TEXT, children, max_size=5),
    max_leaves=20,
)
WRITERS = (
    lambda value: json.dumps(value).encode(),
    lambda value: json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(),
    lambda value: json.dumps(value, indent=3).encode() + b" \n ",
)


@pytest.fixture(params=[1, 7, 64], autouse=True, scope="module")
def slice_bytes(request: pytest.FixtureRequest) -> Any:
    patch = pytest.MonkeyPatch()
    patch.setattr(json_slices, "SLICE_BYTES", request.param)
    yield request.param
    patch.undo()


@pytest.fixture
def uncollected() -> Iterator[None]:
    """A collection of all that the tests before have left would count as the slice's time."""
    gc.disable()
    yield
    gc.enable()


@settings(max_examples=60, deadline=None)
@given(value=st.dictionaries(TEXT, JSON, max_size=6), writer=st.sampled_from(WRITERS))
def test_members_are_those_of_the_object(value: dict[str, Any], writer: Any) -> None:
    body = writer(value)
    found = finish(members(body))
    assert {name: json.loads(body[span.start : span.end]) for name, span in found.items()} == value


@settings(max_examples=60, deadline=None)
@given(value=st.lists(JSON, max_size=12), writer=st.sampled_from(WRITERS))
def test_pieces_are_the_elements_in_order(value: list[Any], writer: Any, slice_bytes: int) -> None:
    body = b'{"x":' + writer(value) + b"}"
    found = finish(elements(body, finish(members(body))["x"], limit=100))
    assert found.total == len(value)
    decoded = [json.loads(b"[" + body[piece.start : piece.end] + b"]") for piece in found.pieces]
    assert [item for part in decoded for item in part] == value
    for piece, part in zip(found.pieces, decoded, strict=True):
        assert len(part) == 1 or piece.size <= 2 * slice_bytes


def test_more_elements_than_the_limit_end_the_search() -> None:
    body = b"[" + b"1," * 1000 + b"1]"
    steps = elements(body, Span(0, len(body)), limit=10)
    assert finish(steps).total > 10


def test_of_two_members_with_one_name_the_last_counts() -> None:
    body = b'{"a": 1, "a": [2, 3]}'
    span = finish(members(body))["a"]
    assert body[span.start : span.end] == b"[2, 3]"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"1",
        b"{",
        b"}",
        b"{}}",
        b"{}{}",
        b'{"a":1}x',
        b'{"a":1,}',
        b'{,"a":1}',
        b'{"a"}',
        b'{"a":1 "b":2}',
        b'{"a":1,"b"}',
        b'{"a:1}',
        b'{"a":"\\"}',
        b'{"a":[1}',
        b"{1:2}",
        b'{"a":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}",
        b'{"a":' + b"[" * 100_000,
        b"{" + b",".join(b'"%d":1' % index for index in range(2000)) + b"}",
        b'{"' + b"n" * 5000 + b'":1}',
        b" " * 10**6 + b'{"a":1}',
    ],
)
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidParameter):
        finish(members(body))


@pytest.mark.parametrize("slice_bytes", [64], indirect=True)
def test_an_object_of_blanks_is_refused() -> None:
    with pytest.raises(InvalidParameter):
        finish(members(b'{"a":' + b" " * 10**6 + b"1}"))


@pytest.mark.parametrize("array", [b"[1,]", b"[,1]", b"[1,,2]", b"[,]", b"{}", b"1"])
def test_what_is_no_array_is_refused_or_not_decodable(array: bytes) -> None:
    with pytest.raises((InvalidParameter, json.JSONDecodeError)):
        found = finish(elements(array, Span(0, len(array)), limit=10))
        for piece in found.pieces:
            json.loads(b"[" + array[piece.start : piece.end] + b"]")


@pytest.mark.parametrize(
    "filling",
    [b"1,", b"[],", b'"",', b'{"a":1},', b'"\\"\\\\",', b"          ", b'"' + b"x" * 100_000 + b'",'],
    ids=["ids", "arrays", "strings", "objects", "escapes", "blanks", "long"],
)
@pytest.mark.parametrize("slice_bytes", [64 * 1024], indirect=True)
def test_no_slice_takes_long(filling: bytes, uncollected: None) -> None:
    body = b'{"prompt":[1,' + filling * (8 * 1024 * 1024 // len(filling)) + b"1]}"
    span = finish(members(body))["prompt"]
    for steps in (members(body), elements(body, span, limit=10**9)):
        longest_s, done = 0.0, False
        while not done:
            began = time.thread_time()
            try:
                done = next(steps, 1) == 1
            except InvalidParameter:
                done = True
            longest_s = max(longest_s, time.thread_time() - began)
        assert longest_s < 0.01
