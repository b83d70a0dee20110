"""Scores of prompts and embeddings of a real model, over HTTP, from real processes."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from typing import Any

import anyio
import httpx
import pytest
import pytest_asyncio
import torch

from common.models.source import ModelFiles
from common.protocol import headers, subjects
from common.protocol.handles import Role
from tests.e2e.stack import Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

TEXT = (
    "The harbour lay quiet under a sky the colour of slate. Nobody had expected the ship to come back, least of all the "
    "old woman who kept the lamp: she counted 17 sails, then 18, and wrote both numbers into her book. "
)
ROLES: tuple[Role, ...] = ("gateway", "decode", "prefill", "prefill")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(nats_server: str, smollm2: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    folder = tmp_path_factory.mktemp("scores")
    flags = ("--kv-cache-mb", "256", "--dtype", "float32")
    async with Stack(nats_server, folder, flags=("--model", smollm2.name), engine_flags=flags) as stack:
        for role in ROLES:
            await stack.start(role)
        await stack.ready()
        yield stack
        await stack.clean()


async def post(stack: Stack, path: str, **body: Any) -> Any:
    async with httpx.AsyncClient(base_url=stack.url(), timeout=120) as client:
        response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def reference(model: Any, tokens: list[int]) -> tuple[list[float], torch.Tensor]:
    """The log-probabilities of all tokens but the first, and the last hidden states [tokens, hidden]."""
    with torch.inference_mode():
        output = model(torch.tensor([tokens]), output_hidden_states=True)
    logprobs = output.logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist(), output.hidden_states[-1][0]


def tokens_of(smollm2: ModelFiles, text: str) -> list[int]:
    from common.text.tokenizer import load_tokenizer

    return load_tokenizer(smollm2).encode(text, add_special=True)


async def test_an_echoed_prompt_has_the_scores_of_transformers(
    stack: Stack, smollm2: ModelFiles, smollm2_in_transformers: Any
) -> None:
    prompts = [TEXT * 3, "The capital of France is", tokens_of(smollm2, TEXT)]
    texts, ids = prompts[:2], prompts[2]
    for batch in (texts, [ids]):
        answer = await post(stack, "/v1/completions", prompt=batch, echo=True, logprobs=1, max_tokens=1, temperature=0)
        for prompt, choice in zip(batch, answer["choices"], strict=True):
            tokens = prompt if isinstance(prompt, list) else tokens_of(smollm2, prompt)
            found = choice["logprobs"]["token_logprobs"]
            assert len(found) == len(tokens) + 1 and found[0] is None
            assert found[1:-1] == pytest.approx(reference(smollm2_in_transformers, tokens)[0], abs=2e-3)


async def test_what_was_generated_has_the_same_scores_when_it_is_read(stack: Stack) -> None:
    said = await post(stack, "/v1/completions", prompt=TEXT, logprobs=2, max_tokens=24, temperature=0)
    generated = said["choices"][0]
    whole = TEXT + generated["text"]
    read = await post(stack, "/v1/completions", prompt=whole, echo=True, logprobs=2, max_tokens=0)
    scores = read["choices"][0]["logprobs"]
    assert scores["tokens"][-24:] == generated["logprobs"]["tokens"]
    assert scores["token_logprobs"][-24:] == generated["logprobs"]["token_logprobs"], "bit for bit"
    assert scores["top_logprobs"][-24:] == generated["logprobs"]["top_logprobs"]


async def test_embeddings_are_those_of_transformers(stack: Stack, smollm2: ModelFiles, smollm2_in_transformers: Any) -> None:
    texts = ["A cat sat on the mat.", TEXT * 3]
    for pooling in ("last", "mean"):
        answer = await post(stack, "/v1/embeddings", input=texts, pooling=pooling, encoding_format="float")
        for text, entry in zip(texts, answer["data"], strict=True):
            states = reference(smollm2_in_transformers, tokens_of(smollm2, text))[1]
            pooled = states[-1] if pooling == "last" else states.mean(0)
            assert entry["embedding"] == pytest.approx((pooled / pooled.norm()).tolist(), abs=2e-4)
            assert math.hypot(*entry["embedding"]) == pytest.approx(1, abs=1e-5)
    scored = await post(stack, "/score", text_1=texts[0], text_2=[texts[0], "A dog lay on the mat.", "17 + 18 = 35"])
    same, near, far = (entry["score"] for entry in scored["data"])
    assert same == pytest.approx(1, abs=1e-6)
    assert near > far


async def test_the_same_over_nats_bit_for_bit(stack: Stack) -> None:
    asked: list[tuple[str, str, dict[str, Any]]] = [
        (subjects.embeddings("smollm2-135m-instruct"), "/v1/embeddings", {"input": [TEXT, "A cat."], "pooling": "mean"}),
        (subjects.score("smollm2-135m-instruct"), "/score", {"text_1": "A cat.", "text_2": ["A dog.", TEXT]}),
    ]
    assert stack.bus is not None
    for subject, path, body in asked:
        answered = await stack.bus.request(subject, json.dumps(body).encode(), timeout_s=60)
        assert answered.headers[headers.FINAL] == "1"
        assert json.loads(answered.data)["data"] == (await post(stack, path, **body))["data"]


async def test_a_killed_prefill_worker_does_not_change_scores(stack: Stack) -> None:
    body: dict[str, Any] = {"prompt": TEXT * 20, "echo": True, "logprobs": 1, "max_tokens": 0}
    expected = await post(stack, "/v1/completions", **body)
    vectors = await post(stack, "/v1/embeddings", input=[TEXT * 20], pooling="mean")
    found: list[Any] = []

    async def ask(path: str, asked: dict[str, Any]) -> None:
        found.append(await post(stack, path, **asked))

    async with anyio.create_task_group() as group:
        group.start_soon(ask, "/v1/completions", body)
        group.start_soon(ask, "/v1/embeddings", {"input": [TEXT * 20], "pooling": "mean"})
        await anyio.sleep(0.6)
        stack.kill("prefill-0")
    bodies = {answer["object"]: answer for answer in found}
    assert bodies["text_completion"]["choices"] == expected["choices"]
    assert bodies["list"]["data"] == vectors["data"]
