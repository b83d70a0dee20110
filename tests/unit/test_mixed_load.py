"""What the mixed load's verdicts rest on: how answers are read and compared, which failures are excused, how figures come."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest

from bench.mixed_load import asks, models
from bench.mixed_load.answers import Answer, Incomplete, Said, View, differences, streamed, whole
from bench.mixed_load.clients import Result, failed
from bench.mixed_load.greedy import median_ratio, percentile
from bench.mixed_load.outages import Outage, verdict
from bench.mixed_load.site import WORKER_ID, Sizes, config_text
from bench.mixed_load.tally import End, Tally
from bench.mixed_load.watch import growth, held_by
from common.models.source import resolve
from common.protocol.handles import WorkerRef
from common.protocol.messages import KvUsage, Presence
from common.text.bundle import load_bundle

KILLED = [Outage("kill", "gateway-0", 100.0), Outage("kill", "nats-server", 200.0), Outage("pause", "decode-alpha-0", 300.0)]


def chat(*deltas: dict[str, Any], finish: str | None = "stop", index: int = 0) -> list[dict[str, Any]]:
    """The chunks of one choice."""
    chunks = [{"index": index, "delta": delta, "finish_reason": None} for delta in deltas]
    if finish:
        chunks.append({"index": index, "delta": {}, "finish_reason": finish})
    return [{"model": "m", "choices": [chunk]} for chunk in chunks]


def call(name: str, arguments: str, index: int = 0) -> dict[str, Any]:
    return {"tool_calls": [{"index": index, "function": {"name": name, "arguments": arguments}}]}


def test_a_stream_of_choices_says_what_the_whole_answer_says() -> None:
    events = [
        *chat({"content": "a"}, {"content": "b"}),
        *chat(call("f", '{"x"'), call("", ":1}"), finish="tool_calls", index=1),
    ]
    usage = {"prompt_tokens_details": {"cached_tokens": 16}}
    events.append({"model": "m", "choices": [], "usage": usage})
    message = {"tool_calls": [{"function": {"name": "f", "arguments": '{"x":1}'}}], "content": None}
    body = {
        "model": "m",
        "choices": [
            {"index": 1, "message": message, "finish_reason": "tool_calls"},
            {"index": 0, "message": {"content": "ab"}, "finish_reason": "stop"},
        ],
        "usage": usage,
    }
    assert streamed("chat", events) == whole("chat", body)
    assert whole("chat", body).cached_tokens == 16


def test_a_stream_of_anthropics_events_says_what_the_whole_answer_says() -> None:
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {"model": "m", "usage": {"cache_read_input_tokens": 4}}},
        {"type": "content_block_start", "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "hi"}},
        {"type": "content_block_start", "content_block": {"type": "tool_use", "name": "f", "input": {}}},
        {"type": "content_block_delta", "delta": {"type": "input_json_delta", "partial_json": '{"x": 1}'}},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use", "stop_sequence": None}, "usage": {"output_tokens": 2}},
        {"type": "message_stop"},
    ]
    content = [{"type": "text", "text": "hi"}, {"type": "tool_use", "name": "f", "input": {"x": 1}}]
    usage = {"cache_read_input_tokens": 4}
    body = {"model": "m", "content": content, "stop_reason": "tool_use", "usage": usage}
    assert streamed("messages", events) == whole("messages", body)


def test_a_response_whose_events_say_something_else_is_no_answer() -> None:
    output = [{"type": "message", "content": [{"type": "output_text", "text": "hi"}]}]
    response = {"model": "m", "output": output, "status": "completed"}
    end = {"type": "response.completed", "response": response}
    said = {"type": "response.output_text.delta", "delta": "hi"}
    assert streamed("responses", [said, end]) == whole("responses", response)
    with pytest.raises(Incomplete, match="'hihi'"):
        streamed("responses", [said, said, end])


@pytest.mark.parametrize(
    ("view", "events"),
    [("chat", chat({"content": "a"}, finish=None)), ("chat", []), ("responses", []), ("messages", [{"type": "message_start"}])],
)
def test_an_answer_without_an_end_is_none(view: View, events: list[dict[str, Any]]) -> None:
    with pytest.raises(Incomplete):
        streamed(view, events)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, ""),
        ({"text": "other"}, "text"),
        ({"finish": "length"}, "finish"),
        ({"calls": (("f", "{}"),)}, "calls"),
        ({"logprobs": (-0.5, -1.01)}, "log-probabilities"),
        ({"logprobs": (-0.5,)}, "log-probabilities"),
        ({"logprobs": (-0.5, -1.0001)}, ""),
    ],
)
def test_what_differs_from_the_expected_answer_is_named(changes: dict[str, Any], word: str) -> None:
    expected = Said("text", (), "stop", (-0.5, -1.0))
    found = Answer("m", (msgspec.structs.replace(expected, **changes),), cached_tokens=5)
    wrong = differences(Answer("m", (expected,)), found, model="m")
    assert (word in wrong[0]) if word else not wrong
    assert differences(Answer("m", (expected,)), found, model="n")[0] == "model 'm', not 'n'"
    assert "2 choices" in differences(Answer("m", (expected,)), Answer("m", (expected, expected)), model="m")[0]


@pytest.mark.parametrize(
    ("result", "edge", "at", "excused"),
    [
        (Result(ending="error", code="no_workers", status=503, retry_after="1"), "http", 400, True),
        (Result(ending="error", code="no_workers", status=503), "http", 400, False),
        (Result(ending="error", code="no_workers", status=200), "http", 400, True),  # in a stream, which has no headers left
        (Result(ending="error", code="workers_died", status=500), "http", 100, False),
        (Result(ending="error", status=503, retry_after="1"), "http", 100, False),
        (Result(ending="broken"), "http", 100, True),
        (Result(ending="broken"), "http", 200, False),
        (Result(ending="broken"), "nats", 200, True),
        (Result(ending="hung"), "nats", 100, True),
        (Result(ending="broken"), "nats", 300, False),
        (Result(ending="nobody"), "http", 110, True),
        (Result(ending="nobody"), "http", 190, False),
        (Result(ending="nobody"), "nats", 210, True),
    ],
)
def test_only_a_death_that_explains_it_excuses_a_failure(result: Result, edge: Any, at: float, excused: bool) -> None:
    assert bool(verdict(result, edge, at - 0.5, at + 0.5, KILLED)) == excused


def test_an_error_is_read_from_whatever_came() -> None:
    body = json.dumps({"error": {"code": "no_workers", "message": "none"}}).encode()
    assert failed(body, 503, "2") == Result(ending="error", code="no_workers", status=503, retry_after="2", detail="none")
    assert failed(b"<html>", 502).code == "" and failed(b"[]", 502).code == ""


def test_requests_are_the_same_each_time_and_of_every_view() -> None:
    found = asks.pool(3, 2)
    assert found == asks.pool(3, 2) != asks.pool(4, 2)
    assert {ask.view for ask in found} == {"chat", "completions", "responses", "messages"}
    stopped = asks.with_stop(found[0], "\ufffd\ufffdaaaaaabcd\ufffd")
    assert stopped is not None and stopped.body["stop"] == ["aab"]
    assert asks.with_stop(found[0], "\ufffd" * 9) is None


@pytest.mark.parametrize(
    ("text", "keeps"),
    [
        ('{"city": "Rome", "days": 3, "note": "ab"}', True),
        ('{"city": "Rome", "days": 31, "note": "ab"}', False),
        ('{"city": "Bonn", "days": 3, "note": "ab"}', False),
        ('{"city": "Rome", "days": 3, "note": "longer than six"}', False),
        ('{"city": "Rome", "days": 3}', False),
        ('{"city": "Rome"', False),
    ],
)
def test_an_answer_in_another_form_is_told(text: str, keeps: bool) -> None:
    by_form = {form: ask for ask in asks.pool(1, 1) for form in ("response_format", "tools") if form in ask.body}
    assert asks.keeps_form(by_form["response_format"], Answer("m", (Said(text, (), "stop"),))) == keeps
    assert asks.keeps_form(by_form["tools"], Answer("m", (Said("", (("trains", text),), "tool_calls"),))) == keeps
    assert not asks.keeps_form(by_form["response_format"], Answer("m", (Said(text, (), "length"),)))
    assert not asks.keeps_form(by_form["tools"], Answer("m", (Said(text, (), "stop"),)))


def test_models_differ_in_weights_alone(tmp_path: Any) -> None:
    one, two = models.write(tmp_path / "one", 1), models.write(tmp_path / "two", 2)
    same = {path.name: path.read_bytes() == (two / path.name).read_bytes() for path in one.iterdir()}
    assert [name for name, is_same in same.items() if not is_same] == ["model.safetensors"]
    bundle = load_bundle(resolve(str(one)))
    assert bundle.tokenizer.encode("abc") and len(bundle.tokenizer.encode("abc")) == 3


def test_the_settings_name_each_model_and_its_workers(tmp_path: Any) -> None:
    text = config_text(tmp_path, Sizes())
    assert text.count("[[models]]") == 2 and 'served_model_name = ["beta", "beta-too"]' in text
    assert 'device = "cpu"' in text, "models of a megabyte stay off a GPU"
    found = WORKER_ID.search("python -m services.decode --worker-id decode-alpha-0-12ab9f --threads 1")
    assert found is not None and found[1] == "decode-alpha-0"


def test_prefill_workers_of_another_host_have_other_shared_memory_and_nixl(tmp_path: Any) -> None:
    text = config_text(tmp_path, Sizes(hosts=2, disk=True))
    assert f'[prefill]\nshm_dir = "{tmp_path / "shm-prefill"}"' in text and f'kv_disk = "{tmp_path / "kv"}"' in text
    assert text.count('kv_transfer = "nixl"') == 3, "of the kvstore, and of each model"
    assert "nixl" not in config_text(tmp_path, Sizes()) and "kv_disk" not in config_text(tmp_path, Sizes())


def test_the_load_ends_by_time_or_once_enough_was_answered() -> None:
    tally = Tally()
    now = time.monotonic()
    assert End(tally, now - 1).is_over and not End(tally, now + 60).is_over
    tally.answered["chat"] = 5
    assert End(tally, now + 60, 5).is_over and not End(tally, now + 60, 6).is_over


def test_memory_that_grows_after_it_has_settled_is_told_from_one_that_does_not() -> None:
    warming = [(float(t), 400.0 if t > 60 else 100.0 + 5 * t) for t in range(0, 600, 5)]
    steady = growth("a", warming)
    assert steady is not None and not steady.grows and steady.settled_mb == 400
    leaking = growth("b", [(float(t), 200.0 + t / 2) for t in range(0, 600, 5)])
    assert leaking is not None and leaking.grows and leaking.mb_per_min == pytest.approx(30)
    assert growth("c", warming[:20]) is None
    brief = growth("d", [(float(t), 200.0 + t) for t in range(0, 100, 5)], min_life_s=60)
    assert brief is not None and not brief.grows


def test_what_a_worker_holds_is_told() -> None:
    ref = WorkerRef(id="decode-0", role="decode", epoch=1)
    idle = Presence(worker=ref, state="ready", kv=KvUsage(total=10, free=7, cached=3))
    assert held_by(idle) == ""
    busy = msgspec.structs.replace(idle, running=1, kv=KvUsage(total=10, free=5, owned=2, leased=1))
    assert held_by(busy) == "running 1, owned 2, leased 1, blocks unaccounted for 2"


def test_ratios_are_medians_of_turns() -> None:
    assert median_ratio([1.0, 2.0, 4.0], [1.5, 2.0, 40.0]) == 1.5
    assert median_ratio([0.0], [1.0]) == 0.0
    assert percentile(list(map(float, range(101))), 0.99) == 99.0 and percentile([], 0.5) == 0.0
