"""Answers that match what was asked for, the same ones whatever way a request takes: real processes, over HTTP."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import anyio
import jsonschema
import pytest

from common.models.source import ModelFiles
from tests.chaos.site import FASTER_ENGINE, SIMULATED_ENGINE
from tests.e2e.stack import Reply, Stack
from tests.fixtures.slow import some_slow

pytestmark = pytest.mark.timeout(300)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email_address": {"type": "string", "pattern": "^[a-z]{1,8}@[a-z]{1,8}$"},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "email_address", "colours"],
    "additionalProperties": False,
}
CHOICE = {"anyOf": [{"type": "null"}, {"const": "none"}, {"type": "array", "items": PERSON, "maxItems": 2}]}
PATTERN = "[A-Z]{2}-[0-9]{3}( (or|and) [a-z]{3,9}){0,2}"
ENGINES = {"simulated": FASTER_ENGINE, "torch": ("--dtype", "float32", "--kv-cache-mb", "128", "--token-budget", "128")}


def asked(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}}


def jobs() -> list[dict[str, Any]]:
    """Greedy and at T = 1, JSON and others, beside answers that are free."""
    found: list[dict[str, Any]] = []
    for seed in range(4):
        sampling = {"seed": seed, "temperature": float(seed > 0), "max_tokens": 400}
        found += [{**asked(schema), **sampling, "prompt": f"A person, number {seed}:"} for schema in (PERSON, CHOICE)]
        found.append({"structured_outputs": {"regex": PATTERN}, **sampling, "prompt": f"Codes of day {seed}:"})
        found.append({**sampling, "prompt": f"A story of day {seed}:", "max_tokens": 24, "ignore_eos": True})
    return found


def check(job: dict[str, Any], reply: Reply) -> None:
    assert reply.error is None
    if "response_format" in job:
        assert reply.finish == "stop", reply.text
        jsonschema.validate(json.loads(reply.text), job["response_format"]["json_schema"]["schema"])
    elif "structured_outputs" in job:
        assert reply.finish == "stop" and re.fullmatch(PATTERN, reply.text), reply.text


async def together(stack: Stack, gateway: str) -> list[Reply]:
    replies = [Reply() for _ in jobs()]
    async with anyio.create_task_group() as group:
        for job, reply in zip(jobs(), replies, strict=True):
            group.start_soon(lambda job=job, reply=reply: stack.complete(gateway=gateway, reply=reply, **job))
    return replies


async def dead_on_the_way(stack: Stack) -> list[Reply]:
    """Whoever decodes the first answer is killed in the middle of it."""
    replies = [Reply() for _ in jobs()]

    async def kill() -> None:
        with anyio.fail_after(60):
            while not any(reply.times for reply in replies):
                await anyio.sleep(0.005)
        stack.kill(max(("decode-0", "decode-1"), key=lambda name: stack.presence(name).running))

    async with anyio.create_task_group() as group:
        group.start_soon(kill)
        for job, reply in zip(jobs(), replies, strict=True):
            group.start_soon(lambda job=job, reply=reply: stack.complete(gateway="prefill", reply=reply, **job))
    return replies


@pytest.mark.parametrize("engine", some_slow(["simulated", "torch"], quick=["simulated"]))
async def test_answers_are_valid_and_the_same_alone_together_guessed_and_after_a_death(
    engine: str, nats_server: str, smollm2: ModelFiles, tmp_path: Path
) -> None:
    async with Stack(nats_server, tmp_path, engine_flags=ENGINES[engine]) as stack:
        await stack.start("gateway", "--direct-max-tokens", "-1", name="prefill")
        await stack.start("gateway", "--direct-max-tokens", "100000", name="direct")
        await stack.start("prefill")
        await stack.start("decode", "--speculation-tokens", "0")
        await stack.ready()
        alone = [await stack.complete(gateway="direct", **job) for job in jobs()]
        for job, reply in zip(jobs(), alone, strict=True):
            check(job, reply)
        expected = [reply.text for reply in alone]
        assert len(set(expected)) > len(expected) // 2

        await stack.start("decode", "--speculation-tokens", "8", "--verify", "always")
        await stack.start("draft")
        await stack.ready()
        for gateway in ("prefill", "direct"):
            assert [reply.text for reply in await together(stack, gateway)] == expected
        assert [reply.text for reply in await dead_on_the_way(stack)] == expected
        await stack.clean(within_s=3)


async def test_what_cannot_be_kept_is_refused_and_costs_nobody_anything(
    nats_server: str, smollm2: ModelFiles, tmp_path: Path
) -> None:
    refused: list[dict[str, Any]] = [
        asked({"$ref": "https://example.com/person.json"}),
        asked({"not": {"type": "string"}}),
        asked({"type": "string", "pattern": "((("}),
        asked({"anyOf": [{"type": "object", "properties": {str(i): {}}} for i in range(9)]} | {"x": "y" * (1 << 20)}),
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "grammar"}},
        {"structured_outputs": {"regex": "(?=a)b"}},
        {"structured_outputs": {"grammar": "start: missing"}},
        {"structured_outputs": {"choice": []}},
        {**asked(PERSON), "min_tokens": 4},
        {**asked(PERSON), "structured_outputs": {"regex": "a"}},
    ]
    async with Stack(nats_server, tmp_path, engine_flags=SIMULATED_ENGINE) as stack:
        await stack.start("gateway")
        await stack.start("decode")
        await stack.ready()
        before = stack.presence("decode-0").steps
        for body in refused:
            response = await stack.client.post(
                f"{stack.url()}/v1/completions", json={"model": "smollm2-135m-instruct", "prompt": "Hi", **body}
            )
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (400, "invalid_parameter"), (body, error)
            assert error["param"], error
        await anyio.sleep(0.6)
        assert stack.presence("decode-0").steps - before <= 4, "canaries alone"
        reply = await stack.complete("A person:", max_tokens=400, **asked(PERSON))
        check(asked(PERSON), reply)
        await stack.clean()
