"""The load generator's client counts what was sent, however the bytes arrive; and its arithmetic."""

from __future__ import annotations

import asyncio
import itertools
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bench.common.sse import HttpStream
from bench.common.stats import Percentiles, slope_per_min

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def event(body: object) -> bytes:
    data = b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


def answer(texts: list[str]) -> bytes:
    chunks = [event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})]
    chunks += [event({"choices": [{"delta": {"content": text}}], "usage": None}) for text in texts]
    chunks.append(event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": len(texts)}}))
    return HEAD + b"".join(chunks) + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class Replay(asyncio.Transport):
    """A connection that answers each request with given bytes, cut in given places."""

    def __init__(self, stream: HttpStream, pieces: list[bytes]) -> None:
        super().__init__()
        self.stream = stream
        self.pieces = pieces

    def write(self, data: bytes | bytearray | memoryview) -> None:
        for piece in self.pieces:
            asyncio.get_running_loop().call_soon(self.stream.data_received, piece)

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        self.pieces = []


def post(stream: HttpStream, data: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(cut % len(data) for cut in cuts), len(data)]
    stream._transport = Replay(stream, [data[a:b] for a, b in itertools.pairwise(edges) if a < b])
    asyncio.run(stream.post("/v1/chat/completions", b"{}"))


@example(texts=["\u1e70" * 130], cuts=[len(answer(["\u1e70" * 100]))])  # the first text is longer than the tail that is kept
@given(texts=st.lists(st.text(min_size=1, max_size=400), min_size=1, max_size=20), cuts=st.lists(st.integers(0), max_size=30))
@settings(max_examples=200, deadline=None)
def test_events_tokens_and_the_first_text_are_found_however_the_bytes_are_cut(texts: list[str], cuts: list[int]) -> None:
    stream = HttpStream("127.0.0.1", 1)
    for _ in range(2):  # the second on the same connection, behind the end of the first
        post(stream, answer(texts), cuts)
        result = stream.answer
        assert result is not None and result.error == ""
        assert (result.events, result.tokens, result.first_text) == (len(texts) + 2, len(texts), texts[0])
        assert result.sent_at <= result.first_at <= result.done_at


@pytest.mark.parametrize("cuts", [[], [3], [20, 60]])
def test_a_refusal_is_an_error_with_its_body(cuts: list[int]) -> None:
    stream = HttpStream("127.0.0.1", 1)
    post(stream, b'HTTP/1.1 429 Too Many\r\ncontent-length: 20\r\n\r\n{"error":"too busy"}', cuts)
    assert stream.answer is not None and stream.answer.error.startswith("HTTP 429")


def test_an_error_in_the_middle_of_a_stream_ends_it() -> None:
    stream = HttpStream("127.0.0.1", 1)
    post(stream, HEAD + event({"choices": [{"delta": {"content": "a"}}]}) + event({"error": {"code": "overloaded"}}), [])
    assert stream.answer is not None and "overloaded" in stream.answer.error


def test_a_refused_connection_is_an_error_of_that_request() -> None:
    stream = HttpStream("127.0.0.1", 1)
    result = asyncio.run(stream.post("/", b""))
    assert result.error and result.done_at >= result.sent_at


def test_percentiles_are_milliseconds() -> None:
    assert Percentiles.of_seconds([]) == Percentiles()
    ranked = Percentiles.of_seconds([index / 1000 for index in range(100)])
    assert (ranked.p50, ranked.p90, ranked.p99) == (50, 90, 99)


def test_the_slope_of_memory_is_per_minute() -> None:
    assert slope_per_min([(second, 100 + 0.5 * second) for second in range(60)]) == pytest.approx(30)
    assert slope_per_min([(0, 100)]) == 0
