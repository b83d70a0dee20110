"""What clients send and see, through real processes: the model's own values, arguments without effect, clients that leave, the
access log, and one meaning for each metric."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import anyio
import pytest
import pytest_asyncio

from tests.e2e.stack import Stack
from tests.e2e.tiny import save_tokenizer
from tests.fixtures.nats import LocalNatsServer
from tests.models.oracles import build, save

MODEL = "authored"
PROMPT = {"prompt": "ABCDEF", "max_tokens": 32}
STRICT, AUTHORED = "gateway-strict", "gateway-0"

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """Two gateways of one model whose authors recommend greedy decoding; the strict one does not ask them."""
    folder = tmp_path_factory.mktemp("requests")
    model = folder / MODEL
    save(build("llama"), model)
    save_tokenizer(model)
    (model / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 0.6, "top_k": 1}))
    server = LocalNatsServer(folder / "nats")
    server.start()
    try:
        engine = ("--dtype", "float32", "--num-blocks", "60")
        async with Stack(server.url, folder, flags=("--model", str(model)), engine_flags=engine) as stack:
            await stack.start("gateway", "--log-format", "json")
            await stack.start("gateway", "--generation-config", "none", "--strict", name=STRICT)
            await stack.start("decode")
            await stack.start("prefill")
            await stack.ready()
            yield stack
    finally:
        server.stop()


async def post(stack: Stack, body: dict[str, Any], *, gateway: str = AUTHORED) -> Any:
    return await stack.client.post(f"{stack.url(gateway)}/v1/completions", json=body)


async def text(stack: Stack, gateway: str, **more: Any) -> str:
    return (await post(stack, {**PROMPT, **more}, gateway=gateway)).json()["choices"][0]["text"]


async def page(stack: Stack, name: str = AUTHORED) -> str:
    return (await stack.client.get(f"{stack.url(name)}/metrics")).text


def answered(stack: Stack) -> list[dict[str, Any]]:
    """The access log, but for canaries."""
    lines: list[dict[str, Any]] = []
    for line in stack.log(AUTHORED).splitlines():
        with suppress(json.JSONDecodeError):
            lines.append(json.loads(line))
    return [line for line in lines if line.get("event") == "request_answered"]


async def test_a_request_without_values_gets_the_authors_unless_told_otherwise(stack: Stack) -> None:
    greedy = await text(stack, AUTHORED, temperature=0)
    assert {await text(stack, AUTHORED) for _ in range(3)} == {greedy}, "their top_k is 1"
    assert await text(stack, AUTHORED, top_k=-1, temperature=1) != greedy, "what the client says comes first"
    assert len({await text(stack, STRICT) for _ in range(3)}) == 3


async def test_what_has_no_effect_is_named_or_with_strict_refused(stack: Stack) -> None:
    body = {**PROMPT, "user": "ann", "temprature": 1, "seed": -1}
    answer = await post(stack, body)
    assert answer.status_code == 200
    assert answer.headers["warning"] == '299 penstock "ignored: user, temprature (did you mean temperature?)"'
    counters = await page(stack)
    assert 'penstock_ignored_arguments_total{argument="user"} 1.0' in counters
    assert 'penstock_ignored_arguments_total{argument="unknown"} 1.0' in counters
    refused = await post(stack, body, gateway=STRICT)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "user")
    for gateway in (AUTHORED, STRICT):
        changes = await post(stack, {**PROMPT, "guided_regex": "a+"}, gateway=gateway)
        assert (changes.status_code, changes.json()["error"]["param"]) == (400, "guided_regex")


async def test_one_line_in_the_access_log_without_a_word_of_the_text(stack: Stack) -> None:
    before = len(answered(stack))
    said = await text(stack, AUTHORED)
    with anyio.fail_after(5):
        while len(answered(stack)) == before:
            await anyio.sleep(0.02)
    [line] = answered(stack)[before:]
    assert (line["status"], line["finish"], line["completion_tokens"], line["model"]) == (200, "length", 32, MODEL)
    assert line["ttft_s"] <= line["duration_s"]
    assert said not in json.dumps(line) and PROMPT["prompt"] not in json.dumps(line)


@pytest.mark.parametrize("n", [1, 4])
async def test_a_client_that_leaves_a_stream_is_no_error_of_ours(stack: Stack, n: int) -> None:
    before = len(answered(stack))
    body = {**PROMPT, "n": n, "max_tokens": 400, "ignore_eos": True, "stream": True}
    for _ in range(5):
        async with stack.client.stream("POST", f"{stack.url()}/v1/completions", json=body) as answer:
            async for _ in answer.aiter_raw():
                break
    with anyio.fail_after(10):
        while len(answered(stack)) < before + 5:
            await anyio.sleep(0.02)
    assert {line["code"] for line in answered(stack)[before:]} == {"client_closed_request"}
    assert "internal_error" not in await page(stack)
    assert "Traceback" not in stack.log(AUTHORED)
    await stack.clean()


@pytest.mark.parametrize("stream", [True, False])
async def test_http_1_0_gets_no_chunks(stack: Stack, stream: bool) -> None:
    body = json.dumps({**PROMPT, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    async with await anyio.connect_tcp("127.0.0.1", stack.presence(AUTHORED).http_port) as client:
        await client.send(head.encode() + body)
        read = b""
        with anyio.fail_after(10), suppress(anyio.EndOfStream):
            while True:
                read += await client.receive()
    header, _, rest = read.partition(b"\r\n\r\n")
    assert b" 200 " in header and b"transfer-encoding" not in header.lower()
    assert rest.endswith(b"data: [DONE]\n\n") if stream else json.loads(rest)["usage"]["completion_tokens"] == 32


async def test_a_vllm_metric_is_a_gateways_or_a_workers(stack: Stack) -> None:
    await text(stack, AUTHORED)
    pages = {name: await page(stack, name) for name in (AUTHORED, "decode-0", "prefill-0")}
    names = {name: set(re.findall(r"^# TYPE (vllm:\S+) ", content, re.MULTILINE)) for name, content in pages.items()}
    assert "vllm:request_success_total" in names[AUTHORED] and "vllm:kv_cache_usage_perc" in names["decode-0"]
    assert not names[AUTHORED] & (names["decode-0"] | names["prefill-0"])
    for content in pages.values():
        samples = [line for line in content.splitlines() if line.startswith("vllm:")]
        assert samples and all(f'model_name="{MODEL}"' in line for line in samples)
