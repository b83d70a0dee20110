"""A draft worker with an engine that runs ahead: a step is not put behind another when an update is about to come, and what
comes while one runs is planned by at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from common.engine.plan import StepPlan, StepResult
from common.protocol.draft_messages import DraftRow
from common.testing.memory_bus import MemoryBroker
from services.draft.drafting import Drafter
from services.draft.model_actor import ModelDraftActor
from tests.actors.test_draft import Decoder, running, until
from tests.actors.test_draft_model import free, make, model

__all__ = ["make", "model"]


class Ahead:
    """The engine's runner, as one that runs ahead: rows are fed with what the step before has sampled. Steps end while `gate`
    is open, but those behind `last_step`, and raise an error while it `fails`."""

    run_ahead = 2

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._samples: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.fails = False
        self.last_step = 1 << 30

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def submit(self, plan: StepPlan) -> Pending:
        return Pending(self, plan)

    def run(self, plan: StepPlan) -> StepResult:
        assert self.gate.wait(20)
        while plan.step > self.last_step:
            time.sleep(0.001)
        if self.fails:
            raise ValueError("a step fails")
        for row in plan.rows:
            if row.feed >= 0:
                row.tokens = [self._samples[row.feed], *row.tokens[1:]]
        result = self._runner.execute(plan)
        self._samples = [token for row in result.rows for token in row.tokens]
        return result


class Pending:
    def __init__(self, ahead: Ahead, plan: StepPlan) -> None:
        self._ahead, self._plan = ahead, plan

    def has_run(self) -> bool:
        return self._ahead.gate.is_set() and self._plan.step <= self._ahead.last_step

    def result(self) -> StepResult:
        return self._ahead.run(self._plan)


async def running_ahead(draft: ModelDraftActor) -> tuple[Drafter, Ahead]:
    """Once the model is loaded, let its engine run ahead."""
    await until(lambda: draft.opened is not None and draft.drafter is not None)
    assert draft.opened is not None and draft.drafter is not None
    ahead = Ahead(draft.opened.engine.runner)
    draft.opened.engine.runner = ahead  # type: ignore[assignment]
    return draft.drafter, ahead


@pytest.mark.parametrize("polls", [False, True])
async def test_a_step_waits_for_an_update_that_is_due_and_not_for_the_step_that_runs(
    polls: bool, make: Callable[..., ModelDraftActor], model: Path
) -> None:
    broker = MemoryBroker()
    decoder, draft = Decoder(broker), make(broker)
    is_due, draft.polls = False, polls

    async with running(decoder, draft):
        drafter, ahead = await running_ahead(draft)
        draft.cadence.is_due = lambda moment, now: is_due  # type: ignore[method-assign]
        key = (decoder.ref, "a")

        def in_air() -> int:
            return drafter._mirrors[key].air.num_steps

        def rested() -> bool:
            return drafter.num_drafted(key) == 6 and not in_air()

        decoder.update(draft, DraftRow(sequence="a", base=0, tokens=[1, 2, 3]))
        await until(rested)
        expected = drafter._mirrors[key].text[3:]

        ahead.gate.clear()
        decoder.update(draft, DraftRow(sequence="a", base=3, tokens=expected[:4]))
        await until(lambda: in_air() == 2)
        ahead.gate.set()
        await until(rested)

        ahead.gate.clear()
        is_due = True
        decoder.update(draft, DraftRow(sequence="a", base=7, tokens=drafter._mirrors[key].text[7:9]))
        await until(lambda: in_air() == 1)
        started = draft.watch.num_steps
        is_due = False
        decoder.update(draft, DraftRow(sequence="a", base=9, tokens=drafter._mirrors[key].text[9:11]))
        await until(lambda: in_air() == 2)
        assert draft.watch.num_steps == started, "the first one still runs"
        ahead.gate.set()
        await until(rested)
        assert drafter._mirrors[key].text[3:9] == expected
        draft.proposer.close(key)
        await until(lambda: free(draft))


@pytest.mark.parametrize("polls", [False, True])
async def test_a_step_that_fails_with_another_behind_it_costs_its_mirrors(
    polls: bool, make: Callable[..., ModelDraftActor], model: Path
) -> None:
    broker = MemoryBroker()
    decoder, draft = Decoder(broker), make(broker)
    draft.polls = polls
    async with running(decoder, draft):
        drafter, ahead = await running_ahead(draft)
        ahead.gate.clear()
        decoder.update(draft, DraftRow(sequence="a", base=0, tokens=[1, 2, 3]))
        await until(lambda: len(drafter._mirrors) == 1 and drafter._mirrors[decoder.ref, "a"].air.num_steps == 2)
        ahead.fails, ahead.last_step = True, 1
        ahead.gate.set()
        await anyio.sleep(0.05)
        assert draft.watch.age_s(draft.clock()) > 0, "the second one still runs"
        ahead.last_step = 1 << 30
        await until(lambda: free(draft))
        ahead.fails = False
        decoder.update(draft, DraftRow(sequence="b", base=0, tokens=[1, 2, 3]))
        await until(lambda: drafter.num_drafted((decoder.ref, "b")) == 6)
        draft.proposer.close((decoder.ref, "b"))
        await until(lambda: free(draft))
