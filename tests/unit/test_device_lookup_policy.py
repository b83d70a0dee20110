"""Lookup in the engine's steps: no token is another one, it runs where it pays, and it costs little where it does not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.plan import LookedUp
from common.engine.sequence import Sequence
from common.engine.simulated.runner import TokenRule
from common.protocol.draft_messages import DraftRow, Proposals
from services.decode.device_lookup import DeviceLookup
from services.decode.proposers import DRAFT_WORKER, Proposers
from services.decode.scheduler import Progress
from services.decode.speculation import DraftBook
from services.decode.speculation_policy import SpeculationPolicy
from services.decode.step_costs import StepCosts
from tests.unit.looking_up import LookingUpRunner, look_up_in
from tests.unit.scheduling import VOCAB, sequence
from tests.unit.speculating import costs_of, flat_costs
from tests.unit.test_decode_scheduler import assert_right
from tests.unit.test_proposers import LOOPING, Garbage, World, run_random_lives
from tests.unit.test_speculation import DECODE, drafter


def looking_up(*drafters: Any, costs: StepCosts | None = None, max_tokens: int = 4, always: bool = False) -> Proposers:
    policy = SpeculationPolicy(max_tokens=max_tokens, max_step_tokens=256, costs=costs or flat_costs(), always=always)
    return Proposers(DraftBook(policy, vocab_size=VOCAB), drafters, on_device=DeviceLookup(policy))


def world_of(proposers: Proposers, *, depth: int = 2, num_blocks: int = 100, rule: TokenRule | None = LOOPING) -> World:
    world = World(proposers, depth=depth, num_blocks=num_blocks, rule=rule)
    look_up_in(world.bench)
    world.scheduler.room_for = proposers.room_for
    return world


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"temperature": 0.7, "seed": 3}, {"temperature": 1.0, "top_p": 0.9}]
)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("always", [False, True])
def test_no_token_changes_and_a_text_that_repeats_itself_takes_fewer_steps(
    always: bool, depth: int, sampling: dict[str, Any]
) -> None:
    worlds = [World(Proposers(DraftBook(SpeculationPolicy(max_tokens=4, max_step_tokens=256), vocab_size=VOCAB)), depth=depth)]
    worlds[0].bench.runner.rule = LOOPING
    worlds.append(world_of(looking_up(always=always), depth=depth))
    found: list[list[list[int]]] = []
    for world in worlds:
        running = [world.admit(sequence(name, [3, 4, 5, 6 + at], max_tokens=100, **sampling)) for at, name in enumerate("abc")]
        world.run()
        for s in running:
            assert_right(world.bench, s)
        assert world.bench.all_given_back()
        found.append([s.tokens for s in running])
    assert found[0] == found[1]
    assert worlds[1].num_steps < 0.8 * worlds[0].num_steps


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whatever_happens_to_sequences_no_token_changes(data: st.DataObject) -> None:
    """Short of blocks, preempted, cancelled in flight, failed steps, texts that are not on the device, penalties that rule
    lookup out, and drafters beside it."""
    proposers = looking_up(*([Garbage(2)] if data.draw(st.booleans()) else []), always=data.draw(st.booleans()))
    world = world_of(proposers, depth=data.draw(st.integers(1, 2)), num_blocks=data.draw(st.integers(12, 40)))
    runner = world.bench.runner
    assert isinstance(runner, LookingUpRunner)

    def miss_some() -> None:
        runner.misses = frozenset(data.draw(st.sampled_from([(), (), (1, 2), (0, 1, 2, 3, 4, 5, 6)])))

    run_random_lives(data, world, miss_some)


@pytest.mark.parametrize("depth", [1, 2])
def test_what_is_verified_is_counted_by_who_proposed_it(depth: int) -> None:
    proposers = looking_up(Garbage(1))
    world = world_of(proposers, depth=depth)
    for at, name in enumerate("abc"):
        world.admit(sequence(name, [3, 4, 5, 6 + at], max_tokens=100))
    proposed = accepted = 0
    while (progress := world.step()) is not None:
        proposed += sum(done.proposed for done in progress)
        accepted += sum(done.accepted for done in progress)
    assert list(proposers.by_source) == [DRAFT_WORKER, "garbage", "lookup"]
    assert (proposers.num_draft_tokens, proposers.num_accepted_tokens) == (proposed, accepted)
    assert all(proposers.by_source[name].num_draft_tokens for name in ("garbage", "lookup"))


def test_where_each_token_costs_as_much_as_the_first_nothing_is_verified() -> None:
    proposers = looking_up(costs=costs_of(lambda size: 0.01 * size))
    world = world_of(proposers)
    world.admit(sequence("a", [3, 4, 5], max_tokens=100))
    world.run()
    assert proposers.num_draft_tokens == 0


def searched(proposers: Proposers, s: Sequence, came: list[int], found: LookedUp) -> None:
    """A step of one row."""
    assert proposers.room_for(s, 4).is_searched
    start = s.num_outputs
    s.tokens += came
    proposers.record(Progress(s, start, 0, 0, looked_up=found))
    proposers.begin_step([s])


MATCH = LookedUp(0, 6, 1, 1, [50, 51, 52, 53, 54, 55, 56, 57])
NOTHING = LookedUp(0, 0, 0, 0, [])


def test_a_row_has_room_once_a_copy_has_held_and_as_long_as_it_does() -> None:
    proposers = looking_up()
    s = sequence("a", [1, 2, 3], max_tokens=100)
    proposers.open(s)
    proposers.begin_step([s])
    assert proposers.room_for(s, 4).num_tokens == 0
    searched(proposers, s, [50], MATCH)
    assert proposers.room_for(s, 4).num_tokens == 4
    assert proposers.room_for(s, 2).num_tokens == 2
    searched(proposers, s, [60], MATCH)
    assert proposers.room_for(s, 4).num_tokens == 0, "the match led elsewhere"
    searched(proposers, s, [61], NOTHING)
    assert proposers.room_for(s, 4).num_tokens == 0


def test_matches_that_lead_elsewhere_lose_their_chance() -> None:
    proposers = looking_up(costs=costs_of(lambda size: 0.01 + 0.004 * size))
    s = sequence("a", [1, 2, 3], max_tokens=10_000)
    proposers.open(s)
    proposers.begin_step([s])
    rooms: list[int] = []
    for _ in range(60):
        searched(proposers, s, [50], MATCH)  # what held once does not go on
        rooms.append(proposers.room_for(s, 4).num_tokens)
        searched(proposers, s, [60], MATCH)
    assert rooms[0] > 0
    assert rooms[-1] == 0


@pytest.mark.parametrize(
    ("num_rows", "patience", "share", "longest"), [(1, 64, 0.4, 64), (64, 64, 0.4, 64), (256, 16, 0.06, 256)]
)
def test_a_text_without_matches_pauses_and_is_searched_again(num_rows: int, patience: int, share: float, longest: int) -> None:
    """Where there are many rows it pauses sooner, and for longer."""
    proposers = looking_up()
    s = sequence("a", [1, 2, 3], max_tokens=10_000)
    others = [sequence(f"b{index}", [1, 2, 3], max_tokens=10) for index in range(num_rows - 1)]
    proposers.open(s)
    awake: list[bool] = []
    for _ in range(900):
        proposers.begin_step([s, *others])
        awake.append(proposers.room_for(s, 4).is_searched)
        s.tokens.append(7)
        proposers.record(Progress(s, s.num_outputs - 1, 0, 0, looked_up=NOTHING if awake[-1] else None))
    assert all(awake[:patience]) and not awake[patience]
    assert 0.7 * share < sum(awake) / len(awake) < 1.3 * share
    naps = "".join("x" if one else "." for one in awake).split("x")
    assert max(map(len, naps)) == longest


def test_the_better_offer_is_verified() -> None:
    def offered(length: int, proposal: list[int]) -> tuple[Proposers, Sequence]:
        proposers = looking_up()
        worker = drafter("draft-1")
        proposers.drafts.set_workers([worker])
        s = sequence("a", [1, 2, 3], max_tokens=100)
        proposers.open(s)
        proposers.drafts.messages(DECODE)
        searched(proposers, s, [50], MATCH._replace(length=length))
        proposers.drafts.on_proposals(Proposals(draft=worker.worker, rows=[DraftRow("a", 3, [50, *proposal])]))
        proposers.begin_step([s])
        return proposers, s

    proposers, s = offered(20, [70, 71])
    assert proposers.room_for(s, 4).num_tokens == 4, "a long match"
    proposers, s = offered(2, [70, 71, 72, 73])
    assert proposers.room_for(s, 4).num_tokens == 0, "a short one"
    assert proposers.propose(s, 4) == [70, 71, 72, 73]


def test_a_draft_workers_outcomes_hold_behind_a_row_that_was_looked_up() -> None:
    """The host does not know what is verified: an outcome that says that nothing of it holds may still come true."""
    proposers = looking_up()
    worker = drafter("draft-1")
    proposers.drafts.set_workers([worker])
    s = sequence("a", [1, 2, 3], max_tokens=100)
    proposers.open(s)
    proposers.drafts.messages(DECODE)
    searched(proposers, s, [50], MATCH)
    room = proposers.room_for(s, 4)
    s.plan(1, [], 0, room=room)
    proposers.drafts.on_proposals(Proposals(draft=worker.worker, rows=[DraftRow("a", 3, [50, 80, 81, 82])]))
    (outcome,) = proposers.drafts.foresee("a", s.verifying, 4)
    assert outcome == (0, 80, [81, 82])
