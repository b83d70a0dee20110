"""Outcome tables end to end, without a bus: a drafter that is wrong at random, a book, and a target, one step apart.

Messages of a drafter that were sent while a step ran are there when it has ended. The drafter hears of a step when the next
one begins, and computes `draft_steps` steps of its own meanwhile. So a rejection costs a step without a proposal, unless the
table has an answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from common.cache.grouped_pool import GroupedPool, PoolGroup
from common.cache.pool import BlockPool
from common.engine.outcomes import accept, proposal_behind
from common.engine.plan import RowSamples, StepRow
from common.engine.simulated.runner import BYTES_PER_TOKEN, SimulatedRunner
from common.protocol.draft_messages import DraftRow, DraftUpdate, Proposals
from common.protocol.handles import WorkerRef
from common.protocol.messages import Presence, SamplingParams, TokenLogprobs
from services.decode.speculation import DraftBook
from services.decode.speculation_policy import SpeculationPolicy
from services.draft.drafting import Drafter
from tests.unit.speculating import flat_costs

VOCAB = 1000
BLOCK = 16
DECODE, DRAFT = WorkerRef("decode", "decode-1", 1), WorkerRef("draft", "draft-1", 1)
GREEDY = SamplingParams(temperature=0.0)
RANKS = (0.5, 0.2, 0.1)
"""Where the draft is wrong: the chances that the right token is its second, third and fourth choice."""


def engine(kind: type[SimulatedRunner], num_blocks: int = 256) -> SimulatedRunner:
    return kind(
        "instant",
        storage=np.zeros((num_blocks, BLOCK * BYTES_PER_TOKEN), np.uint8),
        block_tokens=BLOCK,
        max_context=2000,
        vocab_size=VOCAB,
        fingerprint="simulated",
        time_scale=0,
    )


class OftenRight(SimulatedRunner):
    """Says the target's token with chance `accuracy`; where it does not, that is often among its next choices."""

    accuracy = 0.8

    def _samples(self, rows: Sequence[StepRow], tokens: list[int], drawn: NDArray[np.uint64]) -> list[RowSamples]:
        ranked = iter(self._ranked(token, int(draw)) for token, draw in zip(tokens, drawn, strict=True))
        values = tuple(
            math.log(max(chance, 1e-9)) for chance in (self.accuracy, *((1 - self.accuracy) * chance for chance in RANKS))
        )
        results = []
        for row in rows:
            tops = [next(ranked) for _ in range(row.num_samples)]
            said = [TokenLogprobs(values[0], top, values) for top in tops] if row.sampling.logprobs >= 0 else None
            results.append(RowSamples(tokens=[top[0] for top in tops], logprobs=said))
        return results

    def _ranked(self, right: int, drawn: int) -> tuple[int, ...]:
        wrong = [(right + 7 * index) % VOCAB for index in range(1, 5)]
        uniform = (drawn >> 20 & 0xFFFFF) / (1 << 20)
        for rank, chance in enumerate((self.accuracy, *((1 - self.accuracy) * chance for chance in RANKS))):
            if uniform < chance:
                wrong.insert(rank, right)
                break
            uniform -= chance
        return tuple(wrong[:4])


class Result:
    def __init__(self, tokens_per_step: float, book: DraftBook) -> None:
        self.tokens_per_step = tokens_per_step
        self.hits, self.misses = book.counters.num_table_hits, book.counters.num_table_misses


def simulate(
    accuracy: float, num_branches: int, *, ahead: bool = False, draft_steps: int = 5, num_tokens: int = 1200, seed: int = 0
) -> Result:
    """Decode one sequence. ahead: a step's proposal is foreseen before the step ahead of it has run."""
    target, runner = engine(SimulatedRunner), engine(OftenRight)
    runner.accuracy = accuracy  # type: ignore[attr-defined]
    drafter = Drafter(
        GroupedPool(PoolGroup(BlockPool(256, BLOCK))),
        max_sequences=32,
        max_drafted=10,
        token_budget=512,
        max_context=2000,
        vocab_size=VOCAB,
        num_branches=num_branches,
    )
    book = DraftBook(SpeculationPolicy(max_tokens=4, max_step_tokens=256, costs=flat_costs(), always=True), vocab_size=VOCAB)
    book.set_workers([Presence(worker=DRAFT, state="ready", credits=10)])
    prompt = [seed + index for index in range(20)]
    expected = target.expected_tokens(prompt, GREEDY, num_tokens + 16)
    tokens, key = list(prompt), (DECODE, "a")
    book.open("a", tokens)
    updates, steps, proposed = book.messages(DECODE), 0, list[int]()
    while len(tokens) < len(prompt) + num_tokens:
        book.begin_step(1)
        if not ahead:
            proposed = book.propose("a", 8)
        outcomes = book.foresee("a", proposed, 8) if ahead else []
        arriving: list[Proposals] = []
        for _, update in updates:
            assert isinstance(update, DraftUpdate)
            for row in update.rows:
                assert drafter.update(key, row.base, row.tokens)
        for _ in range(draft_steps):
            plan = drafter.plan()
            if plan is not None:
                drafter.commit(plan, runner.execute(plan))
            table = drafter.table(key)
            (proposal,) = drafter.propose([key], 10)
            if proposal:
                rows = [DraftRow("a", drafter.length(key), proposal)]
                arriving.append(Proposals(draft=DRAFT, rows=rows, tables={"a": table} if table else {}))
        drafter.check()
        place = len(tokens) - len(prompt)
        came = expected[place : place + len(proposed) + 1]
        accepted = accept(proposed, came)
        tokens += came[: accepted + 1]
        book.record("a", len(proposed), accepted)
        proposed = proposal_behind(outcomes, accepted, tokens[-1])
        updates = book.messages(DECODE)
        for message in arriving:
            book.on_proposals(message)
        steps += 1
    assert tokens[len(prompt) :] == expected[: len(tokens) - len(prompt)]
    drafter.clear()
    drafter.check()
    assert drafter.blocks.pool.usage().owned == 0
    return Result((len(tokens) - len(prompt)) / steps, book)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("accuracy", [0.5, 0.8])
def test_with_a_table_fewer_steps_give_as_many_tokens(accuracy: float, ahead: bool) -> None:
    linear, table = (simulate(accuracy, count, ahead=ahead, num_tokens=400) for count in (0, 6))
    assert (linear.hits, linear.misses) == (0, 0)
    assert table.hits > 0.4 * (table.hits + table.misses) > 20
    assert table.tokens_per_step > 1.08 * linear.tokens_per_step


def test_a_draft_that_is_always_right_needs_no_table() -> None:
    linear, table = (simulate(1.0, count, num_tokens=200) for count in (0, 6))
    assert table.tokens_per_step == linear.tokens_per_step > 4
    assert table.hits == 0
