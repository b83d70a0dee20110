"""A real gateway between simulated workers under clients that send much, ask for much, or are not there: nobody else notices.

What others notice is measured from outside: by a process that asks for /health all the time, by heartbeats on the bus, and by a
stream that runs meanwhile. The bounds are far above what a quiet machine shows (10 to 20 ms) and far below what a gateway shows
that parses a body in one turn of its loop (seconds).
"""

from __future__ import annotations

import json
import os
import resource
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import nats
import psutil
import pytest
import pytest_asyncio
from anyio.abc import SocketStream

from common.models.source import ModelFiles
from common.protocol import headers, subjects
from tests.e2e.stack import Reply, Stack
from tests.e2e.watcher import watching
from tests.fixtures.nats import LocalNatsServer
from tests.fixtures.slow import some_slow

MODEL = "smollm2-135m-instruct"
LONGEST_ANSWER_S = 1.0
LONGEST_SILENCE_S = 1.5
MIB = 1024 * 1024
HUGE = 8 * MIB - 4096
MAX_RSS_BYTES = 256 * MIB
"""Beyond what the gateway has at rest: 64 MiB of bodies, and what they are turned into."""

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(smollm2: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    folder = tmp_path_factory.mktemp("floods")
    server = LocalNatsServer(folder / "nats")
    server.start()
    engine = ("--engine", "simulated", "--profile", "instant", "--time-scale", "0", "--kv-cache-mb", "64")
    try:
        async with Stack(server.url, folder, engine_flags=engine) as stack:
            for role in ("gateway", "prefill", "decode"):
                await stack.start(role)
            await stack.ready()
            yield stack
            assert all(process.poll() is None for process in stack.processes.values())
            assert "fenced" not in stack.log("gateway-0")
    finally:
        server.stop()


def repeated(piece: str) -> str:
    return ",".join([piece] * (HUGE // (len(piece) + 1) - 10))


USER = '{"role":"user","content":"x"}'
BODIES: dict[str, tuple[str, str]] = {
    "ids": ("completions", '{"prompt":[' + repeated("1") + "]}"),
    "messages": ("chat/completions", '{"messages":[' + repeated(USER) + "]}"),
    "parts": ("chat/completions", '{"messages":[{"role":"user","content":[' + repeated('{"type":"text","text":"x"}') + "]}]}"),
    "bias": ("chat/completions", '{"messages":[' + USER + '],"logit_bias":{' + repeated('"1":0') + "}}"),
    "nesting": ("chat/completions", '{"messages":[' + USER + '],"metadata":' + "[" * (HUGE - 100)),
    "text": ("completions", '{"prompt":"' + "x y " * (HUGE // 4 - 10) + '"}'),
    "many-messages": ("chat/completions", '{"messages":[' + ",".join([USER] * 8000) + "]}"),
    "many-parts": (
        "chat/completions",
        '{"messages":[{"role":"user","content":[' + ",".join(['{"type":"text","text":"x"}'] * 16_000) + "]}]}",
    ),
}


async def bystander(stack: Stack, reply: Reply) -> None:
    await stack.complete([1, 2, 3], reply=reply, max_tokens=64, ignore_eos=True)


def rss(stack: Stack) -> int:
    return psutil.Process(stack.processes["gateway-0"].pid).memory_info().rss


@pytest.mark.parametrize("name", some_slow(BODIES, quick=("parts",)))
async def test_huge_bodies_over_http_disturb_nobody(stack: Stack, name: str) -> None:
    path, body = BODIES[name]
    codes: Counter[str] = Counter()
    most = before = rss(stack)

    async def one() -> None:
        nonlocal most
        answer = await stack.client.post(
            f"{stack.url()}/v1/{path}", content=body.encode(), headers={"content-type": "application/json"}
        )
        codes[f"{answer.status_code} {answer.json()['error']['code']}"] += 1
        most = max(most, rss(stack))

    reply = Reply()
    async with watching(stack) as watch, anyio.create_task_group() as group:
        group.start_soon(bystander, stack, reply)
        for _ in range(24):
            group.start_soon(one)
    assert sum(codes.values()) == 24 and all(code.startswith("400 ") for code in codes), codes
    assert (reply.finish, reply.error) == ("length", None)
    print(name, codes, watch, f"{(most - before) / MIB:.0f} MiB more")  # noqa: T201
    assert watch.longest_answer_s < LONGEST_ANSWER_S
    assert watch.longest_silence_s < LONGEST_SILENCE_S
    assert most - before < MAX_RSS_BYTES


@pytest.mark.parametrize("name", some_slow(["ids", "parts", "text"], quick=("ids",)))
async def test_huge_bodies_over_nats_disturb_nobody(stack: Stack, name: str) -> None:
    path, body = BODIES[name]
    subject = subjects.chat(MODEL) if path.startswith("chat") else subjects.completions(MODEL)
    connection = await nats.connect(stack.nats_url, pending_size=512 * MIB)
    inbox = connection.new_inbox()
    replies = await connection.subscribe(inbox)
    codes: Counter[str] = Counter()
    async with watching(stack) as watch:
        for _ in range(4):
            for _ in range(6):  # more, and the server would take the gateway for a slow consumer
                await connection.publish(subject, body.encode(), reply=inbox)
            await connection.flush(timeout=30)
            for _ in range(6):
                answer = await replies.next_msg(timeout=60)
                codes[(answer.headers or {})[headers.ERROR_CODE]] += 1
    await connection.close()
    print(name, codes, watch)  # noqa: T201
    assert set(codes) <= {"context_length_exceeded", "invalid_parameter"}
    assert watch.longest_answer_s < LONGEST_ANSWER_S
    assert watch.longest_silence_s < LONGEST_SILENCE_S


@pytest.mark.parametrize("kind", ["chat", "completion"])
async def test_large_whole_answers_disturb_nobody(stack: Stack, kind: str) -> None:
    """Each is 28 MB of log-probabilities, put together as they come."""
    scores: dict[str, Any] = {"logprobs": True, "top_logprobs": 20} if kind == "chat" else {"logprobs": 20}
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]} if kind == "chat" else {"prompt": "x"}
    body = {**prompt, **scores, "n": 16, "max_tokens": 800, "ignore_eos": True, "stream": False}
    path = "chat/completions" if kind == "chat" else "completions"
    answers: list[tuple[int, int]] = []

    async def one() -> None:
        answer = await stack.client.post(f"{stack.url()}/v1/{path}", json=body)
        answers.append((answer.status_code, b'"completion_tokens":12800' in answer.content[-300:]))

    async with watching(stack) as watch, anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(one)
    print(kind, watch)  # noqa: T201
    assert answers == [(200, True)] * 4
    assert watch.longest_answer_s < LONGEST_ANSWER_S
    assert watch.longest_silence_s < LONGEST_SILENCE_S


@pytest.mark.parametrize("shape", some_slow(["ids", "text", "choices"], quick=("ids",)))
@pytest.mark.slow
async def test_many_long_prompts_disturb_nobody(stack: Stack, shape: str) -> None:
    """A million tokens in one request, all of them valid."""
    long = [1000 + number % 9000 for number in range(8000)]
    body: dict[str, Any] = {"max_tokens": 1}
    if shape == "ids":
        body["prompt"] = [[1000 + number, *long] for number in range(128)]
    elif shape == "text":
        body["prompt"] = [f"{number} " + "some words " * 3500 for number in range(128)]
    else:
        body |= {"prompt": [[1000 + number, *long] for number in range(8)], "n": 16}
    statuses: Counter[int] = Counter()

    async def one() -> None:
        statuses[(await stack.client.post(f"{stack.url()}/v1/completions", json=body)).status_code] += 1

    async with watching(stack) as watch, anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(one)
    print(shape, statuses, watch)  # noqa: T201
    assert set(statuses) <= {200, 429} and statuses[200]
    assert watch.longest_answer_s < LONGEST_ANSWER_S
    assert watch.longest_silence_s < LONGEST_SILENCE_S


@pytest.mark.slow
async def test_four_of_the_largest_answers_disturb_nobody(stack: Stack) -> None:
    """280 MB of log-probabilities each: whoever does not fit into the memory for whole answers is told so."""
    body = {"prompt": "x", "logprobs": 20, "n": 16, "max_tokens": 8000, "ignore_eos": True, "stream": False}
    outcomes: Counter[str] = Counter()
    bystanders = [Reply() for _ in range(8)]
    most = before = rss(stack)

    async def one() -> None:
        async with stack.client.stream("POST", f"{stack.url()}/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                outcomes[json.loads(await answer.aread())["error"]["code"]] += 1
                return
            tail = b""
            async for piece in answer.aiter_raw():
                tail = (tail + piece)[-300:]
            outcomes["whole" if b'"completion_tokens":128000' in tail else "cut"] += 1

    async def others(reply: Reply) -> None:
        await stack.complete([1, 2, 3], reply=reply, max_tokens=2000, ignore_eos=True)

    async with watching(stack) as watch, anyio.create_task_group() as group:
        for reply in bystanders:
            group.start_soon(others, reply)
        for _ in range(4):
            group.start_soon(one)
        while sum(outcomes.values()) < 4:
            most = max(most, rss(stack))
            await anyio.sleep(0.1)
    print(outcomes, watch, f"{(most - before) / MIB:.0f} MiB more")  # noqa: T201
    assert [(reply.finish, reply.error) for reply in bystanders] == [("length", None)] * len(bystanders)
    assert sum(outcomes.values()) == 4 and set(outcomes) <= {"whole", "overloaded"} and outcomes["whole"] >= 2
    assert watch.longest_answer_s < LONGEST_ANSWER_S
    assert watch.longest_silence_s < LONGEST_SILENCE_S


async def dropped(stack: Stack, reason: str) -> float:
    page = (await stack.client.get(f"{stack.url()}/metrics")).text
    lines = [line for line in page.splitlines() if f'nats_dropped_total{{reason="{reason}"}}' in line]
    return float(lines[0].split()[-1]) if lines else 0.0


@pytest.mark.parametrize("stream", [True, False])
async def test_dead_inboxes_take_nothing_from_others(stack: Stack, stream: bool) -> None:
    """Ten thousand requests whose clients are gone: HTTP users are served as if there were none."""
    connection = await nats.connect(stack.nats_url, pending_size=64 * MIB)
    body = json.dumps({"prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": stream}).encode()
    statuses: Counter[int] = Counter()
    flooding = anyio.Event()
    before = await dropped(stack, "nobody_listens")

    async def http_user() -> None:
        while not flooding.is_set() or sum(statuses.values()) < 20:
            answer = await stack.client.post(f"{stack.url()}/v1/completions", json={"prompt": "x", "max_tokens": 4})
            statuses[answer.status_code] += 1

    async with watching(stack) as watch, anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(http_user)
        for number in range(10_000):
            await connection.publish(subjects.completions(MODEL), body, reply=f"_INBOX.gone.{number}")
            if number % 500 == 0:
                await connection.flush(timeout=30)
        await connection.flush(timeout=30)
        await anyio.sleep(1)
        flooding.set()
    await connection.close()
    print(statuses, watch)  # noqa: T201
    assert set(statuses) == {200}
    assert watch.longest_silence_s < LONGEST_SILENCE_S
    with anyio.fail_after(20):
        while await dropped(stack, "nobody_listens") < before + 5000:
            await anyio.sleep(0.2)
    await stack.clean(within_s=5)


async def connect(port: int, count: int) -> list[SocketStream]:
    """As many of `count` connections as are not cut off at once."""
    streams: list[SocketStream] = []
    for _ in range(count):
        with suppress(OSError):
            streams.append(await anyio.connect_tcp("127.0.0.1", port))
    return streams


async def test_running_out_of_file_descriptors_is_told_and_passes(stack: Stack) -> None:
    """The limit falls while the gateway runs; connections beyond it are refused in HTTP, and later ones are served."""
    process = psutil.Process(stack.processes["gateway-0"].pid)
    before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    assert before[0] == before[1], "raised to the hard limit at the start"
    port = stack.presence("gateway-0").http_port
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (process.num_fds() + 60, before[1]))
    try:
        streams = await connect(port, 120)
        refused = 0
        for stream in streams:
            with anyio.move_on_after(0.02), suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                refused += b" 503 " in await stream.receive()
        assert refused >= 3, "and others are cut off"
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (10, before[1]))  # numbers below are in use since the start
        with anyio.fail_after(10):
            while "out_of_file_descriptors" not in stack.log("gateway-0"):
                await anyio.sleep(0.1)
        for stream in streams:
            await stream.aclose()
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (process.num_fds() + 60, before[1]))
        with anyio.fail_after(10):
            while "file_descriptors_again" not in stack.log("gateway-0"):
                await anyio.sleep(0.1)
        assert (await stack.client.get(f"{stack.url()}/health")).status_code == 200
        page = (await stack.client.get(f"{stack.url()}/metrics")).text
        counted = {line.split()[0]: float(line.split()[1]) for line in page.splitlines() if line.startswith("penstock_")}
        assert counted["penstock_http_connections_refused_total"] >= refused
        assert counted["penstock_open_files_exhausted_total"] == 1
    finally:
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, before)


async def test_a_low_hard_limit_leaves_room_for_the_gateway_s_own_files(stack: Stack, tmp_path: Path) -> None:
    """Started with few descriptors: clients beyond them are told, nothing else breaks."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)
    name = await stack.start("gateway", name="gateway-small")
    pid = stack.processes[name].pid
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (96, 96))
    await stack.ready(name)
    port = stack.presence(name).http_port
    streams = await connect(port, 150)
    try:
        with anyio.fail_after(10):
            while "connections_refused" not in stack.log(name):
                await anyio.sleep(0.1)
        await anyio.sleep(1)
        assert stack.state(name) == "ready", "its heartbeats go on"
        assert "out_of_file_descriptors" not in stack.log(name)
    finally:
        for stream in streams:
            await stream.aclose()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == soft
    with anyio.fail_after(10):
        while True:
            try:
                if (await stack.client.get(f"{stack.url(name)}/health")).status_code == 200:
                    break
            except OSError:
                pass
            await anyio.sleep(0.2)
    stack.kill(name)
    assert os.getpid() != pid
