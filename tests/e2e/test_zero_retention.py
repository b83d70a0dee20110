"""With `--zero-retention` nothing of a prompt or an answer is in memory files, on disk or in logs once the request is over."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import anyio
import numpy as np
import pytest

from common.models.source import ModelFiles
from common.text.bundle import load_bundle
from tests.e2e.stack import Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
SIMULATED = ("--engine", "simulated", "--time-scale", "0", "--num-blocks", "256")
"""Its KV is a hash of the tokens up to each position, in the same blocks as a real engine's."""
SECRET = "the flamingo password is kumquat-7719-ottoline"


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def kv_left(folder: Path) -> int:
    """Bytes of blocks in segments that are not zero."""
    left = 0
    for path in folder.iterdir():
        with path.open("rb") as file:
            (blocks_offset,) = struct.unpack_from("<Q", file.read(64), 32)
        left += int(np.count_nonzero(np.fromfile(path, np.uint8)[blocks_offset:]))
    return left


async def story(stack: Stack, *flags: str) -> list[str]:
    """Requests of every kind with the secret in them; the answers' texts."""
    for role in ("gateway", "prefill", "decode"):
        await stack.start(role, "--log-level", "debug", *flags)
    await stack.ready()
    url = stack.url()
    answers: list[str] = []
    long = SECRET + " " + "and then some more of it " * 40
    for text in (SECRET, long):
        for stream in (False, True):
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": 24, "stream": stream, "ignore_eos": True}
            answer = await stack.client.post(f"{url}/v1/chat/completions", json=body)
            assert answer.status_code == 200
            if stream:
                events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
                deltas = [choice["delta"] for event in events for choice in json.loads(event)["choices"]]
                answers.append("".join(delta.get("content") or "" for delta in deltas))
            else:
                answers.append(answer.json()["choices"][0]["message"]["content"])
    for bad in (
        {"messages": [{"role": SECRET, "content": SECRET}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": SECRET}}]}]},
        {"messages": [{"role": "user", "content": SECRET}], "model": "no-such-model"},
        {"messages": [{"role": "user", "content": SECRET}], "structured_outputs": {"regex": SECRET + "("}},
        {"messages": [{"role": "user", "content": SECRET}], "chat_template_kwargs": {"x": SECRET}},
    ):
        await stack.client.post(f"{url}/v1/chat/completions", json=bad)
    await stack.client.post(f"{url}/v1/chat/completions", content=SECRET.encode(), headers={"content-type": "application/json"})
    await anyio.sleep(1.5)
    return answers


async def test_nothing_of_a_request_is_left_in_files_or_logs(nats_server: str, tmp_path: Path, smollm2: ModelFiles) -> None:
    folder = tmp_path / "zero"
    folder.mkdir()
    async with Stack(nats_server, folder, engine_flags=SIMULATED) as stack:
        answers = await story(stack, "--zero-retention")
        found = files_of(folder)
        assert kv_left(stack.shm_dir) == 0
    tokens = load_bundle(smollm2).tokenizer.encode(SECRET)
    packed = struct.pack(f"<{len(tokens)}I", *tokens)
    words = [SECRET.encode(), b"kumquat-7719", b"ottoline", packed[8:-8]]
    words += [answer.encode() for answer in answers if len(answer) > 12]
    assert len(words) > 6 and any(path.suffix == ".log" for path in found) and any(path.parent.name == "shm" for path in found)
    for path, content in found.items():
        for word in words:
            assert word not in content, f"{word!r} is in {path}"


async def test_without_the_flag_the_search_would_find_something(nats_server: str, tmp_path: Path, smollm2: ModelFiles) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    async with Stack(nats_server, folder, engine_flags=SIMULATED) as stack:
        await story(stack)
        assert kv_left(stack.shm_dir) > 0


def test_a_kvstore_does_not_start_where_nothing_may_be_kept() -> None:
    """It does not wait for a bus to say so."""
    argv = [sys.executable, "-m", "services.kvstore", "--zero-retention", "--nats-url", "nats://127.0.0.1:1"]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    assert ended.returncode == 2 and "zero_retention" in ended.stderr
