"""`penstock chat` and `penstock generate` as programs at a real terminal and in pipes, against real services with a simulated
engine that takes its time: what Ctrl-C, commands, files and closed pipes do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import pytest_asyncio

from common.models.source import ModelFiles
from tests.e2e.stack import ROOT, Stack
from tests.e2e.terminal import CTRL_C, CTRL_D, Terminal
from tests.e2e.test_tool_choice import TEMPLATE as TOOL_TEMPLATE
from tests.e2e.tiny import save_byte_tokenizer
from tests.models.oracles import build, save

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]
MODEL = "smollm2-135m-instruct"
FLAGS = ("--engine", "simulated", "--profile", "h200-llama-8b", "--kv-cache-mb", "256")
LONG = ("--max-tokens", "6000")
"""Half a minute of the simulated engine: an answer that somebody ends."""

PAINT = {
    "name": "paint",
    "parameters": {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"]},
    "strict": True,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(nats_server: str, smollm2: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    folder = tmp_path_factory.mktemp("chat")
    async with Stack(nats_server, folder, flags=("--model", smollm2.name), engine_flags=FLAGS) as stack:
        await stack.start("gateway", "--aliases", "assistant")
        await stack.start("decode")
        await stack.ready()
        yield stack


def penstock(stack: Stack, *words: str) -> list[str]:
    return [sys.executable, "-m", "common.cli", *words, "--nats-url", stack.nats_url]


async def run(stack: Stack, *words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[str]:
    def wait() -> subprocess.CompletedProcess[str]:
        ended = subprocess.run(penstock(stack, *words), cwd=ROOT, input=stdin, capture_output=True, timeout=60, check=False)
        return subprocess.CompletedProcess(words, ended.returncode, ended.stdout.decode(), ended.stderr.decode())

    ended = await anyio.to_thread.run_sync(wait)
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended


async def busy(stack: Stack) -> None:
    """Wait until the decode worker runs a request."""
    with anyio.fail_after(20):
        while not stack.presence("decode-0").running:
            await anyio.sleep(0.02)


def saved(path: Path) -> list[dict[str, str]]:
    return json.loads(path.read_text())


# ── chat at a terminal ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_ctrl_c_ends_the_answer_and_not_the_conversation(stack: Stack, tmp_path: Path) -> None:
    async with Terminal(penstock(stack, "chat", *LONG)) as terminal:
        await terminal.shows("> ")
        terminal.type("first question\n")
        await busy(stack)
        await anyio.sleep(0.3)
        began = time.monotonic()
        terminal.type(CTRL_C)
        await terminal.shows("stopped")
        assert time.monotonic() - began < 3
        await stack.clean(within_s=2)  # the worker has freed the sequence and its blocks
        await terminal.shows("> ")
        terminal.type(f"/save {tmp_path}/first.json\n")
        await terminal.shows("saved to")
        user, assistant = saved(tmp_path / "first.json")
        assert user == {"role": "user", "content": "first question"}
        assert assistant["role"] == "assistant" and assistant["content"], "what came of the answer is kept"

        await terminal.shows("> ")
        terminal.type("second question\n")
        await busy(stack)
        await anyio.sleep(0.3)
        terminal.type(CTRL_C + CTRL_C)  # impatient
        await terminal.shows("stopped")
        terminal.type(f"/save {tmp_path}/second.json\n")
        await terminal.shows("saved to")
        messages = saved(tmp_path / "second.json")
        assert messages[:2] == [user, assistant] and [message["role"] for message in messages[2:]] == ["user", "assistant"]
        terminal.type(CTRL_D)
        assert await terminal.ended() == 0
    assert "Traceback" not in terminal.screen
    await stack.clean(within_s=2)


async def test_ctrl_c_at_the_prompt_says_how_to_leave_and_an_empty_line_says_nothing(stack: Stack) -> None:
    async with Terminal(penstock(stack, "chat", "--max-tokens", "4")) as terminal:
        await terminal.shows("> ")
        terminal.type("half a mess" + CTRL_C)
        await terminal.shows("Ctrl-D or /bye ends the conversation")
        await terminal.shows("> ")
        terminal.type("\n")
        await terminal.shows("> ")
        terminal.type("hello\n")
        await terminal.shows("4 tokens · cut off at --max-tokens 4")
        await terminal.shows("> ")
        terminal.type("\x1b[A")  # the line before, from the history
        await terminal.shows("hello")
        terminal.type("\n")
        await terminal.shows("4 tokens")
        terminal.type("/bye\n")
        assert await terminal.ended() == 0
    assert "Traceback" not in terminal.screen


async def test_commands_change_the_model_the_system_prompt_and_take_files(stack: Stack, tmp_path: Path) -> None:
    notes, picture = tmp_path / "my notes.txt", tmp_path / "picture.png"
    notes.write_text("The gate is open. ```\n")
    picture.write_bytes(b"\x89PNG\r\n\x1a\n\0")
    async with Terminal(penstock(stack, "chat", "--max-tokens", "4")) as terminal:

        async def says(line: str, answer: str) -> None:
            await terminal.shows("> ")
            terminal.type(line + "\n")
            await terminal.shows(answer)

        await says("/model", f"* {MODEL}")
        await says("/model gpt-9", f"model_not_found: gpt-9 is not served here: there are assistant, {MODEL}")
        await says("/model assistant", "talking to assistant")
        await says("/system", "no system prompt")
        await says("/system Be brief.", "system prompt: Be brief.")
        await says(f"/file {picture}", "is not UTF-8 text")
        await says(f"/file {tmp_path}", "Is a directory")
        await says("/file", "/file needs a path")
        await says(f'/file "{notes}"', "my notes.txt (22 bytes) goes with your next message")
        await says("what is open?", "4 tokens")
        await says("/nothing", "no command /nothing")
        await says(f"/save {tmp_path}/all.json", "saved to")
        await says(f"/save {tmp_path}/all.json", "File exists")
        await says("/clear", "forgotten")
        await says("/system -", "no system prompt")
        await says("/help", "/system [TEXT]")
        await says("again", "4 tokens")
        await says(f"/save {tmp_path}/one.json", "saved to")
        await says("/sys\t", "no system prompt")  # completed
        terminal.type("/bye\n")
        assert await terminal.ended() == 0
    system, question, answer = saved(tmp_path / "all.json")
    assert system == {"role": "system", "content": "Be brief."}
    assert question["content"] == "my notes.txt:\n````\nThe gate is open. ```\n````\n\nwhat is open?"
    assert answer["content"]
    assert [message["content"] for message in saved(tmp_path / "one.json")][:1] == ["again"]


async def test_a_failed_turn_leaves_the_conversation_as_it_was(stack: Stack, tmp_path: Path) -> None:
    async with Terminal(penstock(stack, "chat", "--max-tokens", "9000")) as terminal:
        await terminal.shows("> ")
        terminal.type("too much\n")
        await terminal.shows("context_length_exceeded")
        await terminal.shows("> ")
        terminal.type(f"/save {tmp_path}/none.json\n")
        await terminal.shows("saved to")
        terminal.type(CTRL_D)
        assert await terminal.ended() == 0
    assert saved(tmp_path / "none.json") == []


# ── in pipes ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_conversation_from_a_pipe_has_a_turn_for_each_line(stack: Stack) -> None:
    ended = await run(stack, "chat", "--max-tokens", "4", stdin=b"one\n\ntwo\n")
    assert ended.returncode == 0 and ended.stderr.count("4 tokens") == 2 and ended.stdout.count("\n") >= 2
    assert ">" not in ended.stderr
    failed = await run(stack, "chat", "--max-tokens", "9000", stdin=b"one\n")
    assert failed.returncode == 1 and failed.stderr.count("context_length_exceeded") == 1
    assert "not UTF-8" in (await run(stack, "chat", stdin=b"\xff\n")).stderr
    unknown = await run(stack, "chat", "--model", "nope", stdin=b"")
    assert unknown.returncode == 1 and unknown.stderr.startswith("error model_not_found: the model 'nope' is not served")


async def test_generate_as_json_is_one_object_with_units_in_its_names(stack: Stack) -> None:
    plain = await run(stack, "generate", "Hello", "--max-tokens", "6")
    ended = await run(stack, "generate", "Hello", "--max-tokens", "6", "--json", "--model", "assistant")
    assert ended.returncode == 0 and not ended.stderr
    assert ended.stdout.count("\n") == 1
    answer: dict[str, Any] = json.loads(ended.stdout)
    assert answer["text"] + "\n" == plain.stdout
    assert (answer["finish_reason"], answer["reasoning"], answer["tool_calls"]) == ("length", "", [])
    assert answer["usage"]["completion_tokens"] == 6 and answer["usage"]["prompt_tokens"] > 6
    assert answer["model"] == "assistant" and answer["id"]
    assert 0 < answer["ttft_s"] <= answer["duration_s"] < 10
    assert answer["tokens_per_s"] is None or answer["tokens_per_s"] > 10  # none when all of them came at once
    refused = await run(stack, "generate", "Hello", "--max-tokens", "9000", "--json")
    assert (refused.returncode, refused.stdout) == (1, "") and refused.stderr.count("\n") == 1


async def test_generate_obeys_a_schema_from_a_file(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text('{"enum": ["red", "green"]}')
    (tmp_path / "list.json").write_text("[]")
    chosen = await run(stack, "generate", "Which?", "--json-schema", str(tmp_path / "schema.json"))
    assert json.loads(chosen.stdout) in ("red", "green"), chosen
    refused = await run(stack, "generate", "Which?", "--json-schema", str(tmp_path / "list.json"))
    assert refused.returncode == 1 and "must hold a JSON object" in refused.stderr and refused.stderr.count("\n") == 1


@pytest.mark.slow
async def test_generate_prints_calls_of_tools_from_a_file(nats_server: str, tmp_path: Path) -> None:
    model = tmp_path / "caller"
    save(build("llama"), model)
    save_byte_tokenizer(model, "<|end|>")
    (model / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    (tmp_path / "tools.json").write_text(json.dumps([{"type": "function", "function": PAINT}]))
    tools = ("--tools", str(tmp_path / "tools.json"), "--model", "caller", "--max-tokens", "300")
    asked = ("generate", "Paint it", *tools, "--tool-choice", "paint")
    async with Stack(nats_server, tmp_path, flags=("--model", str(model)), engine_flags=("--engine", "simulated")) as stack:
        await stack.start("gateway", name="gateway-of-tools")
        await stack.start("decode", name="decode-of-tools")
        await stack.ready()
        ended = await run(stack, *asked, "--json")
        assert ended.returncode == 0, ended.stderr
        [call] = json.loads(ended.stdout)["tool_calls"]
        assert call["function"]["name"] == "paint"
        assert json.loads(call["function"]["arguments"])["colour"] in ("red", "green")
        assert json.loads((await run(stack, *asked)).stdout)["function"] == call["function"], "a line of its own"


async def test_bench_as_json_has_every_figure(stack: Stack) -> None:
    ended = await run(stack, "bench", "--requests", "4", "--concurrency", "2", "--max-tokens", "5", "--json")
    assert ended.returncode == 0, ended.stderr
    figures = json.loads(ended.stdout)
    assert (figures["model"], figures["requests"], figures["failed"], figures["generated_tokens"]) == (MODEL, 4, 0, 20)
    assert (figures["transport"], figures["concurrency"], figures["max_tokens"]) == ("nats", 2, 5)
    for name in ("ttft_ms", "itl_ms", "request_ms"):
        assert 0 < figures[name]["p50"] <= figures[name]["p90"] <= figures[name]["p99"]
    assert figures["tokens_per_s"] == pytest.approx(20 / figures["duration_s"], rel=0.01)


async def test_ctrl_c_at_generate_has_status_130_and_frees_the_worker(stack: Stack) -> None:
    process = subprocess.Popen(
        penstock(stack, "generate", "Hello", *LONG), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and await anyio.to_thread.run_sync(process.stdout.read, 1)  # `busy` may be a canary
    process.send_signal(signal.SIGINT)
    _, said = await anyio.to_thread.run_sync(lambda: process.communicate(timeout=10))
    assert process.returncode == 130 and b"Traceback" not in said
    await stack.clean(within_s=2)


@pytest.mark.parametrize(
    "command", ["generate Hello --max-tokens 3000", "status --json", "bench --requests 2 --max-tokens 3 --json"]
)
async def test_a_reader_that_goes_is_no_traceback_and_the_request_ends(stack: Stack, command: str) -> None:
    read, write = os.pipe()
    process = subprocess.Popen(penstock(stack, *command.split()), cwd=ROOT, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    if command.startswith("generate"):
        assert await anyio.to_thread.run_sync(lambda: os.read(read, 1))
    os.close(read)
    _, said = await anyio.to_thread.run_sync(lambda: process.communicate(timeout=20))
    assert process.returncode != 0 and b"Traceback" not in said and b"Exception" not in said, said
    await stack.clean(within_s=2)


async def test_a_full_disk_is_one_line(stack: Stack) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    command = penstock(stack, "generate", "Hello", "--max-tokens", "4")
    process = subprocess.Popen(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE)
    os.close(full)
    _, said = await anyio.to_thread.run_sync(lambda: process.communicate(timeout=20))
    assert process.returncode == 1
    assert said.decode().strip().splitlines() == ["error: No space left on device"]
