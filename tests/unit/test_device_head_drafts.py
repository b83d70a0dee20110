"""A head in a GPU's steps drafts where its time pays, and hardly costs anything where it does not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from common.engine.board import BOARD_SLOTS, HEAD_SLOTS, HeadSlots
from common.engine.plan import UNKNOWN, DraftPass, Taken
from common.ops.sampling.board_layout import LINE_TOKENS
from services.decode.device_head import CONTEXT_TOKENS, DeviceHeadDrafts
from services.decode.proposers import Proposers
from services.decode.scheduler import Progress
from services.decode.speculation import DraftBook
from services.decode.speculation_policy import SpeculationPolicy
from services.decode.step_costs import SIZES, StepCosts
from tests.fixtures.slow import some_slow
from tests.unit.scheduling import VOCAB, sequence
from tests.unit.speculating import flat_costs

MOST = 7
PASS_S = 0.0002
CURVES: dict[str, Callable[[int], float]] = {
    "an 8B model on an H200": lambda size: 0.004 + 0.00003 * size,
    "a small model": lambda size: 0.001 + 0.00001 * size,
    "every token costs a tenth of a step": lambda size: 0.004 + 0.0004 * size,
}


def simulate(
    rows: int,
    curve: Callable[[int], float],
    rate: float,
    *,
    depth: int | None = None,
    steps: int = 2000,
    host_s: float = 0.0,
) -> tuple[float, DeviceHeadDrafts]:
    """Return tokens per second, and the drafts. rate: the chance that a drafted token holds behind one that does. depth: so
    many are drafted and verified in each step, whatever seems best. host_s: what a step with drafts takes the host longer."""
    dice = random.Random(f"{rows} {rate} {depth}")
    policy = SpeculationPolicy(max_tokens=MOST, max_step_tokens=256, costs=StepCosts())
    head = DeviceHeadDrafts(policy, HeadSlots())
    proposers = Proposers(DraftBook(policy, vocab_size=VOCAB), device_head=head)
    running = [sequence(f"r{row}", [1, 2, 3], max_tokens=1 << 20) for row in range(rows)]
    for each in running:
        proposers.open(each)
    offered, drafting_s, seconds, tokens = dict.fromkeys(running, 0), 0.0, 0.0, 0
    for _ in range(steps):
        for s in running:
            s.num_awaited = 1
        proposers.begin_step(running)
        rooms = {s: proposers.room_for(s, MOST).num_tokens if depth is None else depth for s in running}
        wanted = {s: max(0, head.wanted(s)[0]) if depth is None else depth for s in running}
        size = rows + sum(rooms.values())
        took = curve(next(one for one in (*SIZES, size) if one >= size)) * dice.lognormvariate(0, 0.05)
        took += host_s * (any(rooms.values()) or any(wanted.values()))
        if size > rows or not any(wanted.values()):  # as `Proposers.measure`
            policy.costs.observe(size, took)
        seconds += took + drafting_s
        for s in running:
            taken = min(rooms[s], offered[s])
            accepted = next((place for place in range(taken) if dice.random() >= rate), taken)
            s.num_awaited = 0
            s.tokens += [4] * (accepted + 1)
            tokens += accepted + 1
            report = Taken([UNKNOWN] * taken, offered[s]) if rooms[s] else None
            proposers.record(Progress(s, 0, taken, accepted, taken=report))
        drafted = [count for count in wanted.values() if count]
        passes = [DraftPass(len(drafted), PASS_S * dice.lognormvariate(0, 0.05)) for _ in range(max(drafted, default=0))]
        drafting_s = sum(one.seconds for one in passes)
        head.ran(passes)
        offered = {s: max(wanted.values()) if wanted[s] else 0 for s in running}
    return tokens / seconds, head


@pytest.mark.parametrize("rate", some_slow([0.0, 0.3, 0.7, 0.95], quick=[0.3, 0.95]))
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("name", list(CURVES))
def test_it_is_never_slower_and_nearly_as_fast_as_the_best_depth(name: str, rows: int, rate: float) -> None:
    found, head = simulate(rows, CURVES[name], rate)
    fixed = [simulate(rows, CURVES[name], rate, depth=depth, steps=500)[0] for depth in range(MOST + 1)]
    assert found >= 0.97 * fixed[0], (found, fixed, head.num_probes)
    assert found >= 0.9 * max(fixed), (found, fixed)


@pytest.mark.parametrize("rate", [0.3, 0.7])
def test_a_model_whose_steps_wait_for_the_host_is_no_slower(rate: float) -> None:
    """A step that is advanced on the device takes a fraction of one that is planned with drafts."""
    found, _ = simulate(1, CURVES["a small model"], rate, host_s=0.0015)
    fixed = [simulate(1, CURVES["a small model"], rate, depth=depth, steps=500, host_s=0.0015)[0] for depth in range(MOST + 1)]
    assert found >= 0.97 * fixed[0], (found, fixed)
    assert found >= 0.9 * max(fixed), (found, fixed)


def test_a_head_that_is_always_wrong_is_hardly_asked() -> None:
    _, head = simulate(1, CURVES["an 8B model on an H200"], 0.0)
    assert head.num_drafted < 250
    assert head.num_probes < 80


def asked(head: DeviceHeadDrafts, *sequences: Any, others: dict[str, float] | None = None) -> list[int]:
    """How many tokens are drafted behind a row of each in a step that is planned now."""
    for s in sequences:
        s.num_awaited = 1
    head.begin_step(sequences, others or {})
    return [head.wanted(s)[0] for s in sequences]


def test_slots_go_to_as_many_sequences_as_there_are_and_come_back() -> None:
    slots = HeadSlots()
    head = DeviceHeadDrafts(SpeculationPolicy(max_tokens=4, max_step_tokens=256, always=True), slots)
    many = [sequence(f"r{index}", [1, 2, 3]) for index in range(HEAD_SLOTS + 2)]
    for s in many:
        head.open(s)
    assert [s.board for s in many[:HEAD_SLOTS]] == list(range(BOARD_SLOTS, BOARD_SLOTS + HEAD_SLOTS))
    assert [s.board for s in many[HEAD_SLOTS:]] == [-1, -1]
    assert asked(head, *many[-3:]) == [4, -1, -1]
    head.close(many[0])
    head.close(many[0])
    assert many[0].board == -1
    head.open(many[-1])
    assert many[-1].board == BOARD_SLOTS
    head.reset()
    assert sorted(slots.take() for _ in range(HEAD_SLOTS)) == list(range(BOARD_SLOTS, BOARD_SLOTS + HEAD_SLOTS))
    assert slots.take() == -1


def test_another_attempt_at_a_request_gives_the_slot_of_the_one_before_back() -> None:
    slots = HeadSlots()
    head = DeviceHeadDrafts(SpeculationPolicy(max_tokens=4, max_step_tokens=256, always=True), slots)
    for _ in range(3 * HEAD_SLOTS):
        s = sequence("same", [1, 2, 3])
        head.open(s)
        assert s.board >= BOARD_SLOTS


def test_states_are_computed_of_texts_that_are_drafted_for() -> None:
    """Whose prompt was computed elsewhere."""
    policy = SpeculationPolicy(max_tokens=4, max_step_tokens=256, costs=flat_costs())
    head = DeviceHeadDrafts(policy, HeadSlots())
    assert not Proposers(DraftBook(policy, vocab_size=VOCAB)).recompute(sequence("none", [1, 2, 3], max_tokens=100))
    texts = {
        "drafted": sequence("a", [1, 2, 3], max_tokens=100),
        "short": sequence("b", [1, 2, 3], max_tokens=10),
        "penalties": sequence("c", [1, 2, 3], max_tokens=100, presence_penalty=1.0),
    }
    for text in texts.values():
        head.open(text)
    head._pays = False
    resting = sequence("d", [1, 2, 3], max_tokens=100)
    head.open(resting)
    stranger = sequence("e", [1, 2, 3], max_tokens=100)
    again = [head.recompute(text) for text in (*texts.values(), resting, stranger)]
    assert again == [CONTEXT_TOKENS, 0, 0, 0, 0]
    proposers = Proposers(DraftBook(policy, vocab_size=VOCAB), device_head=head)
    assert proposers.recompute(texts["drafted"]) == CONTEXT_TOKENS


def test_who_copies_is_not_drafted_for_and_nobody_in_a_crowd() -> None:
    head = DeviceHeadDrafts(SpeculationPolicy(max_tokens=4, max_step_tokens=256, costs=flat_costs()), HeadSlots())
    one, other = sequence("a", [1, 2, 3]), sequence("b", [1, 2, 3])
    head.open(one)
    head.open(other)
    drafts, none = asked(head, one, other, others={"b": 3.9})
    assert drafts > 0 and none == -1
    crowd = [sequence(f"r{index}", [1]) for index in range(HEAD_SLOTS)]
    assert asked(head, one, *crowd) == [-1] * (HEAD_SLOTS + 1)


def test_a_row_has_room_for_what_is_drafted_behind_the_one_before() -> None:
    head = DeviceHeadDrafts(SpeculationPolicy(max_tokens=4, max_step_tokens=256, always=True), HeadSlots())
    s = sequence("a", [1, 2, 3])
    head.open(s)
    assert not head.chances(s), "nothing is in flight"
    assert asked(head, s) == [4]
    assert len(head.chances(s)) == 4
    s.num_awaited = 0
    assert not head.chances(s), "a row that is not fed takes nothing from the board"
    constrained = sequence("b", [1, 2, 3], presence_penalty=1.0)
    head.open(constrained)
    asked(head, constrained)
    constrained.num_awaited = 1
    assert not head.chances(constrained), "penalties depend on what holds"


def test_only_logits_that_are_not_finite_are_counted() -> None:
    """Nothing is posted behind a text that ends, either, or behind steps of many rows."""
    head = DeviceHeadDrafts(SpeculationPolicy(max_tokens=4, max_step_tokens=256, costs=flat_costs()), HeadSlots())
    s = sequence("a", [1, 2, 3])
    head.open(s)
    head.record(s, Taken([], 0, is_cut=True), 0)
    head.record(s, Taken([], 0), 0)
    head.record(s, None, 0)
    assert head.num_invalid == 1


def test_no_more_is_drafted_than_a_line_holds() -> None:
    head = DeviceHeadDrafts(SpeculationPolicy(max_tokens=63, max_step_tokens=256, always=True), HeadSlots())
    s = sequence("a", [1, 2, 3])
    head.open(s)
    assert asked(head, s) == [LINE_TOKENS - 1]
    assert len(head.chances(s)) == LINE_TOKENS - 1
