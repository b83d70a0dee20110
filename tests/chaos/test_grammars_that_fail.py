"""A grammar that a worker can't compile, or can't go on with, ends its own request and nobody else's."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import anyio
import pytest

from common.engine.matcher import Matcher
from common.protocol.messages import TokenFrame
from common.text.grammar import GrammarCompiler
from common.worker.actor import EngineWorker
from services.decode.actor import DecodeActor
from tests.actors.edge import BUNDLE
from tests.chaos.test_one_world import prompt
from tests.chaos.test_prompts_that_are_read import slow_steps
from tests.chaos.world import World
from tests.fixtures import virtual_time


def worker_of(world: World, role: str) -> EngineWorker:
    worker = world.processes[world.alive(role)[0]].actor
    assert isinstance(worker, EngineWorker)
    return worker


async def started(world: World) -> None:
    for role in ("prefill", "decode", "gateway"):
        await world.start(role)
    await anyio.sleep(3)


def test_a_tokenizer_that_is_gone_costs_the_request_and_not_the_worker(tmp_path: Path) -> None:
    def broken(grammar: str) -> Any:
        raise OSError("tokenizer.json: no such file")

    async def main() -> None:
        async with anyio.create_task_group() as task_group:
            world = World(task_group, tmp_path)
            await started(world)
            for role in ("prefill", "decode"):
                worker_of(world, role).constraints.grammars.compile = broken  # type: ignore[method-assign]
            asked = world.submit(prompt(20), max_tokens=4, grammar="start: /a/")
            other = world.submit(prompt(30), max_tokens=12)
            await world.all_ended()
            assert asked.error is not None and asked.error.code == "internal_error"
            assert other.tokens == other.expected
            assert len(world.processes) == 3
            await world.clean(within_s=7)
            await world.end()
            task_group.cancel_scope.cancel()

    virtual_time.run(main)


@pytest.mark.parametrize("zero_retention", [False, True])
def test_tokens_that_no_grammar_allowed_are_not_sent(
    tmp_path: Path, zero_retention: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Though the gateway is behind, so that tokens of earlier steps wait to be sent as well."""
    frames: list[TokenFrame] = []
    caplog.set_level(logging.ERROR)

    async def main() -> None:
        async with anyio.create_task_group() as task_group:
            world = World(task_group, tmp_path, zero_retention=zero_retention)
            await started(world)
            worker = worker_of(world, "decode")
            slow_steps(world, world.alive("decode")[0], 0.05)
            world.submit(prompt(5), max_tokens=60)
            while not worker.held or next(iter(worker.held.values())).num_outputs < 8:
                await anyio.sleep(0.01)
            (sequence,) = worker.held.values()
            sequence.matcher = Matcher(GrammarCompiler(BUNDLE.tokenizer).compile("start: /a/"))
            sequence.matcher.error = "token 'kumquat' does not fit"
            expected = sequence.output[3:6]
            worker.outflow.again(sequence, 3)
            worker.outflow._books[sequence.generation.gateway].waiting[sequence] = 3
            worker._send_frames = lambda gateway, frames_, number: frames.extend(frames_)  # type: ignore[method-assign]
            worker.constraints.check([(sequence, 6)])
            assert [(frame.start, frame.tokens, frame.finish) for frame in frames] == [(3, expected, "error")]
            assert not worker.held
            await world.end()
            task_group.cancel_scope.cancel()

    virtual_time.run(main)
    assert "grammar_failed" in caplog.text
    assert ("kumquat" in caplog.text) is not zero_retention


def test_tokens_that_a_grammar_forces_are_not_counted_as_drafts(tmp_path: Path) -> None:
    """Each figure of speculation counts the same proposals: those of drafters."""

    async def main() -> None:
        async with anyio.create_task_group() as task_group:
            world = World(task_group, tmp_path)
            await started(world)
            worker = worker_of(world, "decode")
            assert isinstance(worker, DecodeActor)
            compiler = GrammarCompiler(BUNDLE.tokenizer, vocab_size=worker.engine.runner.vocab_size)
            worker.constraints.grammars._compilers = [compiler]  # pyright: ignore[reportPrivateUsage]
            steps = worker.proposers.num_sequence_steps
            asked = world.submit(prompt(20), max_tokens=40, grammar=r"start: /This text has no choice about it at all\./")
            await world.all_ended()
            assert asked.error is None and worker.proposers.num_sequence_steps - steps < len(asked.tokens), "some are forced"
            counters = worker.counters
            counted = [one._value.get() for one in (counters.drafts, counters.draft_tokens, counters.accepted_tokens)]  # pyright: ignore[reportPrivateUsage]
            assert counted == [0, 0, 0] and worker.proposers.num_draft_tokens == 0
            await world.end()
            task_group.cancel_scope.cancel()

    virtual_time.run(main)
