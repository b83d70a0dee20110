"""What becomes of KV is seen, on real processes: in `/metrics`, in `penstock status`, in `penstock explain` and in spans."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from common.cli.explain import ask
from common.models.source import ModelFiles
from common.protocol.explain_messages import ExplainedEvent, Explanation
from common.protocol.trace_context import traceparent
from tests.e2e.stack import ROOT, Reply, Stack
from tests.fixtures.collector import Collector, running_collector

MODEL = "smollm2-135m-instruct"
PROMPT = [number % 900 + 5 for number in range(256)]
BLOCK_TOKENS = 16

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with running_collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def environment(collector: Collector) -> dict[str, str]:
    return {"OTEL_BSP_SCHEDULE_DELAY": "100", "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}


@pytest.fixture(scope="module")
def kv_disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk") / "kv"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(
    nats_server: str,
    smollm2: ModelFiles,
    tmp_path_factory: pytest.TempPathFactory,
    environment: dict[str, str],
    kv_disk: Path,
) -> AsyncIterator[Stack]:
    """A gateway, 1 prefill and 2 decode workers, a kvstore with a disk, a draft worker; every prompt is handed off."""
    engine = ("--engine", "simulated", "--profile", "h200-llama-8b", "--kv-cache-mb", "64")
    directory = tmp_path_factory.mktemp("kv-seen")
    async with Stack(nats_server, directory, flags=("--model", smollm2.name), engine_flags=engine) as stack:
        await stack.start("gateway", "--direct-max-tokens", "-1", environment=environment)
        for role in ("prefill", "decode", "decode", "draft"):
            await stack.start(role, environment=environment)
        await start_kvstore(stack, kv_disk, environment)
        await stack.ready()
        await anyio.sleep(0.5)  # until workers have heard of the kvstore
        yield stack


async def start_kvstore(stack: Stack, kv_disk: Path, environment: dict[str, str]) -> None:
    name = await stack.start("kvstore", "--kv-disk", str(kv_disk), "--kv-disk-gb", "1", environment=environment)
    await stack.ready(name)


async def complete(stack: Stack, prompt: list[int], **more: Any) -> str:
    """Return the request's id."""
    headers = more.pop("headers", {})
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": True, **more}
    answer = await stack.client.post(f"{stack.url()}/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


async def explained(stack: Stack, id: str) -> Explanation:
    (one,) = (await ask(stack.bus, id)).requests
    return one


def events(one: Explanation, service: str, name: str) -> list[ExplainedEvent]:
    return [event for event in one.events if (event.service, event.event) == (service, name)]


async def measured(stack: Stack, worker: str) -> dict[tuple[str, ...], float]:
    """Every sample of a worker's metrics, by its name and the values of its labels (by their names, without the model)."""
    text = (await stack.client.get(f"{stack.url(worker)}/metrics")).text
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name != "model_name"]
            found[sample.name.removeprefix("penstock_"), *labels] = sample.value
    return found


async def penstock(stack: Stack, *words: str) -> str:
    command = [sys.executable, "-m", "common.cli", *words, "--nats-url", stack.nats_url]
    ended = await anyio.to_thread.run_sync(
        lambda: subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    )
    return ended.stdout


@pytest.mark.slow
async def test_a_hand_off_is_bytes_that_came_and_nothing_computed_again(stack: Stack) -> None:
    before = {name: await measured(stack, name) for name in ("decode-0", "decode-1")}
    one = await explained(stack, await complete(stack, PROMPT))
    (pulled,) = events(one, "decode", "KV received")
    assert pulled.facts["received_tokens"] == len(PROMPT) and pulled.facts["recomputed_tokens"] == 0
    after = await measured(stack, pulled.worker)

    def grown(*key: str) -> float:
        return after[key] - before[pulled.worker].get(key, 0.0)

    assert grown("kv_received_tokens_total") == len(PROMPT)
    assert grown("kv_received_bytes_total") == grown("kv_transfer_bytes_total", "read", "shm") == pulled.facts["received_bytes"]
    assert grown("kv_transfer_seconds_count", "read", "shm") == grown("kv_handoffs_total", "ok") == 1
    assert not any(name[0] == "kv_recomputed_tokens_total" and value for name, value in after.items())


async def test_prefixes_are_told_by_the_tier_that_had_them(stack: Stack, kv_disk: Path, environment: dict[str, str]) -> None:
    """In the worker's own cache; in a kvstore's memory, for a new worker; on its disk, for a new kvstore and a new worker."""
    prompt = [number % 700 + 9 for number in range(256)]
    first = await complete(stack, prompt)
    own = (await measured(stack, "prefill-0"))["prefix_hit_tokens_total", "own"]
    await complete(stack, prompt)
    assert (await measured(stack, "prefill-0"))["prefix_hit_tokens_total", "own"] - own >= 15 * BLOCK_TOKENS
    with anyio.fail_after(10):
        while not (written := events(await explained(stack, first), "kvstore", "write-back")):
            await anyio.sleep(0.05)
    (stored, *_) = events(await explained(stack, first), "kvstore", "store")
    assert stored.facts["stored_blocks"] == 16 == sum(int(event.facts["written_blocks"]) for event in written)
    (missed, *_) = events(await explained(stack, first), "kvstore", "lookup")
    assert (missed.facts["for"], missed.facts["memory_hit_blocks"], missed.facts["disk_hit_blocks"]) == ("prefill-0", 0, 0)

    for tier, restarted in (("kvstore_memory", ()), ("kvstore_disk", ("kvstore-0",))):
        prefill = next(name for name in stack.processes if name.startswith("prefill"))
        for name in (prefill, *restarted):
            stack.kill(name)
        if restarted:
            await start_kvstore(stack, kv_disk, environment)
        new = await stack.start("prefill", environment=environment)
        await stack.ready(new)
        await anyio.sleep(1)  # until it has heard of the kvstore, and the gateway has given the old one up
        one = await explained(stack, await complete(stack, prompt))
        found = await measured(stack, new)
        assert found["prefix_hit_tokens_total", tier] >= 15 * BLOCK_TOKENS
        assert found["prefix_lookup_tokens_total",] >= 256
        assert found["kv_transfer_bytes_total", "read", "kvstore"] > 0
        (copied,) = events(one, "prefill", "kvstore")
        lookups = events(one, "kvstore", "lookup")
        blocks = int(copied.facts["kvstore_hit_tokens"]) // BLOCK_TOKENS
        in_disk = tier == "kvstore_disk"
        assert int(copied.facts["received_bytes"]) > 0
        assert copied.facts.get("disk_hit_tokens", 0) == in_disk * blocks * BLOCK_TOKENS
        assert sum(int(each.facts["disk_hit_blocks" if in_disk else "memory_hit_blocks"]) for each in lookups) >= 1
        if in_disk:
            assert sum(int(each.facts["read_blocks"]) for each in events(one, "kvstore", "disk read")) >= blocks
            assert (await measured(stack, "kvstore-1"))["kv_transfer_bytes_total", "read", "disk"] > 0


async def test_a_draft_worker_tells_what_it_did_for_a_request(stack: Stack) -> None:
    one = await explained(stack, await complete(stack, [5, 6, 7, 8] * 20, max_tokens=60))
    (drafted,) = events(one, "draft", "drafting")
    (told,) = events(one, "decode", "speculation")
    assert drafted.facts["for"] == told.worker and int(drafted.facts["updates"]) >= 1
    assert int(told.facts["updates_sent"]) >= int(drafted.facts["updates"])
    assert int(drafted.facts["proposals_sent"]) >= int(told.facts["proposals_received"]) >= int(told.facts["late_proposals"])


async def test_spans_of_kvstore_and_draft_worker_are_in_the_requests_trace(stack: Stack, collector: Collector) -> None:
    trace = "5e" * 16
    prompt = [3, 4] * 40
    await complete(stack, prompt, max_tokens=30, headers={"traceparent": traceparent(trace, "ab" * 8)})

    def spans() -> dict[str, Any]:
        return {span.name: span for span in collector.spans if span.trace == trace}

    with anyio.fail_after(10):
        while not {"kvstore lookup", "draft drafting", "prefill worker", "decode worker"} <= spans().keys():
            await anyio.sleep(0.05)
    found = spans()
    assert (
        found["kvstore lookup"].parent == found["prefill worker"].id and found["kvstore lookup"].service == "penstock-kvstore"
    )
    assert found["draft drafting"].parent == found["decode worker"].id
    assert found["decode worker"].facts["penstock.received_tokens"] == len(prompt)
    assert found["decode worker"].facts["penstock.recomputed_tokens"] == 0
    assert found["pull"].facts["penstock.bytes"] > 0


async def test_what_is_computed_again_after_a_kill_is_seen(stack: Stack) -> None:
    reply, prompt, victim = Reply(), [1, 2, 3] * 20, ""
    stack.client.headers["x-request-id"] = "again"
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: stack.complete(prompt, reply=reply, max_tokens=400, ignore_eos=True))
        with anyio.fail_after(30):
            while len(reply.times) < 3:
                await anyio.sleep(0.01)
        victim = str(next(e.facts["decode"] for e in (await explained(stack, "again")).events if e.event == "routed"))
        stack.kill(victim)
    del stack.client.headers["x-request-id"]
    assert reply.error is None and reply.finish == "length"
    one = await explained(stack, "again")
    again = [event for event in one.events if event.attempt == 2 and event.facts.get("recomputed_tokens")]
    assert again and again[0].service == "prefill", "the prompt and what was generated so far went to a prefill worker"
    prefill = again[0].worker
    counted = (await measured(stack, prefill))["kv_recomputed_tokens_total", "moved"]
    assert counted == again[0].facts["recomputed_tokens"] and counted > 0
    (pulled,) = (event for event in events(one, "decode", "KV received") if event.attempt == 2)
    assert pulled.facts["recomputed_tokens"] == 0 and int(pulled.facts["received_tokens"]) > len(prompt)


async def test_status_says_it_within_eighty_columns(stack: Stack) -> None:
    await anyio.sleep(0.5)
    said = await penstock(stack, "status")
    lines = said.splitlines()
    assert max(map(len, lines)) <= 80, said
    assert any(line.startswith("prefixes: ") and "tokens found (own" in line for line in lines), said
    assert any(line.startswith("hand-off: ") and "recomputed" in line for line in lines), said
    assert any("shm read" in line and "GB/s" in line for line in lines), said
    told = {beat["worker"]["id"]: beat["traffic"] for beat in json.loads(await penstock(stack, "status", "--json"))}
    (decode,) = (traffic for name, traffic in told.items() if name.startswith("decode"))
    (path,) = (path for path in decode["paths"] if (path["path"], path["operation"]) == ("shm", "read"))
    assert path["bytes"] == decode["received_bytes"] > 0 and path["failures"] == 0
