"""One line in the access log and one count for each request, the same over HTTP and NATS."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from common.protocol.errors import NoWorkers
from common.runtime import logs
from tests.actors.both_edges import Edge, Kind, ask, body_of, everywhere, nats_edge, says
from tests.actors.edge import EOS, AsgiClient, ScriptedCore, app_of, ids, until
from tests.actors.http_client import CHAT, MODEL, client, config


class Records(logging.Handler):
    """`answered`: the access log's lines. `others`: warnings and errors of everybody else."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.answered: list[dict[str, Any]] = []
        self.others: list[str] = []

    def info(self, line: str) -> None:
        self.answered.append(json.loads(line))

    def emit(self, record: logging.LogRecord) -> None:
        self.others.append(str(record.msg))


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Iterator[Records]:
    handler = Records()
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    monkeypatch.setattr(logs._Stderr, "info", lambda _, line: handler.info(line))
    monkeypatch.setattr(logs, "_fast_format", "json")
    yield handler
    root.removeHandler(handler)
    root.setLevel(level)


@everywhere
async def test_one_line_in_the_log_for_each_answered_request(
    records: Records, edge: Edge, kind: Kind, stream: bool, n: int
) -> None:
    core = ScriptedCore(lambda stream: stream.give([*ids("secret"), EOS], finish="stop", cached=2))
    prompt = {"messages": [{"role": "user", "content": "private"}]} if kind == "chat" else {"prompt": "private"}
    await ask(edge, core, kind, {**prompt, "stream": stream, "n": n})
    [line] = records.answered
    assert line["request"].startswith("chatcmpl-" if kind == "chat" else "cmpl-")
    assert line["client_id"]
    expected = {"edge": edge, "status": 200, "code": "", "finish": "stop", "model": MODEL, "stream": stream, "choices": n}
    assert {name: line[name] for name in expected} == expected
    assert (
        line["path"]
        == {
            ("http", "chat"): "/v1/chat/completions",
            ("http", "completion"): "/v1/completions",
            ("nats", "chat"): "penstock.v1.chat.small-model-1",
            ("nats", "completion"): "penstock.v1.completions.small-model-1",
        }[edge, kind]
    )
    assert (line["prompt_tokens"], line["completion_tokens"]) == (len(core.streams[0].request.prompt), 7 * n)
    assert line["cached_tokens"] == 2
    assert 0 <= line["ttft_s"] <= line["duration_s"]
    assert "secret" not in str(line) and "private" not in str(line)
    page = core.metrics.render().decode()
    assert f'vllm:request_success_total{{finished_reason="stop",model_name="{MODEL}"}} 1.0' in page
    errors = [line for line in page.splitlines() if line.startswith("penstock_request_errors_total{")]
    assert len(errors) == 4 and all(line.endswith(" 0.0") for line in errors)


@everywhere
async def test_refused_and_failed_requests_are_logged_and_are_no_successes(
    records: Records, edge: Edge, kind: Kind, stream: bool, n: int
) -> None:
    core = ScriptedCore(lambda stream: stream.give([], error=NoWorkers("none")))
    await ask(edge, core, kind, body_of(kind, stream, n, temperature=-1))
    await ask(edge, core, kind, body_of(kind, stream, n))
    refused, failed = records.answered
    assert (refused["status"], refused["code"]) == (400, "invalid_parameter") and "finish" not in refused
    assert (failed["status"], failed["code"], failed["finish"]) == (503, "no_workers", "")
    page = core.metrics.render().decode()
    assert "vllm:request_success_total{" not in page
    for code in ("invalid_parameter", "no_workers"):
        assert f'penstock_request_errors_total{{code="{code}",edge="{edge}"}} 1.0' in page


async def test_a_line_for_people_says_the_same(records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(logs, "_fast_format", "console")
    monkeypatch.setattr(logs._Stderr, "info", lambda _, line: lines.append(line))
    await ask("http", ScriptedCore(says("ok")), "chat", body_of("chat", False, 1))
    [line] = lines
    assert " [info     ] request_answered " in line and " edge=http " in line and line.endswith("\n")
    logging.getLogger().setLevel(logging.WARNING)
    await ask("http", ScriptedCore(says("ok")), "chat", body_of("chat", False, 1))
    assert len(lines) == 1, "not below the level that is logged"


async def test_the_access_log_can_be_turned_off(records: Records) -> None:
    for edge in ("http", "nats"):
        await ask(edge, ScriptedCore(says("ok")), "chat", body_of("chat", False, 1), access_log=False)
    assert not records.answered


async def test_a_client_s_own_id_is_in_the_log(records: Records) -> None:
    core = ScriptedCore(says("ok"))
    async with client(core) as http:
        await http.post(CHAT, json=body_of("chat", False, 1), headers={"x-request-id": "mine-1"})
    async with nats_edge(core) as nats:
        await nats.ask(body_of("chat", True, 1), Penstock_Request_Id="mine-2")
        await nats.final()
    await until(lambda: len(records.answered) == 2)
    assert [line["client_id"] for line in records.answered] == ["mine-1", "mine-2"]


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize("tokens_before", [0, 1])
async def test_a_client_that_leaves_is_no_fault_of_ours(
    records: Records, kind: Kind, stream: bool, n: int, tokens_before: int
) -> None:
    core = ScriptedCore()
    path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
    request = AsgiClient(app_of(core, config()), path, body_of(kind, stream, n))
    async with anyio.create_task_group() as group:
        group.start_soon(request.run)
        await core.nth(n - 1)
        for started in core.streams[: n if tokens_before else 0]:
            started.say("a")
        await anyio.sleep(0.01)
        request.hang_up()
        await until(lambda: not core.live and request.done)
    [line] = records.answered
    assert (line["status"], line["code"]) == (499, "client_closed_request")
    assert not records.others, "nothing is logged as a failure"
    page = core.metrics.render().decode()
    assert "internal_error" not in page and "vllm:request_success_total{" not in page
    assert 'penstock_request_errors_total{code="client_closed_request",edge="http"} 1.0' in page


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_nats_client_that_cancels_is_no_fault_of_ours(records: Records, stream: bool, n: int) -> None:
    core = ScriptedCore()
    async with nats_edge(core) as nats:
        await nats.ask(body_of("chat", stream, n), Penstock_Request_Id="mine")
        await core.nth(n - 1)
        core.streams[0].say("a")
        await anyio.sleep(0.01)
        await nats.cancel("mine")
        await nats.final()
        await until(lambda: not core.live)
    [line] = records.answered
    assert line["code"] == "cancelled" and not records.others
