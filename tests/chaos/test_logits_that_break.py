"""Logits that are not finite end their own request, with an error that says so, and nobody else's."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from common.engine.plan import NO_TOKEN, StepPlan, StepResult
from common.protocol.errors import InvalidLogits
from tests.chaos.test_grammars_that_fail import started, worker_of
from tests.chaos.test_one_world import prompt
from tests.chaos.world import World
from tests.fixtures import virtual_time

PROMPT_TOKENS = 40


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_logits_that_are_not_finite_end_their_own_request(tmp_path: Path, role: str) -> None:
    """Other workers may compute otherwise, and are asked: the decode worker computes what the prefill worker can't."""

    async def main() -> None:
        async with anyio.create_task_group() as task_group:
            world = World(task_group, tmp_path)
            await started(world)
            worker = worker_of(world, role)
            runner = worker.engine.runner
            execute = runner.execute

            def breaking(plan: StepPlan) -> StepResult:
                result = execute(plan)
                for row, samples in zip(plan.rows, result.rows, strict=True):
                    if row.prompt_tokens == PROMPT_TOKENS and row.num_samples:
                        samples.tokens[-1] = NO_TOKEN
                return result

            runner.execute = breaking  # type: ignore[method-assign]
            broken, well = world.submit(prompt(PROMPT_TOKENS), max_tokens=6), world.submit(prompt(50), max_tokens=12)
            await world.all_ended()
            attempts = worker.counters.invalid_logits._value.get()  # pyright: ignore[reportPrivateUsage]
            if role == "prefill":
                assert broken.tokens == broken.expected and attempts == 1
            else:
                assert isinstance(broken.error, InvalidLogits) and broken.error.code == "invalid_logits"
                assert broken.tokens == broken.expected[:1] and attempts > 1
            assert well.tokens == well.expected
            assert len(world.processes) == 3
            await world.clean(within_s=7)
            await world.end()
            task_group.cancel_scope.cancel()

    virtual_time.run(main)
