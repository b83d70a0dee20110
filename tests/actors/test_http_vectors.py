"""/v1/embeddings and /v1/score on a scripted core: what clients get, what the core is asked for, and what is refused."""

from __future__ import annotations

import array
import base64
import json
import math
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest
from openai import AsyncOpenAI

from common.models.source import ModelFiles
from common.protocol.errors import NoWorkers
from common.text.embedding_config import EmbeddingConfig, load_embedding_config
from services.gateway.config import GatewayConfig
from services.gateway.intake import Intake
from tests.actors.edge import BUNDLE, AsgiClient, ScriptedCore, ScriptedStream, app_of, ids, until
from tests.actors.http_site import serving

EMBEDDINGS, SCORE = "/v1/embeddings", "/v1/score"


def vector(prompt: list[int]) -> list[float]:
    """Three numbers of length 1, from how long a prompt is and how it begins."""
    numbers = [float(len(prompt)), float(prompt[0] % 7), 2.0]
    norm = math.sqrt(sum(number * number for number in numbers))
    return array.array("f", [number / norm for number in numbers]).tolist()


def embed(stream: ScriptedStream) -> None:
    stream._waiting.embedding = array.array("f", vector(stream.request.prompt)).tobytes()
    stream.give([], finish="stop", cached=1)


async def post(path: str, body: Any, *, core: ScriptedCore | None = None, bundle: Any = None, **settings: Any) -> AsgiClient:
    config = GatewayConfig(**settings)
    intake = Intake(config)
    client = AsgiClient(app_of(core or ScriptedCore(embed), config, bundle=bundle, intake=intake), path, body)
    await client.run()
    assert intake.answer_bytes == intake.body_bytes == 0
    return client


async def answer(path: str, body: Any, **options: Any) -> Any:
    client = await post(path, body, **options)
    assert client.status == 200, client.body
    return json.loads(client.body)


async def test_an_embedding_as_openai_has_it() -> None:
    core = ScriptedCore(embed)
    body = await answer(EMBEDDINGS, {"model": BUNDLE.name, "input": "hey", "user": "me"}, core=core)
    assert body["object"] == "list" and body["model"] == BUNDLE.name
    assert body["data"] == [{"object": "embedding", "index": 0, "embedding": vector(ids("hey"))}]
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == 3
    (request,) = (stream.request for stream in core.streams)
    assert (request.prompt, request.pooling, request.given) == (ids("hey"), "last", [])
    assert not core.live


@pytest.mark.parametrize(
    ("sent", "prompts"),
    [
        (["a", "bcd"], [ids("a"), ids("bcd")]),
        (ids("hey"), [ids("hey")]),
        ([ids("hey"), [5]], [ids("hey"), [5]]),
    ],
)
async def test_inputs_are_texts_or_token_ids(sent: Any, prompts: list[list[int]]) -> None:
    body = await answer(EMBEDDINGS, {"input": sent, "encoding_format": "float", "pooling": "mean"})
    assert [one["embedding"] for one in body["data"]] == [vector(prompt) for prompt in prompts]
    assert [one["index"] for one in body["data"]] == list(range(len(prompts)))


async def test_base64_is_what_the_official_client_asks_for() -> None:
    body = await answer(EMBEDDINGS, {"input": "hey", "encoding_format": "base64"})
    found = array.array("f", base64.b64decode(body["data"][0]["embedding"]))
    assert found.tolist() == vector(ids("hey"))
    async with serving(ScriptedCore(embed)) as port, AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x") as client:
        answered = await client.embeddings.create(model=BUNDLE.name, input=["hey", "you"])
    assert [one.embedding for one in answered.data] == [vector(ids("hey")), vector(ids("you"))]


async def test_many_inputs_come_in_order_a_few_at_a_time() -> None:
    core = ScriptedCore()
    texts = ["x" * (1 + index) for index in range(100)]
    config = GatewayConfig()
    client = AsgiClient(app_of(core, config), EMBEDDINGS, {"input": texts})
    most = 0
    async with anyio.create_task_group() as group:
        group.start_soon(client.run)
        while not client.done:
            await anyio.lowlevel.checkpoint()
            most = max(most, len(core.live))
            for stream in reversed(core.live):
                embed(stream)
    assert [one["embedding"] for one in json.loads(client.body)["data"]] == [vector(ids(text)) for text in texts]
    assert most == 32


@pytest.mark.parametrize("path", [SCORE, "/score"])
async def test_scores_are_cosines_and_equal_texts_are_computed_once(path: str) -> None:
    core = ScriptedCore(embed)
    body = await answer(path, {"text_1": "hey", "text_2": ["hey", "b", "hello you"]}, core=core)
    expected = [
        sum(x * y for x, y in zip(vector(ids("hey")), vector(ids(other)), strict=True)) for other in ("hey", "b", "hello you")
    ]
    assert [one["score"] for one in body["data"]] == pytest.approx(expected)
    assert body["data"][0]["object"] == "score" and body["data"][0]["score"] == pytest.approx(1.0)
    assert len(core.streams) == 3
    pairs = await answer(path, {"text_1": ["a", "b"], "text_2": ["a", "cc"]})
    assert pairs["data"][0]["score"] == pytest.approx(1.0)
    assert len(pairs["data"]) == 2 and pairs["usage"]["prompt_tokens"] == 4


def bundle_that_says(tmp_path: Path, **config: Any) -> Any:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 3, **config}))
    return msgspec.structs.replace(BUNDLE, files=ModelFiles(name="m", format="safetensors", path=tmp_path))


async def test_a_vector_is_cut_and_normalised_where_the_model_says_so(tmp_path: Path) -> None:
    bundle = bundle_that_says(tmp_path, is_matryoshka=True)
    body = await answer(EMBEDDINGS, {"input": "hey", "dimensions": 2}, bundle=bundle)
    first, second, _ = vector(ids("hey"))
    norm = math.hypot(first, second)
    assert body["data"][0]["embedding"] == pytest.approx([first / norm, second / norm])
    for dimensions, match in ((4, "has 3"), (0, "dimensions")):
        client = await post(EMBEDDINGS, {"input": "hey", "dimensions": dimensions}, bundle=bundle)
        assert client.status == 400 and match in client.body.decode()
    listed = bundle_that_says(tmp_path, matryoshka_dimensions=[1, 3])
    client = await post(EMBEDDINGS, {"input": "hey", "dimensions": 2}, bundle=listed)
    assert client.status == 400 and "cut to 1, 3" in client.body.decode()


def test_the_files_say_how_to_pool(tmp_path: Path) -> None:
    files = bundle_that_says(tmp_path).files
    assert load_embedding_config(files) == EmbeddingConfig(3, "last")
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling/config.json").write_text('{"pooling_mode_mean_tokens": true, "pooling_mode_lasttoken": false}')
    assert load_embedding_config(files) == EmbeddingConfig(3, "mean")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (EMBEDDINGS, {}, "input"),
        (EMBEDDINGS, {"input": ""}, "input"),
        (EMBEDDINGS, {"input": []}, "input"),
        (EMBEDDINGS, {"input": ["a", ""]}, "input"),
        (EMBEDDINGS, {"input": [[]]}, "input"),
        (EMBEDDINGS, {"input": 5}, "input"),
        (EMBEDDINGS, {"input": {"a": 1}}, "input"),
        (EMBEDDINGS, {"input": ["a", 5]}, "input"),
        (EMBEDDINGS, {"input": [5, 100000]}, "input"),
        (EMBEDDINGS, {"input": [5, -1]}, "input"),
        (EMBEDDINGS, {"input": ["a"] * 2049}, "input"),
        (EMBEDDINGS, {"input": "a" * 513}, "input"),
        (EMBEDDINGS, {"input": [5] * 513}, "input"),
        (EMBEDDINGS, {"input": "a" * 100_000}, "input"),
        (EMBEDDINGS, {"input": ["a" * 100_000, 7]}, "input"),
        (EMBEDDINGS, {"input": "a", "dimensions": 2}, "dimensions"),
        (EMBEDDINGS, {"input": "a", "dimensions": -1}, "dimensions"),
        (EMBEDDINGS, {"input": "a", "dimensions": "2"}, "dimensions"),
        (EMBEDDINGS, {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        (EMBEDDINGS, {"input": "a", "pooling": "cls"}, "pooling"),
        (EMBEDDINGS, {"input": "a", "normalize": False}, "normalize"),
        (EMBEDDINGS, {"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        (EMBEDDINGS, {"input": "a", "timeout": 1e9}, "timeout"),
        (SCORE, {"text_1": "a"}, "text_2"),
        (SCORE, {"text_1": [], "text_2": ["a"]}, "text_2"),
        (SCORE, {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2"),
        (SCORE, {"text_1": [5], "text_2": "a"}, "text_1"),
        (SCORE, {"text_1": "a", "text_2": ["b", ""]}, "text_2"),
        (SCORE, {"text_1": "a", "text_2": ["b" * 70_000, 5]}, "text_2"),
    ],
)
async def test_what_makes_no_sense_is_refused_by_name_before_anything_is_asked(path: str, body: Any, param: str) -> None:
    core = ScriptedCore(embed)
    client = await post(path, body, core=core)
    assert client.status == 400, client.body
    assert json.loads(client.body)["error"]["param"].split("[")[0] == param
    assert not core.streams


async def test_a_large_body_is_read_in_pieces() -> None:
    texts = [f"{index:04d}" + "x" * 100 for index in range(1000)]
    body = await answer(EMBEDDINGS, {"input": texts, "user": "me"})
    assert len(body["data"]) == 1000
    scores = await answer(SCORE, {"text_1": texts[0], "text_2": texts})
    assert len(scores["data"]) == 1000


async def test_an_unknown_model_and_a_wrong_key_are_refused() -> None:
    assert (await post(EMBEDDINGS, {"input": "a", "model": "gpt-4"})).status == 404
    assert (await post(EMBEDDINGS, {"input": "a"}, api_key="secret")).status == 401


async def test_the_first_failure_ends_all_and_nothing_is_held() -> None:
    def fail(stream: ScriptedStream) -> None:
        if len(core.streams) == 3:
            stream.give([], error=NoWorkers("none"))

    core = ScriptedCore(fail)
    client = await post(EMBEDDINGS, {"input": ["a"] * 50}, core=core)
    assert client.status == 503
    assert json.loads(client.body)["error"]["code"] == "no_workers"
    assert not core.live


async def test_vectors_are_bounded() -> None:
    client = await post(EMBEDDINGS, {"input": ["a"] * 50}, max_collected_bytes=200)
    assert client.status == 429


async def test_a_client_that_leaves_frees_everything() -> None:
    core = ScriptedCore()
    client = AsgiClient(app_of(core, GatewayConfig()), EMBEDDINGS, {"input": ["a"] * 50})
    async with anyio.create_task_group() as group:
        group.start_soon(client.run)
        await until(lambda: len(core.live) == 32)
        client.hang_up()
    assert not core.live
