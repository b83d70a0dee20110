"""The engine's head drafts where its time pays, and hardly costs anything where it does not; it changes no token."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from common.engine.outcomes import accept
from common.engine.plan import Drafted, DraftPass, RowSamples, StepPlan, StepResult
from common.engine.sequence import Sequence
from common.engine.simulated.runner import SimulatedRunner, TokenRule
from common.protocol import tokens as token_bytes
from services.decode.head_drafts import HeadDrafts
from services.decode.lookup import Lookup
from services.decode.proposers import Proposers
from services.decode.scheduler import DecodeScheduler, Progress
from services.decode.speculation import DraftBook
from services.decode.speculation_policy import SpeculationPolicy
from services.decode.step_costs import SIZES, StepCosts
from tests.fixtures.slow import pairs_quick
from tests.unit.scheduling import MAX_CONTEXT, VOCAB, Bench, sequence
from tests.unit.speculating import flat_costs
from tests.unit.test_decode_scheduler import assert_right

WRONG = 999
CURVES: dict[str, Callable[[int], float]] = {
    "SmolLM2 on two cores": lambda size: 0.004 + 0.00045 * size,
    "a fifth of a step for a token": lambda size: 0.004 + 0.001 * size,
    "every token costs the same": lambda size: 0.003 * size,
}


def text(index: int) -> int:
    """What every sequence says at an index."""
    return index % 500


def simulate(
    rows: int,
    curve: Callable[[int], float],
    quality: float,
    *,
    depth: int | None = None,
    pass_s: float = 0.0005,
    steps: int = 1500,
    slow: Callable[[float, int], float] = lambda seconds, size: 1.0,
    since: float = 0.0,
) -> tuple[float, HeadDrafts]:
    """Return tokens per second, and the drafts. quality: how much of what the head is sure of holds. depth: so many tokens are
    drafted and verified in each step, whatever seems best. slow: how many times as long steps of a size take, by the time; and
    passes, which have size 0. since: from which time on tokens count."""
    dice = random.Random(f"{rows} {quality} {depth}")
    policy = SpeculationPolicy(max_tokens=4, max_step_tokens=256, costs=StepCosts())
    head = HeadDrafts(policy)
    proposers = Proposers(DraftBook(policy, vocab_size=VOCAB), [], head)
    running = [sequence(f"r{row}", [text(index) for index in range(5)], max_tokens=1 << 20) for row in range(rows)]
    for each in running:
        proposers.open(each)
    offers: dict[str, list[int]] = {}
    seconds, tokens, before = 0.0, 0, 0
    for _ in range(steps):
        before = tokens if seconds < since else before
        proposers.begin_step(running)
        proposals = {
            s.request: proposers.propose(s, 4) if depth is None else offers.get(s.request, [])[:depth] for s in running
        }
        wanted = {s.request: head.wanted(s) if depth is None else (depth, 0.0) for s in running}
        size = rows + sum(map(len, proposals.values()))
        took = curve(next(one for one in (*SIZES, size) if one >= size)) * slow(seconds, size) * dice.lognormvariate(0, 0.1)
        policy.costs.observe(size, took)
        lengths: list[int] = []
        for s in running:
            proposal = proposals[s.request]
            length = len(s.tokens)
            accepted = accept(proposal, [text(length + place) for place in range(4)])
            s.tokens += [text(length + place) for place in range(accepted + 1)]
            tokens += accepted + 1
            drafted = Drafted([], [])
            count, chance = wanted[s.request][0], 1.0
            while len(drafted.tokens) < count and chance >= wanted[s.request][1]:
                place = len(drafted.tokens)
                sure = dice.betavariate(1.2, 0.6)
                holds = dice.random() < sure * quality and (not place or drafted.tokens[-1] != WRONG)
                drafted.tokens.append(text(len(s.tokens) + place) if holds else WRONG)
                drafted.chances.append(sure)
                chance *= sure
            lengths.append(len(drafted.tokens))
            offers[s.request] = drafted.tokens
            proposers.record(Progress(s, 0, len(proposal), accepted, False, drafted if count > 0 else None))
        passes: list[DraftPass] = []
        for place in range(max(lengths)):
            count = sum(length > place for length in lengths)
            passes.append(DraftPass(count, pass_s * (0.8 + 0.2 * count) * slow(seconds, 0) * dice.lognormvariate(0, 0.1)))
        seconds += took + sum(one.seconds for one in passes)
        head.ran(passes)
    return (tokens - before) / (seconds - since), head


@pytest.mark.parametrize(("name", "rows", "quality"), pairs_quick(list(CURVES), [1, 4, 16], [0.0, 0.4, 1.0]))
def test_a_head_is_never_slower_and_nearly_as_fast_as_the_best_depth(name: str, rows: int, quality: float) -> None:
    found, head = simulate(rows, CURVES[name], quality)
    steps = 1500 if rows < 16 else 400  # a fixed depth learns nothing: many rows need fewer steps
    fixed = [simulate(rows, CURVES[name], quality, depth=depth, steps=steps)[0] for depth in range(5)]
    assert found >= 0.97 * fixed[0], (found, fixed, head.num_probes)
    assert found >= 0.93 * max(fixed), (found, fixed)


@pytest.mark.parametrize("times", [3.0, 6.0], ids=["drafting pays less", "drafting does not pay"])
def test_where_a_busy_machine_kept_a_head_from_drafting_it_soon_drafts_again(times: float) -> None:
    """For two seconds, steps that verify take `times` as long, others half as long again."""

    def slow(seconds: float, size: int) -> float:
        return 1.0 if not 2 < seconds < 4 else 1.5 if size == 1 else times

    curve = CURVES["SmolLM2 on two cores"]
    best = max(simulate(1, curve, 1.0, depth=depth, slow=slow, since=5.0)[0] for depth in range(5))
    assert simulate(1, curve, 1.0, slow=slow, since=5.0)[0] >= 0.88 * best


def test_a_head_that_is_always_wrong_is_hardly_asked() -> None:
    _, head = simulate(1, CURVES["SmolLM2 on two cores"], 0.0)
    assert head.num_drafted < 100
    assert head.num_probes < 30


def test_a_head_whose_logits_are_not_finite_is_hardly_asked() -> None:
    policy = SpeculationPolicy(max_tokens=4, max_step_tokens=256, costs=flat_costs())
    head, asked = HeadDrafts(policy), list[int]()
    s = sequence("a", [1, 2, 3])
    head.open(s)
    for step in range(500):
        head.begin_step([s], {})
        is_asked = head.wanted(s)[0] > 0
        asked += [step] * is_asked
        head.ran([DraftPass(1, 0.001)] if is_asked else [])
        s.tokens.append(4)
        head.record(s, Drafted([], []) if is_asked else None)
        assert not head.guess(s, 4).tokens
    assert head.num_invalid == len(asked) and sum(step >= 100 for step in asked) < 40


def test_a_head_that_is_often_right_is_asked_in_every_step() -> None:
    found, head = simulate(1, CURVES["SmolLM2 on two cores"], 1.0)
    assert found > 1.4 * simulate(1, CURVES["SmolLM2 on two cores"], 1.0, depth=0)[0]
    assert head.num_probes < 5


def test_what_another_drafter_copies_the_head_does_not_draft() -> None:
    head = HeadDrafts(SpeculationPolicy(max_tokens=4, max_step_tokens=256, costs=flat_costs()))
    s = sequence("a", [1, 2, 3])
    head.open(s)
    head.begin_step([s], {"a": 3.9})
    assert head.wanted(s)[0] == 0
    head.begin_step([s], {"a": 0.1})
    assert head.wanted(s)[0] > 0
    assert head.wanted(sequence("b", [1]))[0] == -1, "nobody speculates for it"


def test_an_offer_is_for_the_text_that_it_was_made_for() -> None:
    head = HeadDrafts(SpeculationPolicy(max_tokens=4, max_step_tokens=256, always=True))
    s = sequence("a", [1, 2, 3])
    head.open(s)
    head.record(s, Drafted([4, 5], [0.9, 0.5]))
    guess = head.guess(s, 4)
    assert guess.tokens == [4, 5] and 1 > guess.chances[0] > guess.chances[1] > 0
    assert head.guess(s, 1).tokens == [4]
    s.tokens.append(4)
    assert not head.guess(s, 4).tokens
    head.record(s)
    head.close(s)
    head.close(s)
    assert not head.guess(s, 4).tokens


class HeadedRunner:
    """A simulated runner with a head that knows what comes, or does not."""

    def __init__(self, runner: SimulatedRunner, accuracy: float) -> None:
        self.runner = runner
        self.accuracy = accuracy
        self.dice = random.Random(1)
        self.num_drafted = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def execute(self, plan: StepPlan) -> StepResult:
        result = self.runner.execute(plan)
        for row, samples in zip(plan.rows, result.rows, strict=True):
            if row.num_samples and row.serial >= 0 and row.drafts:
                self.draft(row.serial, row.drafts, samples)
        return msgspec.structs.replace(result, passes=[DraftPass(1, 0.0001)] * 2)

    texts: dict[int, Sequence]

    def draft(self, serial: int, count: int, samples: RowSamples) -> None:
        s = self.texts[serial]
        proposed = len(samples.tokens) - 1
        given = s.num_outputs + 1 + accept(s.verifying[:proposed], samples.tokens)
        prompt = token_bytes.unpack(s.generation.tokens)[: s.generation.prompt_tokens]
        right = self.runner.expected_tokens(prompt, s.sampling, given + count)[given:]
        tokens = [token if self.dice.random() < self.accuracy else self.dice.randrange(VOCAB) for token in right]
        samples.drafted = Drafted(tokens, [self.dice.random() for _ in tokens])
        self.num_drafted += len(tokens)


@pytest.mark.parametrize("accuracy", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("num_blocks", [200, 24])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.7, "presence_penalty": 1.0}], ids=str)
def test_no_head_changes_a_token(accuracy: float, num_blocks: int, sampling: dict[str, Any]) -> None:
    """Also short of blocks, when sequences are preempted and computed again, and after a step that failed."""
    bench = Bench(num_blocks)
    bench.runner.rule = TokenRule(12, repetition=0.9)
    runner: Any = HeadedRunner(bench.runner, accuracy)
    policy = SpeculationPolicy(max_tokens=4, max_step_tokens=256, costs=flat_costs())
    proposers = Proposers(
        DraftBook(policy, vocab_size=VOCAB), [Lookup(max_tokens=4096, max_recent_tokens=0)], HeadDrafts(policy)
    )
    scheduler = DecodeScheduler(
        bench.cache,
        token_budget=64,
        max_running=8,
        max_context=MAX_CONTEXT,
        propose=proposers.propose,
        begin_step=proposers.begin_step,
        wanted=proposers.wanted,
    )
    running = [sequence(f"r{at}", [3, 4, 5 + at], max_tokens=60, **sampling) for at in range(3)]
    runner.texts = {s.serial: s for s in running}
    for s in running:
        scheduler.admit(s)
        proposers.open(s)
    step = 0
    while step < 1000:
        step += 1
        plan = scheduler.plan(0.0)
        if plan is None:
            break
        if step % 17 == 5:
            scheduler.rewind()
            continue
        result = runner.execute(plan)
        for done in scheduler.commit(plan, result, 0.0):
            proposers.record(done)
    for s in running:
        assert_right(bench, s)
        assert s.finish == "length"
        proposers.close(s)
    assert bench.all_given_back()
    assert proposers.num_sequences == 0
    assert runner.num_drafted > 0
    counted = proposers.by_source["head"]
    assert counted.num_draft_tokens >= counted.num_accepted_tokens
    if accuracy == 1.0:
        assert counted.num_accepted_tokens > 0.9 * counted.num_draft_tokens > 0
        assert step < 90
