"""What draft workers propose is posted until the step that verifies it begins: no token is another one for that."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from common.engine.board import BOARD_SLOTS, ProposalBoard
from common.engine.plan import UNKNOWN, StepPlan, StepRow, Taken
from common.engine.sequence import Sequence
from common.ops.sampling.board_layout import BOARD_WORDS, LINES
from common.protocol.draft_messages import DraftBranch, DraftRow, DraftUpdate, Proposals
from common.protocol.messages import SamplingParams
from services.decode.actor import DecodeActor
from services.decode.posting import Posting
from services.decode.proposers import DRAFT_WORKER, Proposers
from services.decode.scheduler import Progress
from services.decode.speculation import FEW_SEQUENCES, DraftBook
from services.decode.speculation_policy import SpeculationPolicy
from tests.unit.scheduling import VOCAB, sequence
from tests.unit.speculating import costs_of, flat_costs
from tests.unit.taking_posts import TakingRunner
from tests.unit.test_decode_scheduler import assert_right
from tests.unit.test_proposers import World
from tests.unit.test_speculation import DECODE, drafter

WORKER = drafter("draft-1", credits=64)


class Site:
    """A book with a draft worker, a board and the proposers on both."""

    def __init__(self, board: ProposalBoard | None = None, *, costs: Any = None, always: bool = False) -> None:
        self.words = np.zeros((BOARD_SLOTS, BOARD_WORDS), np.int32)
        policy = SpeculationPolicy(max_tokens=4, max_step_tokens=256, costs=costs or flat_costs(), always=always)
        self.drafts = DraftBook(policy, vocab_size=VOCAB)
        self.drafts.set_workers([WORKER])
        self.proposers = Proposers(self.drafts, posting=Posting(board or ProposalBoard(self.words), self.drafts))

    def propose(self, row: DraftRow, table: list[DraftBranch] | None = None) -> None:
        tables = {row.sequence: table} if table else {}
        self.proposers.on_proposals(Proposals(draft=WORKER.worker, rows=[row], tables=tables))

    def awaited(self, name: str = "a", **sampling: Any) -> Sequence:
        """Return a sequence with a step in flight, mirrored by the worker."""
        found = sequence(name, [1, 2, 3], **{"max_tokens": 100} | sampling)
        self.proposers.open(found)
        self.drafts.messages(DECODE)
        found.plan(3, [], 0)
        return found

    def lines(self, slot: int) -> list[list[int]]:
        words = self.words[slot].tolist()
        return [words[1 + LINES + 16 * index :][:length] for index, length in enumerate(words[1 : 1 + LINES]) if length]


def test_a_row_has_room_before_anything_is_proposed_and_what_comes_is_posted() -> None:
    site = Site()
    s = site.awaited()
    site.proposers.begin_step([s])
    room = site.proposers.room_for(s, 9)
    assert (room.num_tokens, room.is_posted, room.is_searched) == (4, True, False)
    row = s.plan(1, [], 1, (), room)
    assert (row.board, row.is_posted, row.tokens) == (s.board, True, [UNKNOWN, 0, 0, 0, 0])
    assert site.words[s.board, 0] == 3
    site.propose(DraftRow("a", 3, [7, 8, 9]), [DraftBranch(1, [5, 6])])
    assert site.lines(s.board) == [[7, 8, 9], [7, 5, 6]]
    s.tokens.append(7)  # the step in flight has run
    site.proposers.record(Progress(s, 0, 0, 0, taken=None))
    assert site.words[s.board, 0] == 4
    assert site.lines(s.board) == [[8, 9], [5, 6]]
    s.tokens.append(5)
    site.proposers.record(Progress(s, 1, 2, 0, taken=Taken([8, 9], 2)))
    assert site.lines(s.board) == [[6]], "the table has what came instead"


def test_rows_are_asked_while_a_draft_worker_may_propose_for_them() -> None:
    site = Site()
    running = [site.awaited(name) for name in ("a", "b")]
    assert site.proposers.begin_step(running) == set(running)
    site.drafts.trial.asking = False  # type: ignore[misc]
    assert site.proposers.begin_step(running) == set()
    site.propose(DraftRow("b", 3, [7, 8]))
    assert site.proposers.begin_step(running) == {running[1]}


def test_room_follows_what_was_there_when_steps_began() -> None:
    """Each token of a step costs a tenth of a row: one that is never there is not given room."""
    site = Site(costs=costs_of(lambda size: 0.01 + 0.001 * size))
    s = site.awaited()
    rooms: list[int] = []
    for _ in range(60):
        site.proposers.begin_step([s])
        rooms.append(site.proposers.room_for(s, 9).num_tokens)
        s.tokens += [7, 7]
        site.proposers.record(Progress(s, s.num_outputs - 2, 1, 1, taken=Taken([7], 1)))
    assert (rooms[0], rooms[-1]) == (4, 1)


def test_slots_come_back_and_others_do_without() -> None:
    site = Site()
    running = [site.awaited(f"s{index}") for index in range(FEW_SEQUENCES)]
    site.proposers.begin_step(running)
    assert len({s.board for s in running}) == FEW_SEQUENCES
    assert all(site.proposers.room_for(s, 9).is_posted for s in running)
    one_more = site.awaited("more")
    site.proposers.begin_step([*running, one_more])
    assert not any(site.proposers.room_for(s, 9).is_posted for s in running), "too many to post for"
    site.proposers.close(running[0])
    site.proposers.close(running[0])
    assert running[0].board == -1
    site.proposers.begin_step([*running[1:], one_more])
    assert site.proposers.room_for(one_more, 9).is_posted
    site.proposers.reset()
    assert one_more.board == -1
    assert site.proposers.posting is not None
    assert [site.proposers.posting._board.take() for _ in range(BOARD_SLOTS)].count(-1) == 0


def test_a_later_attempt_at_a_request_has_a_slot_of_its_own_and_keeps_it() -> None:
    site = Site()
    first = site.awaited("a")
    site.proposers.begin_step([first])
    second = site.awaited("a")
    site.proposers.begin_step([second])
    assert first.board == -1 and second.board >= 0
    posting = site.proposers.posting
    assert posting is not None
    posting.close(first)
    assert second.board >= 0
    posting.close(second)
    assert sorted(posting._board.take() for _ in range(BOARD_SLOTS)) == list(range(BOARD_SLOTS))


def test_who_must_know_what_is_verified_takes_nothing_from_the_board() -> None:
    site = Site()
    for name, sampling in (("penalised", {"repetition_penalty": 1.2}), ("short", {"min_tokens": 9})):
        s = site.awaited(name, **sampling)
        site.proposers.begin_step([s])
        assert not site.proposers.room_for(s, 9).is_posted
    fresh = sequence("b", [1, 2, 3], max_tokens=100)
    site.proposers.open(fresh)
    site.proposers.begin_step([fresh])
    assert not site.proposers.room_for(fresh, 9).is_posted, "no step is in flight"


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.7, "seed": 3}])
@pytest.mark.parametrize(("wrong", "num_blocks"), [(0.0, 100), (0.3, 100), (0.3, 24)])
def test_no_token_changes_and_right_proposals_save_steps(sampling: dict[str, Any], wrong: float, num_blocks: int) -> None:
    """Proposals come at any time; texts are preempted where blocks are few."""
    plain = World(Site().proposers, depth=2)
    names = "abc"

    def admitted(world: World) -> list[Sequence]:
        return [world.admit(sequence(name, [3, 4, 5, 6 + at], max_tokens=60, **sampling)) for at, name in enumerate(names)]

    expected = admitted(plain)
    plain.run()
    whole = {s.request: s.tokens for s in expected}
    site = Site(always=True)
    world = World(site.proposers, depth=2, num_blocks=num_blocks)
    runner = world.bench.runner
    runner.__class__ = TakingRunner
    assert isinstance(runner, TakingRunner)
    site.proposers.posting = Posting(runner.board, site.drafts)
    world.scheduler.room_for = site.proposers.room_for
    running, draws = admitted(world), random.Random(4)
    taken: list[Taken] = []
    while (progress := world.step()) is not None:
        taken += [done.taken for done in progress if done.taken is not None]
        for _, message in site.drafts.messages(DECODE):
            for row in message.rows if isinstance(message, DraftUpdate) else []:
                known = row.base + len(row.tokens)
                guess = [t if draws.random() >= wrong else (t + 1) % VOCAB for t in whole[row.sequence][known : known + 9]]
                if draws.random() < 0.9:
                    site.propose(DraftRow(row.sequence, known, guess))
    for s in running:
        assert_right(world.bench, s)
    assert [s.tokens for s in running] == [whole[s.request] for s in running]
    assert site.proposers.by_source[DRAFT_WORKER].num_accepted_tokens > 20
    assert world.bench.all_given_back()
    assert sum(len(one.tokens) for one in taken) > 20
    assert num_blocks > 24 or world.scheduler.num_preemptions > 0
    if not wrong:
        assert world.num_steps < 0.6 * plain.num_steps


@pytest.mark.parametrize(
    ("rows", "expects", "constrained", "at_hand"),
    [
        (8, True, False, True),
        (8, False, False, False),
        (8, True, True, False),
        (16, True, False, True),
        (17, True, False, False),
    ],
)
def test_the_event_loop_submits_small_steps_that_draft_workers_wait_for(
    rows: int, expects: bool, constrained: bool, at_hand: bool
) -> None:
    row = StepRow([1] * 8, 40, [0, 1, 2], 8, SamplingParams(), 32)
    mask: Any = object()
    last = msgspec.structs.replace(row, constraint=mask) if constrained else row
    worker: Any = SimpleNamespace(drafts=SimpleNamespace(expects_proposals=expects))
    assert DecodeActor.is_at_hand(worker, StepPlan(1, [*[row] * (rows - 1), last])) is at_hand
