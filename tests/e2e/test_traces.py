"""Traces of real processes, as a collector receives them: one request is one tree over gateway, prefill and decode."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import pytest_asyncio

from common.models.source import ModelFiles
from common.protocol import headers, subjects
from common.protocol.trace_context import span_id_of, trace_id_of, traceparent
from common.runtime.nats_bus import connect
from tests.e2e.stack import Stack
from tests.fixtures.collector import Collector, Received, running_collector

SECRET = "the emperor's new clothes"
SERVER = 2
EXPORT = {"OTEL_BSP_SCHEDULE_DELAY": "100"}

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with running_collector() as collector:
        yield collector


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(
    nats_server: str, smollm2: ModelFiles, collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stack]:
    engine = ("--engine", "simulated", "--profile", "h200-llama-8b", "--kv-cache-mb", "64")
    environment = {**EXPORT, "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_EXPORTER_OTLP_HEADERS": "x-key=s3cret"}
    async with Stack(
        nats_server, tmp_path_factory.mktemp("traces"), flags=("--model", smollm2.name), engine_flags=engine
    ) as stack:
        await stack.start("gateway", "--direct-max-tokens", "-1", "--zero-retention", environment=environment)
        for role in ("prefill", "decode", "decode"):
            await stack.start(role, "--zero-retention", environment=environment)
        await stack.ready()
        yield stack


@pytest.fixture(autouse=True)
def forget(collector: Collector) -> None:
    collector.spans.clear()


class Tree:
    """The spans of one trace, by who made them."""

    def __init__(self, spans: list[Received], trace: str) -> None:
        self.spans = [span for span in spans if span.trace == trace]
        self.by_id = {span.id: span for span in self.spans}

    def one(self, service: str, name: str) -> Received:
        (found,) = [span for span in self.spans if (span.service, span.name) == (service, name)]
        return found

    def path(self, span: Received) -> list[str]:
        """The names from the root of the trace down to the span."""
        above = self.path(self.by_id[span.parent]) if span.parent in self.by_id else []
        return [*above, span.name]


def is_whole(spans: list[Received], trace: str) -> bool:
    """Whether everybody has sent what belongs to a trace."""
    mine = [span for span in spans if span.trace == trace]
    return any(span.kind == SERVER for span in mine) and {span.service for span in mine} >= {
        "penstock-gateway",
        "penstock-prefill",
        "penstock-decode",
    }


def new_parent() -> str:
    return traceparent(os.urandom(16).hex(), os.urandom(8).hex())


async def post(stack: Stack, **more: str) -> None:
    body = {"model": "smollm2-135m-instruct", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 5}
    body |= {"temperature": 0, "ignore_eos": True}
    answer = await stack.client.post(f"{stack.url()}/v1/chat/completions", json=body, headers=more)
    assert answer.status_code == 200, answer.text


async def collected(collector: Collector, trace: str) -> Tree:
    """The trace, once everybody has sent some of it; what one sends may come in two batches."""
    await anyio.to_thread.run_sync(collector.wait, lambda spans: is_whole(spans, trace))
    await anyio.sleep(1.0)
    return Tree(await anyio.to_thread.run_sync(collector.wait, lambda spans: is_whole(spans, trace)), trace)


async def test_a_request_is_one_tree_below_its_clients_span(stack: Stack, collector: Collector) -> None:
    parent = new_parent()
    await post(stack, traceparent=parent, tracestate="vendor=value")
    tree = await collected(collector, trace_id_of(parent))
    root = tree.one("penstock-gateway", "chat smollm2-135m-instruct")
    assert root.parent == span_id_of(parent) and root.state == "vendor=value" and not root.error
    orphans = [span for span in tree.spans if span.parent not in tree.by_id and span is not root]
    assert orphans == []
    top = root.name
    gateway, prefill, decode = "penstock-gateway", "penstock-prefill", "penstock-decode"
    for service, name, path in [
        (gateway, "queue", [top]),
        (gateway, "attempt", [top]),
        (gateway, "placement", [top, "attempt"]),
        (gateway, "prefill", [top, "attempt"]),
        (gateway, "decode", [top, "attempt"]),
        (prefill, "prefill worker", [top, "attempt"]),
        (prefill, "queue", [top, "attempt", "prefill worker"]),
        (prefill, "chunk", [top, "attempt", "prefill worker"]),
        (prefill, "hand-off", [top, "attempt", "prefill worker"]),
        (decode, "decode worker", [top, "attempt"]),
        (decode, "pull", [top, "attempt", "decode worker"]),
        (decode, "queue", [top, "attempt", "decode worker"]),
        (decode, "first step", [top, "attempt", "decode worker"]),
        (decode, "decode", [top, "attempt", "decode worker"]),
    ]:
        assert tree.path(tree.one(service, name)) == [*path, name]
    for span in tree.spans:
        assert root.began_ns - 5_000_000 <= span.began_ns <= span.ended_ns, span
    placed, pulled = tree.one(gateway, "placement"), tree.one(decode, "pull")
    assert placed.began_ns <= tree.one(prefill, "chunk").began_ns + 5_000_000 < pulled.ended_ns + 5_000_000


async def test_the_root_speaks_genai_and_nobody_speaks_of_the_text(stack: Stack, collector: Collector) -> None:
    parent = new_parent()
    await post(stack, traceparent=parent)
    tree = await collected(collector, trace_id_of(parent))
    root = tree.one("penstock-gateway", "chat smollm2-135m-instruct")
    facts = root.facts
    assert facts["gen_ai.operation.name"] == "chat"
    assert facts["gen_ai.request.model"] == "smollm2-135m-instruct"
    assert facts["gen_ai.usage.output_tokens"] == 5 and facts["gen_ai.usage.input_tokens"] > 10
    assert facts["gen_ai.response.finish_reasons"] == ["length"]
    assert facts["http.response.status_code"] == 200 and facts["url.path"] == "/v1/chat/completions"
    assert 0 < facts["penstock.time_to_first_token_s"] * 1e9 < root.ended_ns - root.began_ns
    worker = tree.one("penstock-prefill", "prefill worker")
    assert worker.facts["penstock.prompt_tokens"] == facts["gen_ai.usage.input_tokens"]
    assert worker.facts["penstock.request.id"] == tree.one("penstock-gateway", "attempt").facts["penstock.request.id"]
    assert worker.resource["service.instance.id"] == "prefill-0" and worker.resource["penstock.role"] == "prefill"
    for word in (SECRET, *SECRET.split()[1:]):
        assert not any(word.encode() in body for body in collector.bodies), word
    assert set(collector.paths) == {"/v1/traces"}
    assert all(sent["x-key"] == "s3cret" for sent in collector.headers)


async def test_without_a_clients_span_there_is_a_new_trace(stack: Stack, collector: Collector) -> None:
    for wrong in ("", "00-zz", "ff-" + "1" * 32 + "-" + "1" * 16 + "-01", "00-" + "0" * 32 + "-" + "1" * 16 + "-01"):
        await post(stack, **({"traceparent": wrong} if wrong else {}))
    roots = await anyio.to_thread.run_sync(
        collector.wait, lambda spans: len([span for span in spans if span.kind == SERVER]) == 4
    )
    traces = {span.trace for span in roots if span.kind == SERVER}
    assert len(traces) == 4 and "1" * 32 not in traces
    assert all(not span.parent for span in roots if span.kind == SERVER)


async def test_what_a_client_did_not_sample_leaves_no_span(stack: Stack, collector: Collector) -> None:
    parent = new_parent()
    await post(stack, traceparent=parent.removesuffix("01") + "00")
    after = new_parent()
    await post(stack, traceparent=after)
    await collected(collector, trace_id_of(after))
    assert not [span for span in collector.spans if span.trace == trace_id_of(parent)]


async def test_a_request_over_nats_goes_on_with_the_trace_of_its_headers(stack: Stack, collector: Collector) -> None:
    parent = new_parent()
    bus = await connect(stack.nats_url, name="traced")
    sent = {headers.TRACEPARENT: parent, headers.TRACESTATE: "vendor=nats"}
    body = b'{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": false}'
    subject = subjects.chat("smollm2-135m-instruct")
    reply = await bus.request(subject, body, timeout_s=20, headers=sent)
    assert reply.headers[headers.FINAL] == "1"
    await bus.close()
    tree = await collected(collector, trace_id_of(parent))
    root = tree.one("penstock-gateway", "chat smollm2-135m-instruct")
    assert root.parent == span_id_of(parent) and root.state == "vendor=nats"
    assert root.facts["messaging.system"] == "nats" and root.facts["messaging.destination.name"] == subject


async def test_a_mistake_is_a_span_with_its_code(stack: Stack, collector: Collector) -> None:
    parent = new_parent()
    answer = await stack.client.post(
        f"{stack.url()}/v1/completions", json={"model": "gpt-5", "prompt": SECRET}, headers={"traceparent": parent}
    )
    assert answer.status_code == 404
    spans = await anyio.to_thread.run_sync(
        collector.wait, lambda spans: [span for span in spans if span.trace == trace_id_of(parent)]
    )
    (root,) = [span for span in spans if span.trace == trace_id_of(parent)]
    assert root.error and root.facts["error.type"] == "model_not_found"
    assert root.facts["http.response.status_code"] == 404


async def test_each_choice_is_a_request_of_its_own_below_the_same_root(stack: Stack, collector: Collector) -> None:
    parent = new_parent()
    body: dict[str, Any] = {"model": "smollm2-135m-instruct", "prompt": list(range(5, 40)), "max_tokens": 3, "n": 2}
    answer = await stack.client.post(f"{stack.url()}/v1/completions", json=body, headers={"traceparent": parent})
    assert answer.status_code == 200
    tree = await collected(collector, trace_id_of(parent))
    root = tree.one("penstock-gateway", "text_completion smollm2-135m-instruct")
    attempts = [span for span in tree.spans if span.name == "attempt"]
    assert [span.parent for span in attempts] == [root.id] * 2 and len({span.id for span in attempts}) == 2
    assert len(root.facts["gen_ai.response.finish_reasons"]) == 2


@pytest.mark.slow
async def test_a_killed_workers_request_shows_both_attempts(stack: Stack, collector: Collector) -> None:
    parent = new_parent()
    body = {"model": "smollm2-135m-instruct", "prompt": list(range(5, 60)), "max_tokens": 1000, "ignore_eos": True}
    body |= {"stream": True}
    killed = ""
    await stack.clean(within_s=10)
    async with stack.client.stream(
        "POST", f"{stack.url()}/v1/completions", json=body, headers={"traceparent": parent}
    ) as response:
        async for _ in response.aiter_lines():
            if not killed:
                with anyio.fail_after(10):
                    while len(running := [w for w in ("decode-0", "decode-1") if stack.presence(w).running]) != 1:
                        await anyio.sleep(0.02)
                (killed,) = running
                stack.kill(killed)
    tree = await collected(collector, trace_id_of(parent))
    first, second = sorted((span for span in tree.spans if span.name == "attempt"), key=lambda span: span.began_ns)
    assert first.error and first.facts["error.type"] == "worker_lost"
    assert first.facts["penstock.decode.worker"] == killed and first.facts["penstock.attempt"] == 1
    assert not second.error and second.facts["penstock.attempt"] == 2
    assert second.facts["penstock.decode.worker"] not in ("", killed)
    root = tree.one("penstock-gateway", "text_completion smollm2-135m-instruct")
    assert not root.error and root.facts["gen_ai.usage.output_tokens"] == 1000
    queues = [span for span in tree.spans if span.name == "queue" and span.parent == root.id]
    assert [span.facts["penstock.attempt"] for span in sorted(queues, key=lambda span: span.began_ns)] == [1, 2]


@pytest.mark.slow
async def test_a_service_that_ends_flushes_what_it_has(nats_server: str, tmp_path: Path, smollm2: ModelFiles) -> None:
    with running_collector() as collector:
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "60000"}
        environment |= {"OTEL_SERVICE_NAME": "front"}
        engine = ("--engine", "simulated", "--profile", "instant", "--time-scale", "0", "--kv-cache-mb", "64")
        named = ("--model", smollm2.name, "--served-model-name", "flushed")
        async with Stack(nats_server, tmp_path, flags=named, engine_flags=engine) as stack:
            await stack.start("gateway", name="gateway-own", environment=environment)
            await stack.start("decode", name="decode-own")
            await stack.ready("gateway-own", "decode-own")
            assert (await stack.complete([1, 2, 3], gateway="gateway-own", model="flushed", max_tokens=2)).finish == "length"
            assert not collector.spans
            stack.send_signal("gateway-own", 15)
            assert await stack.ended("gateway-own") == 0
        assert {span.service for span in collector.spans} == {"front"}
        assert {span.name for span in collector.spans} >= {"text_completion flushed", "queue", "attempt", "decode"}


@pytest.mark.slow
async def test_a_collector_that_is_away_costs_a_line_and_nothing_else(
    nats_server: str, tmp_path: Path, smollm2: ModelFiles
) -> None:
    environment = {**EXPORT, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    engine = ("--engine", "simulated", "--profile", "instant", "--time-scale", "0", "--kv-cache-mb", "64")
    named = ("--model", smollm2.name, "--served-model-name", "alone")
    async with Stack(nats_server, tmp_path, flags=named, engine_flags=engine) as stack:
        await stack.start("gateway", name="gateway-own", environment=environment)
        await stack.start("decode", name="decode-own")
        await stack.ready("gateway-own", "decode-own")
        with anyio.fail_after(30):
            while "traces_not_exported" not in stack.log("gateway-own"):
                assert (await stack.complete([1, 2, 3], gateway="gateway-own", model="alone", max_tokens=2)).finish == "length"
                await anyio.sleep(0.1)
        page = (await stack.client.get(f"{stack.url('gateway-own')}/metrics")).text
        assert 'penstock_trace_exports_total{outcome="exported"} 0.0' in page
        stack.send_signal("gateway-own", 15)
        with anyio.fail_after(10):
            assert await stack.ended("gateway-own") == 0
        assert stack.log("gateway-own").count("traces_not_exported") == 1
        assert "Traceback" not in stack.log("gateway-own")
