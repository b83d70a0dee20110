"""Files and batches as openai-python uses them, on real processes with the simulated engine."""

from __future__ import annotations

import json
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import nats
import openai
import pytest
import pytest_asyncio
from nats.js.errors import APIError, BadRequestError
from openai import AsyncOpenAI
from openai.types import Batch

from common.models.source import DEFAULT_MODEL
from common.protocol import headers, subjects
from common.runtime.api_keys import lines_for
from tests.chaos.site import SIMULATED_ENGINE
from tests.e2e.stack import Stack
from tests.e2e.test_streams import jetstream
from tests.fixtures.nats import LocalNatsServer

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "/v1/chat/completions"


def line(number: int, *, url: str = CHAT, **body: Any) -> dict[str, Any]:
    asked = {"prompt": "hi"} if url == "/v1/completions" else {"messages": [{"role": "user", "content": f"line {number}"}]}
    return {
        "custom_id": f"line-{number}",
        "method": "POST",
        "url": url,
        "body": {"model": DEFAULT_MODEL, "max_tokens": 4, "ignore_eos": True, **asked, **body},
    }


def jsonl(lines: Sequence[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


class Site:
    def __init__(self, stack: Stack, client: AsyncOpenAI) -> None:
        self.stack = stack
        self.client = client

    async def batch(self, content: bytes, *, endpoint: Any = CHAT, window: Any = "24h") -> Batch:
        file = await self.client.files.create(file=("input.jsonl", content), purpose="batch")
        assert file.bytes == len(content) and file.filename == "input.jsonl" and file.purpose == "batch"
        return await self.client.batches.create(
            input_file_id=file.id, endpoint=endpoint, completion_window=window, metadata={"of": "a test"}
        )

    async def until(self, batch: Batch, done: Callable[[Batch], bool], within_s: float = 60) -> Batch:
        with anyio.fail_after(within_s):
            while not done(batch):
                await anyio.sleep(0.1)
                batch = await self.client.batches.retrieve(batch.id)
        return batch

    async def ended(self, batch: Batch, within_s: float = 60) -> Batch:
        return await self.until(batch, lambda now: now.status in ("completed", "failed", "expired", "cancelled"), within_s)

    async def lines_of(self, file: str | None) -> list[dict[str, Any]]:
        if file is None:
            return []
        content = await self.client.files.content(file)
        return [json.loads(each) for each in content.text.splitlines()]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    directory: Path = tmp_path_factory.mktemp("batches")
    server = LocalNatsServer(directory / "nats", more_config=jetstream(directory / "jetstream"))
    server.start()
    try:
        async with Stack(server.url, directory, engine_flags=SIMULATED_ENGINE) as stack:
            await stack.start("gateway", "--batch-max-lines", "400", "--max-file-bytes", "1000000")
            await stack.start("decode")
            await stack.ready()
            async with AsyncOpenAI(base_url=f"{stack.url()}/v1", api_key="-", max_retries=0) as client:
                yield Site(stack, client)
    finally:
        server.stop()


async def test_a_batch_gives_each_line_one_result(site: Site) -> None:
    bad = [line(100, temperature=9), line(101, messages=[]), line(102, stream=True)]
    batch = await site.batch(jsonl([*(line(number) for number in range(60)), *bad]))
    assert batch.status == "validating" and batch.metadata == {"of": "a test"}
    batch = await site.ended(batch)
    assert batch.status == "completed", batch.errors
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (63, 60, 3)
    output = await site.lines_of(batch.output_file_id)
    assert sorted(each["custom_id"] for each in output) == sorted(f"line-{number}" for number in range(60))
    for each in output:
        assert each["error"] is None and each["response"]["status_code"] == 200
        body = each["response"]["body"]
        assert body["object"] == "chat.completion" and body["usage"]["completion_tokens"] == 4
    failed = {each["custom_id"]: each["response"] for each in await site.lines_of(batch.error_file_id)}
    assert {id: response["body"]["error"]["param"] for id, response in failed.items()} == {
        "line-100": "temperature",
        "line-101": "messages",
        "line-102": "stream",
    }
    assert all(response["status_code"] == 400 for response in failed.values())
    assert batch.in_progress_at and batch.finalizing_at and batch.completed_at and batch.expires_at


async def test_completions_are_an_endpoint_too(site: Site) -> None:
    batch = await site.ended(await site.batch(jsonl([line(1, url="/v1/completions")]), endpoint="/v1/completions"))
    (only,) = await site.lines_of(batch.output_file_id)
    assert only["response"]["body"]["object"] == "text_completion"


@pytest.mark.parametrize(
    ("content", "code", "number"),
    [
        (b"{\n", "invalid_json_line", 1),
        (jsonl([line(1), line(2), line(1)]), "duplicate_custom_id", 3),
        (jsonl([line(1)]) + b'{"custom_id": "x", "method": "POST", "body": {}}', "missing_required_parameter", 2),
        (jsonl([line(1)]) + b'{"custom_id": "x", "url": "/v1/completions", "body": {}}', "missing_required_parameter", 2),
        (jsonl([line(1, url="/v1/completions")]), "invalid_url", 1),
        (jsonl([{**line(1), "method": "GET"}]), "invalid_method", 1),
        (jsonl([line(1, model="nobody")]), "model_not_found", 1),
        (jsonl([line(number) for number in range(401)]), "too_many_tasks", None),
        (b"\n \n", "empty_file", None),
        (b"x" * 999_000, "invalid_json_line", 1),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_file_that_is_no_batch_fails_with_openais_codes(
    site: Site, content: bytes, code: str, number: int | None
) -> None:
    batch = await site.ended(await site.batch(content))
    assert batch.status == "failed" and batch.failed_at and batch.output_file_id is None
    assert batch.errors is not None and batch.errors.data
    assert [(error.code, error.line) for error in batch.errors.data] == [(code, number)]


async def test_what_is_wrong_with_a_request_is_said_at_once(site: Site) -> None:
    client = site.client
    with pytest.raises(openai.APIStatusError) as large:
        await client.files.create(file=("x.jsonl", bytes(1_100_000)), purpose="batch")
    assert large.value.status_code == 413
    with pytest.raises(openai.BadRequestError, match="purpose"):
        await client.files.create(file=("x.jsonl", b"{}"), purpose="fine-tune")
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.batches.create(input_file_id="file-abc", endpoint=CHAT, completion_window="24h")
    assert unknown.value.code == "file_not_found"
    with pytest.raises(openai.BadRequestError, match="endpoint"):
        await client.batches.create(input_file_id="file-abc", endpoint="/v1/moderations", completion_window="24h")
    window: Any = "soon"
    with pytest.raises(openai.BadRequestError, match="completion_window"):
        await client.batches.create(input_file_id="file-abc", endpoint=CHAT, completion_window=window)
    for ask in (client.files.retrieve, client.files.delete, client.files.content):
        with pytest.raises(openai.NotFoundError):
            await ask("file-abc")
    for ask in (client.batches.retrieve, client.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            await ask("batch_abc")
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve("file-*")


async def test_files_are_listed_read_and_deleted(site: Site) -> None:
    content = b"".join(b'{"n": %d}\n' % number for number in range(60_000))
    made = [await site.client.files.create(file=(f"{number}.jsonl", content), purpose="batch") for number in range(3)]
    assert (await site.client.files.content(made[0].id)).content == content
    listed = [file.id async for file in site.client.files.list(limit=2, purpose="batch")]
    assert [id for id in listed if id in {file.id for file in made}] == [file.id for file in reversed(made)]
    first = await site.client.files.list(limit=1, order="asc")
    assert first.has_more and first.data[0].created_at <= made[0].created_at
    for file in made:
        assert (await site.client.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await site.client.files.retrieve(file.id)


async def test_a_cancelled_batch_ends_with_one_outcome_for_each_line(site: Site) -> None:
    batch = await site.batch(jsonl([line(number, max_tokens=100) for number in range(300)]))
    batch = await site.until(batch, lambda now: bool(now.request_counts and now.request_counts.completed))
    assert batch.status == "in_progress"
    cancelled = await site.client.batches.cancel(batch.id)
    assert cancelled.status == "cancelling"
    batch = await site.ended(batch)
    assert batch.status == "cancelled" and batch.cancelling_at and batch.cancelled_at
    output, failed = await site.lines_of(batch.output_file_id), await site.lines_of(batch.error_file_id)
    assert sorted(each["custom_id"] for each in output + failed) == sorted(f"line-{number}" for number in range(300))
    assert failed and all(each["error"]["code"] == "batch_cancelled" for each in failed)
    with pytest.raises(openai.ConflictError) as late:
        await site.client.batches.cancel(batch.id)
    assert late.value.code == "batch_ended"


async def test_a_batch_whose_window_closes_expires(site: Site) -> None:
    batch = await site.batch(jsonl([line(number, max_tokens=300) for number in range(300)]), window="1s")
    batch = await site.ended(batch)
    assert batch.status == "expired" and batch.expired_at
    failed = await site.lines_of(batch.error_file_id)
    assert failed and {each["error"]["code"] for each in failed} == {"batch_expired"}
    assert len(failed) + len(await site.lines_of(batch.output_file_id)) == 300


async def test_batches_are_listed_the_newest_first(site: Site) -> None:
    batches = [await site.batch(jsonl([line(number)])) for number in range(3)]
    listed = [batch.id async for batch in site.client.batches.list(limit=1)]
    assert listed[:1] == [batches[-1].id] and set(listed) >= {batch.id for batch in batches}
    for batch in batches:
        await site.ended(batch)


async def test_a_line_over_nats_is_kept_run_and_found(site: Site) -> None:
    connection = await nats.connect(site.stack.nats_url)
    try:
        publish = connection.jetstream().publish
        subject = subjects.batch(subjects.slug(DEFAULT_MODEL))
        fields = {headers.REQUEST_ID: "my-line"}
        acknowledged = await publish(subject, json.dumps(line(7)).encode(), headers=dict(fields))
        assert acknowledged.stream == subjects.LINES and acknowledged.seq > 0
        with anyio.fail_after(30):
            while True:
                found = await connection.request(subjects.result("my-line"))
                if headers.ERROR_CODE not in (found.headers or {}):
                    break
                assert (found.headers or {})[headers.ERROR_CODE] == "result_pending"
                await anyio.sleep(0.05)
        result = json.loads(found.data)
        assert result["custom_id"] == "line-7" and result["response"]["status_code"] == 200
        assert (await publish(subject, json.dumps(line(7)).encode(), headers=dict(fields))).duplicate
        assert json.loads((await connection.request(subjects.result("my-line"))).data) == result
        named = await connection.request(subject, json.dumps(line(8)).encode())
        assert (named.headers or {})[headers.REQUEST_ID].startswith("line-")
        for wrong in (b"{", json.dumps(line(1, model="nobody")).encode()):
            with pytest.raises(BadRequestError if wrong == b"{" else APIError):
                await publish(subject, wrong)
    finally:
        await connection.close()


async def test_a_tenants_batch_is_its_own(site: Site, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(lines_for("pk-acme", "acme", known=()) + lines_for("pk-zoo", "zoo", known=()))
    gateway = await site.stack.start("gateway", "--api-keys", str(keys))
    await site.stack.ready(gateway)
    try:
        url = f"{site.stack.url(gateway)}/v1"
        async with AsyncOpenAI(base_url=url, api_key="pk-acme") as acme, AsyncOpenAI(base_url=url, api_key="pk-zoo") as zoo:
            own = Site(site.stack, acme)
            batch = await own.ended(await own.batch(jsonl([line(number) for number in range(4)])))
            assert batch.request_counts and batch.request_counts.completed == 4
            assert len(await own.lines_of(batch.output_file_id)) == 4
            for other in (zoo, site.client):
                assert batch.id not in [found.id async for found in other.batches.list()]
                with pytest.raises(openai.NotFoundError):
                    await other.batches.retrieve(batch.id)
                with pytest.raises(openai.NotFoundError):
                    await other.files.content(batch.output_file_id or "")
    finally:
        site.stack.send_signal(gateway, signal.SIGTERM)
        await site.stack.ended(gateway)


async def test_progress_is_in_the_metrics(site: Site) -> None:
    counted = {"penstock_batch_lines_running": 1.0}
    with anyio.fail_after(30):  # lines of batches that were ended may run to their end
        while counted["penstock_batch_lines_running"] or counted["penstock_batches_kept"]:
            page = (await site.stack.client.get(f"{site.stack.url()}/metrics")).text
            counted = {text.split()[0]: float(text.split()[1]) for text in page.splitlines() if "penstock_batch" in text[:15]}
    assert counted['penstock_batch_lines_total{outcome="completed"}'] > 60
    assert counted['penstock_batch_lines_total{outcome="failed"}'] == 3
