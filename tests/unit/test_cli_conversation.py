"""The parts of `generate` and `chat` that need no bus: an answer from its chunks, the messages of a conversation, its files."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from common.cli import conversation as module
from common.cli.chunks import Answer, Chunk, Timing
from common.cli.conversation import Conversation, read_text_file
from common.cli.generate import chat_body, json_file
from common.protocol.errors import InvalidParameter


def chunk(usage: object = None, finish_reason: str | None = None, **delta: object) -> Chunk:
    body = {"id": "c-1", "model": "m", "usage": usage, "choices": [{"delta": delta, "finish_reason": finish_reason}]}
    return msgspec.convert(body, Chunk)


def test_an_answer_is_the_sum_of_its_chunks() -> None:
    answer = Answer(timing=Timing(started=1.0, first=1.5, last=2.5, tokens=5))
    answer.add(chunk(reasoning_content="Hm"))
    answer.add(chunk(content="It "))
    answer.add(chunk(content="is."))
    for index, name in enumerate(("weather", "time")):
        answer.add(chunk(tool_calls=[{"index": index, "id": f"call-{index}", "function": {"name": name, "arguments": ""}}]))
        answer.add(chunk(tool_calls=[{"index": index, "function": {"arguments": '{"a":'}}]))
        answer.add(chunk(tool_calls=[{"index": index, "function": {"arguments": "1}"}}]))
    answer.add(chunk(finish_reason="tool_calls"))
    answer.add(chunk(usage={"prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 2}}))
    assert answer.summary() == {
        "id": "c-1",
        "model": "m",
        "text": "It is.",
        "reasoning": "Hm",
        "tool_calls": [
            {"id": f"call-{index}", "type": "function", "function": {"name": name, "arguments": '{"a":1}'}}
            for index, name in enumerate(("weather", "time"))
        ],
        "finish_reason": "tool_calls",
        "usage": {"prompt_tokens": 7, "cached_tokens": 2, "completion_tokens": 5},
        "ttft_s": 0.5,
        "duration_s": 1.5,
        "tokens_per_s": 4.0,
    }
    nothing = Answer().summary()
    assert (nothing["ttft_s"], nothing["duration_s"], nothing["tokens_per_s"]) == (None, None, None)


def test_files_go_with_one_message_and_stay_in_its_turn(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\ufeffalpha\n", encoding="utf-8")
    talk = Conversation("Be brief.")
    talk.attach(tmp_path / "a.txt")
    asked = "a.txt:\n```\nalpha\n```\n\nwhat?"
    assert talk.with_prompt("what?") == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": asked}]
    assert talk.turns == []
    talk.answered("what?", "this")
    assert talk.with_prompt("more")[1:] == [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": "this"},
        {"role": "user", "content": "more"},
    ]
    talk.clear()
    assert talk.with_prompt("new") == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "new"}]


def test_a_file_that_is_no_text_of_bearable_size_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")  # nobody writes: opening it must not wait
    (tmp_path / "large").write_text("x" * (module.MAX_FILE_BYTES + 1))
    (tmp_path / "binary").write_bytes(b"\x7fELF\0")
    (tmp_path / "latin").write_bytes("Käse".encode("latin-1"))
    (tmp_path / "empty").write_text("\n")
    says = {
        "pipe": "no regular file",
        "large": "larger than 256 KiB",
        "binary": "not UTF-8 text",
        "latin": "not UTF-8 text",
        "empty": "is empty",
        "missing": "No such file",
        "null\0byte": "null byte",
    }
    for name, reason in says.items():
        with pytest.raises(InvalidParameter, match=reason):
            read_text_file(tmp_path / name)
    talk = Conversation()
    (tmp_path / "half").write_text("x" * (module.MAX_FILE_BYTES // 2))
    monkeypatch.setattr(module, "MAX_FILES_BYTES", module.MAX_FILE_BYTES)
    talk.attach(tmp_path / "half")
    talk.attach(tmp_path / "half")
    with pytest.raises(InvalidParameter, match="in all"):
        talk.attach(tmp_path / "half")


def test_a_file_for_generate_must_be_json_of_its_kind(tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    assert json_file(tmp_path / "schema.json", "json_schema", dict) == {"type": "object"}
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "large.json").write_text(" " * (1 << 20) + "{}")
    says = {
        "schema": "must hold a JSON list",
        "broken": "not JSON",
        "deep": "not JSON",
        "large": "larger than 1 MiB",
        "no": "No such",
    }
    for name, reason in says.items():
        with pytest.raises(InvalidParameter, match=reason):
            json_file(tmp_path / f"{name}.json", "tools", list)


def test_an_argument_that_is_no_utf8_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="not valid UTF-8"):
        chat_body([{"role": "user", "content": "\udcff"}], max_tokens=1, temperature=0, seed=None)
