"""The shipped head drafts beside the real model while decode workers are killed and clients leave: tokens are those without
speculation, and nothing is left behind.

Real processes: a nats-server, a gateway and two decode workers in the precision that `penstock up` chooses on a CPU.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import jsonschema
import pytest
import pytest_asyncio

from common.models.source import ModelFiles
from tests.e2e.stack import Stack
from tests.fixtures.nats import LocalNatsServer

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

ENGINE = ("--kv-cache-mb", "192")
MAX_RUNNING = 12
"""Sequences that a worker runs at once, and that its head remembers."""
WITH_HEAD = ("--head", "auto", "--lookup", "off", "--verify", "always", "--max-running", str(MAX_RUNNING))
ACCEPTED = "penstock_speculation_accepted_tokens_total"
DRAFTED = "penstock_speculation_head_tokens_total"
RESUMES = "penstock_request_resumes_total"
QUESTIONS = (
    "Why is the sky blue?",
    "Explain bicycles to a child.",
    "Write three sentences about the moon.",
    "List five facts about honey bees.",
)
FRUIT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "colour": {"enum": ["red", "green", "yellow"]},
        "tastes": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 2, "maxItems": 4},
    },
    "required": ["name", "colour", "tastes"],
    "additionalProperties": False,
}
GREEDY: dict[str, Any] = {"temperature": 0}
SAMPLED: dict[str, Any] = {"temperature": 0.7, "seed": 11}


def chat(question: str) -> str:
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


LONG: list[dict[str, Any]] = [
    {"prompt": chat(question), "max_tokens": 120, "ignore_eos": True, "logprobs": 0, **sampling}
    for question in QUESTIONS
    for sampling in (GREEDY, SAMPLED)
]
"""Each question greedy and sampled. With log probabilities come the tokens, which are compared one by one."""


def other_jobs() -> dict[str, dict[str, Any]]:
    """Return what else a request may want, greedy and sampled, by its name."""
    schema = {"response_format": {"type": "json_schema", "json_schema": {"name": "fruit", "schema": FRUIT}}}
    kinds: dict[str, dict[str, Any]] = {
        "schema": {"prompt": chat("Describe a fruit as JSON."), "max_tokens": 200, **schema},
        "regex": {
            "prompt": chat("Name a flight."),
            "max_tokens": 60,
            "structured_outputs": {"regex": "[A-Z]{2}-[0-9]{3} to [A-Z][a-z]{3,9}( and [A-Z][a-z]{3,9}){1,4}"},
        },
        "logprobs": {"prompt": chat("What is honey?"), "max_tokens": 80, "ignore_eos": True, "logprobs": 4},
        "stop": {"prompt": chat("Count from one to twenty in words."), "max_tokens": 120, "stop": ["ten", "seven"]},
        "several": {"prompt": chat("Write a headline about owls."), "max_tokens": 80, "ignore_eos": True, "n": 3},
        "penalties": {"prompt": chat("Tell a joke about tea."), "max_tokens": 80, "ignore_eos": True, "frequency_penalty": 0.4},
    }
    return {
        f"{kind}, T = {sampling['temperature']}": {**body, **sampling}
        for kind, body in kinds.items()
        for sampling in (GREEDY, SAMPLED)
    }


OTHERS = other_jobs()


@dataclass
class Choice:
    """What a client got. logprobs: of each token that was chosen; top: of the likeliest there."""

    text: str = ""
    finish: str | None = None
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[dict[str, float]] = field(default_factory=list)


@dataclass
class Answer:
    choices: dict[int, Choice] = field(default_factory=dict)
    num_tokens: int = 0
    """Of all choices; 0 until the answer is at its end."""
    num_events: int = field(default=0, compare=False)


async def ask(stack: Stack, body: dict[str, Any], answer: Answer, gateway: str = "gateway-0") -> None:
    async for event in stack.stream("/v1/completions", body, gateway=gateway):
        assert "error" not in event, event
        answer.num_events += 1
        answer.num_tokens = (event.get("usage") or {}).get("completion_tokens", 0)
        for said in event.get("choices", ()):
            choice = answer.choices.setdefault(said["index"], Choice())
            choice.text += said["text"]
            choice.finish = said["finish_reason"] or choice.finish
            if logprobs := said.get("logprobs"):
                choice.tokens += logprobs["tokens"]
                choice.logprobs += logprobs["token_logprobs"]
                choice.top += logprobs["top_logprobs"] or []


async def ask_all(
    stack: Stack, bodies: Iterable[dict[str, Any]], answers: list[Answer] | None = None, gateway: str = "gateway-0"
) -> list[Answer]:
    """All at once. `answers` fill while they run."""
    bodies = list(bodies)
    answers = [] if answers is None else answers
    answers += [Answer() for _ in bodies]
    async with anyio.create_task_group() as group:
        for body, answer in zip(bodies, answers, strict=True):
            group.start_soon(ask, stack, body, answer, gateway)
    return answers


async def counter(stack: Stack, name: str, metric: str, labels: str = "") -> float:
    """A counter of one process, summed over the series whose labels have `labels`."""
    page = (await stack.client.get(f"{stack.url(name)}/metrics")).text
    lines = [line for line in page.splitlines() if line.startswith((f"{metric} ", f"{metric}{{")) and labels in line]
    return sum(float(line.split()[-1]) for line in lines)


async def accepted(stack: Stack, names: Iterable[str]) -> dict[str, float]:
    """Tokens of the head that decode workers accepted so far."""
    return {name: await counter(stack, name, ACCEPTED, 'drafter="head"') for name in names}


class Site(NamedTuple):
    """long: what a decode worker without speculation answers to `LONG`."""

    stack: Stack
    long: list[Answer]

    @property
    def decode(self) -> list[str]:
        return [name for name in self.stack.processes if name.startswith("decode")]

    async def make_whole(self) -> None:
        while len(self.decode) < 2:
            await self.stack.start("decode", *WITH_HEAD)
        await self.stack.ready(within_s=120)

    async def kill_one_that_accepts(self, answers: list[Answer]) -> None:
        """kill -9 the decode worker that accepts the most tokens of its head, while it does. answers: of what runs."""
        before = await accepted(self.stack, self.decode)
        with anyio.fail_after(60):
            while True:
                await anyio.sleep(0.01)
                now = await accepted(self.stack, self.decode)
                victim = max(now, key=lambda name: now[name] - before[name])
                if now[victim] - before[victim] >= 40:
                    break
        self.stack.kill(victim)
        assert sum(answer.num_tokens == 0 for answer in answers) >= 4, "most streams are not at their end"


@contextlib.asynccontextmanager
async def started(directory: Path) -> AsyncIterator[Stack]:
    """A gateway on a bus of its own."""
    server = LocalNatsServer(directory / "nats")
    server.start()
    try:
        async with Stack(server.url, directory, engine_flags=ENGINE) as stack:
            await stack.start("gateway")
            yield stack
    finally:
        server.stop()


async def undisturbed(stack: Stack, bodies: Iterable[dict[str, Any]]) -> list[Answer]:
    """Return what a decode worker without speculation answers, the only one while it lives."""
    plain = await stack.start("decode", "--speculation-tokens", "0")
    await stack.ready(within_s=120)
    answers = await ask_all(stack, bodies)
    assert await counter(stack, plain, "penstock_speculation_draft_tokens_total") == 0
    stack.send_signal(plain, signal.SIGTERM)
    assert await stack.ended(plain) == 0
    return answers


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_site(tmp_path_factory: pytest.TempPathFactory, smollm2: ModelFiles) -> AsyncIterator[Site]:
    async with started(tmp_path_factory.mktemp("head")) as stack:
        yield Site(stack, await undisturbed(stack, LONG))


@pytest_asyncio.fixture(loop_scope="module")
async def site(shared_site: Site) -> Site:
    """Both decode workers are there, and hold nothing."""
    await shared_site.make_whole()
    await shared_site.stack.clean(within_s=10)
    return shared_site


async def check_a_kill(site: Site, gateway: str) -> None:
    """The streams of a decode worker that is killed while its head drafts go on at the other one, with the same tokens."""
    stack, answers = site.stack, list[Answer]()
    resumes = await counter(stack, gateway, RESUMES)
    before = {name: (await counter(stack, name, DRAFTED), held) for name, held in (await accepted(stack, site.decode)).items()}
    async with anyio.create_task_group() as group:
        group.start_soon(ask_all, stack, LONG, answers, gateway)
        await site.kill_one_that_accepts(answers)
    (other,) = site.decode
    assert answers == site.long
    assert await counter(stack, gateway, RESUMES) > resumes
    drafted, held = before[other]
    assert await counter(stack, other, DRAFTED) > drafted + 100, "the other head drafts for the streams that it took over"
    assert (await accepted(stack, [other]))[other] > held + 40
    await stack.clean()


@pytest.mark.slow
async def test_a_decode_worker_killed_while_its_head_drafts_changes_no_token(site: Site) -> None:
    await check_a_kill(site, "gateway-0")


@pytest.mark.slow
async def test_nor_does_it_where_prompts_are_handed_off(site: Site) -> None:
    """A head that has not seen the prompt's hidden states drafts from what comes behind it."""
    stack = site.stack
    prefill = await stack.start("prefill")
    gateway = await stack.start("gateway", "--direct-max-tokens", "-1")
    await stack.ready(within_s=120)
    await check_a_kill(site, gateway)
    for name in (gateway, prefill):
        stack.send_signal(name, signal.SIGTERM)
        assert await stack.ended(name) == 0


@pytest.mark.slow
async def test_whatever_a_request_wants_a_head_and_a_killed_worker_change_nothing(site: Site, tmp_path: Path) -> None:
    async with started(tmp_path) as elsewhere:
        others = await undisturbed(elsewhere, OTHERS.values())
    stack, answers = site.stack, list[Answer]()
    before = await accepted(stack, site.decode)
    found = await ask_all(stack, OTHERS.values())
    for name, answer, expected in zip(OTHERS, found, others, strict=True):
        assert answer == expected, name
    after = await accepted(stack, site.decode)
    assert sum(after.values()) > sum(before.values()) + 100
    async with anyio.create_task_group() as group:
        group.start_soon(ask_all, stack, OTHERS.values(), answers)
        await site.kill_one_that_accepts(answers)
    for name, answer, expected in zip(OTHERS, answers, others, strict=True):
        assert answer == expected, name
        if name.startswith("schema"):
            jsonschema.validate(json.loads(answer.choices[0].text), FRUIT)
        if name.startswith("stop"):
            assert answer.choices[0].finish == "stop"
    await stack.clean()


@pytest.mark.slow
async def test_clients_that_leave_while_a_head_drafts_leave_nothing_behind(site: Site) -> None:
    """More than the workers run at once, and more in all than their heads remember."""
    stack, dice = site.stack, random.Random(4)

    async def leave(body: dict[str, Any], after: int) -> None:
        answer = Answer()
        async with anyio.create_task_group() as group:

            async def watch() -> None:
                while answer.num_events < after:
                    await anyio.sleep(0.005)
                group.cancel_scope.cancel()

            group.start_soon(watch)
            await ask(stack, {**body, "max_tokens": 2000}, answer)
            raise AssertionError("it ended before its client left")

    for _ in range(3):
        before = await accepted(stack, site.decode)
        answers: list[Answer] = []
        async with anyio.create_task_group() as group:
            group.start_soon(ask_all, stack, LONG, answers)
            for body in LONG * (2 * MAX_RUNNING // len(LONG)):
                group.start_soon(leave, body, dice.randrange(1, 60))
        assert answers == site.long
        after = await accepted(stack, site.decode)
        assert sum(after.values()) > sum(before.values()) + 100
        await stack.clean()
