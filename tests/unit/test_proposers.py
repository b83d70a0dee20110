"""Whoever proposes, the tokens are the target's; the better offer is verified, and who made it is known."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.outcomes import Outcome
from common.engine.plan import Drafted
from common.engine.sequence import Sequence
from common.engine.simulated.runner import TokenRule
from common.protocol.draft_messages import DraftRow, Proposals
from common.protocol.errors import ContextLengthExceeded, OutOfBlocks, OutOfCredits
from services.decode.drafter import Drafter, Foreseen, Guess
from services.decode.lookup import Lookup
from services.decode.proposers import DRAFT_WORKER, Proposers
from services.decode.scheduler import DecodeScheduler, Progress
from services.decode.speculation import DraftBook
from services.decode.speculation_policy import SpeculationPolicy
from services.decode.step_costs import StepCosts
from tests.unit.scheduling import MAX_CONTEXT, VOCAB, Bench, Pipeline, sequence
from tests.unit.speculating import costs_of, flat_costs
from tests.unit.test_decode_scheduler import assert_right
from tests.unit.test_speculation import DECODE, drafter

LOOPING = TokenRule(12, repetition=0.9)
"""Few words, most of them decided by the one before: a text that repeats itself."""


class Garbage:
    """Proposes anything, and is sure of it."""

    name = "garbage"

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)

    def tokens(self, count: int) -> list[int]:
        return [self.dice.randrange(12) for _ in range(count)]

    def guess(self, sequence: Sequence, limit: int) -> Guess:
        tokens = self.tokens(self.dice.randrange(limit + 1))
        return Guess(tokens, [0.99] * len(tokens))

    def foresee(self, sequence: Sequence, limit: int) -> Foreseen:
        outcomes = [
            Outcome(
                self.dice.randrange(len(sequence.verifying) + 1), self.tokens(1)[0], self.tokens(self.dice.randrange(limit + 1))
            )
            for _ in range(self.dice.randrange(4))
        ]
        return Foreseen(outcomes, [0.99] * max((len(outcome.proposal) for outcome in outcomes), default=0))

    def open(self, sequence: Sequence) -> None: ...
    def record(self, sequence: Sequence, drafted: Drafted | None = None) -> None: ...
    def close(self, sequence: Sequence) -> None: ...
    def tidy(self) -> None: ...
    def reset(self) -> None: ...


def make_lookup() -> Lookup:
    return Lookup(max_tokens=4096, max_recent_tokens=4096)


def proposers_of(*drafters: Drafter, costs: StepCosts | None = None, max_tokens: int = 4) -> Proposers:
    policy = SpeculationPolicy(max_tokens=max_tokens, max_step_tokens=256, costs=costs or flat_costs())
    return Proposers(DraftBook(policy, vocab_size=VOCAB), drafters)


class World:
    """A scheduler that proposes as a decode worker's does; `depth`: steps in flight."""

    def __init__(self, proposers: Proposers, *, depth: int = 1, num_blocks: int = 100, rule: TokenRule | None = None) -> None:
        self.bench = Bench(num_blocks)
        if rule is not None:
            self.bench.runner.rule = rule
        self.proposers = proposers
        self.scheduler = DecodeScheduler(
            self.bench.cache,
            token_budget=64,
            max_running=8,
            max_context=MAX_CONTEXT,
            propose=proposers.propose,
            foresee=proposers.foresee,
            begin_step=proposers.begin_step,
        )
        self.pipeline = Pipeline(self.bench, self.scheduler, depth=depth)
        self.num_steps = 0

    def admit(self, s: Sequence) -> Sequence:
        self.scheduler.admit(s)
        self.proposers.open(s)
        return s

    def step(self) -> list[Progress] | None:
        progress = self.pipeline.step()
        for done in progress or ():
            self.proposers.record(done)
            if done.sequence.finish is not None:
                self.proposers.close(done.sequence)
        self.proposers.tidy()
        self.num_steps += progress is not None
        return progress

    def run(self) -> None:
        while self.step() is not None:
            pass


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"temperature": 0.7, "seed": 3}, {"temperature": 1.0, "top_p": 0.9}]
)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("drafters", [["lookup"], ["garbage"], ["garbage", "lookup"]], ids=" and ".join)
def test_no_drafter_changes_a_token(drafters: list[str], depth: int, sampling: dict[str, Any]) -> None:
    made: dict[str, Drafter] = {"lookup": make_lookup(), "garbage": Garbage(1)}
    worlds = [World(proposers_of(), depth=depth, rule=LOOPING)]
    worlds.append(World(proposers_of(*(made[name] for name in drafters)), depth=depth, rule=LOOPING))
    found: list[list[list[int]]] = []
    for world in worlds:
        running = [world.admit(sequence(name, [3, 4, 5, 6 + at], max_tokens=100, **sampling)) for at, name in enumerate("abc")]
        world.run()
        for s in running:
            assert_right(world.bench, s)
        assert world.bench.all_given_back()
        found.append([s.tokens for s in running])
    assert found[0] == found[1]
    assert sum(worlds[1].proposers.by_source[name].num_draft_tokens for name in drafters) > 20
    for world in worlds:
        saved = world.proposers.num_accepted_tokens  # one in a last step may lie behind the end
        assert 300 <= world.proposers.num_sequence_steps + saved <= 303
    if drafters == ["lookup"]:
        assert worlds[1].num_steps < 0.7 * worlds[0].num_steps, "a text that repeats itself takes fewer steps"


def run_random_lives(data: st.DataObject, world: World, before_steps: Callable[[], None] = lambda: None) -> None:
    """Sequences are admitted, preempted, cancelled in flight, and rewound after failed steps: those that end are right, and
    every block comes back."""
    kept: list[Sequence] = []
    for index in range(data.draw(st.integers(1, 8))):
        stop = data.draw(st.sampled_from([[], [5]]))
        penalty = data.draw(st.sampled_from([0.0, 0.0, 1.0]))
        s = sequence(f"r{index}", [3, 4, 5, 3, 4], max_tokens=30, stop_token_ids=stop, seed=index % 3, presence_penalty=penalty)
        try:
            world.admit(s)
        except (OutOfBlocks, OutOfCredits, ContextLengthExceeded):
            continue
        kept.append(s)
        before_steps()
        for _ in range(data.draw(st.integers(0, 4))):
            world.step()
        fate = data.draw(st.sampled_from(["run", "run", "cancel", "fail"]))
        world.pipeline.fill()
        if fate == "cancel":
            world.scheduler.cancel(s)
            world.proposers.close(s)
            kept.remove(s)
        elif fate == "fail":
            world.pipeline.flights.clear()
            world.scheduler.rewind()
    world.run()
    for s in kept:
        assert_right(world.bench, s)
        assert s.finish in ("length", "stop")
    assert world.bench.all_given_back()


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_whatever_happens_to_sequences_no_drafter_changes_a_token(data: st.DataObject) -> None:
    """Short of blocks, preempted, cancelled in flight, and failed steps; with a lookup that shares answers between requests."""
    proposers = proposers_of(make_lookup(), *([Garbage(2)] if data.draw(st.booleans()) else []))
    depth = data.draw(st.integers(1, 3))
    world = World(proposers, depth=depth, num_blocks=data.draw(st.integers(12, 40)), rule=LOOPING)
    run_random_lives(data, world)


@pytest.mark.parametrize("depth", [1, 2])
def test_what_is_verified_is_counted_by_who_proposed_it(depth: int) -> None:
    proposers = proposers_of(make_lookup(), Garbage(1))
    world = World(proposers, depth=depth, rule=LOOPING)
    for at, name in enumerate("abc"):
        world.admit(sequence(name, [3, 4, 5, 6 + at], max_tokens=60))
    proposed = accepted = 0
    while (progress := world.step()) is not None:
        proposed += sum(done.proposed for done in progress)
        accepted += sum(done.accepted for done in progress)
    assert list(proposers.by_source) == [DRAFT_WORKER, "lookup", "garbage"]
    assert (proposers.num_draft_tokens, proposers.num_accepted_tokens) == (proposed, accepted)
    lookup, garbage = proposers.by_source["lookup"], proposers.by_source["garbage"]
    assert lookup.num_draft_tokens > 0 and garbage.num_draft_tokens > 0
    assert proposers.by_source[DRAFT_WORKER].num_draft_tokens == 0
    assert lookup.num_accepted_tokens > 0.5 * lookup.num_draft_tokens > garbage.num_accepted_tokens


def with_draft_worker(tokens: list[int], proposal: list[int]) -> tuple[Proposers, Sequence]:
    """A sequence with a lookup, and a draft worker's proposal."""
    proposers = proposers_of(make_lookup())
    worker = drafter("draft-1")
    proposers.drafts.set_workers([worker])
    s = sequence("a", tokens)
    proposers.open(s)
    proposers.tidy()
    proposers.drafts.messages(DECODE)
    proposers.drafts.on_proposals(Proposals(draft=worker.worker, rows=[DraftRow("a", len(tokens), proposal)]))
    proposers.begin_step([s])
    return proposers, s


def test_the_offer_with_more_expected_tokens_is_verified() -> None:
    words = list(range(10, 40))
    proposers, s = with_draft_worker([*words, 1, *words[:12]], [50, 51])
    assert proposers.propose(s, 4) == words[12:16], "a long match"
    proposers, s = with_draft_worker([*words, 1, 10, 11], [50, 51, 52, 53])
    assert proposers.propose(s, 4) == [50, 51, 52, 53], "a short one"
    assert proposers.propose(s, 2) == [50, 51]
    proposers, s = with_draft_worker([1, 2, 3], [50, 51])
    assert proposers.propose(s, 4) == [50, 51], "none"


def test_a_draft_workers_acceptance_is_not_that_of_the_lookup() -> None:
    words = list(range(10, 40))
    proposers, s = with_draft_worker([*words, 1, *words[:12]], [50, 51])
    rate = proposers.drafts.pace_of("a").rate
    assert proposers.propose(s, 4)
    s.tokens += words[12:17]
    proposers.record(Progress(s, 0, 4, 4))
    assert proposers.drafts.pace_of("a").rate < rate, "its own proposal was compared and was wrong"
    assert (proposers.by_source["lookup"].num_accepted_tokens, proposers.drafts.counters.num_draft_tokens) == (4, 0)


def test_what_does_not_pay_is_not_verified() -> None:
    """Where each token of a step costs as much as the first, no chance is high enough."""
    proposers = proposers_of(make_lookup(), costs=costs_of(lambda size: 0.01 * size))
    world = World(proposers, rule=LOOPING)
    world.admit(sequence("a", [3, 4, 5], max_tokens=100))
    world.run()
    assert proposers.num_draft_tokens == 0


def test_chances_a_token_are_weighed_against_rates_a_sequence() -> None:
    policy = SpeculationPolicy(max_tokens=4, max_step_tokens=1000, costs=costs_of(lambda size: 0.01 if size <= 8 else 1.0))
    pace = policy.pace()
    pace.rate = 0.5
    ladder = [0.9, 0.8, 0.7, 0.6, 0.5]
    policy.begin_step(3, [pace.rate], [ladder])
    assert (policy.worth(ladder), policy.length(pace)) == (4, 1), "five tokens have room, the likeliest"
    policy.begin_step(3, [], [[0.9, 0.0]])
    assert policy.worth([0.9, 0.0]) == 1, "a token without a chance is not worth its place, even where it costs nothing"
    policy.begin_step(3, [], [])
    assert policy.worth(ladder) == 0
