"""Drafting with a model: whatever updates say, proposals are what the model would write, and every block comes back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.cache.grouped_pool import GroupedPool, PoolGroup
from common.cache.pool import BlockPool
from common.cache.retention import KEEP_ALL, Retention
from common.engine.plan import NO_TOKEN, RowSamples, StepPlan, StepResult
from common.engine.simulated.runner import BYTES_PER_TOKEN, SimulatedRunner, TokenRule
from common.protocol.draft_messages import DraftBranch, DraftRow, DraftSampling, Proposals
from common.protocol.errors import ProtocolError
from common.protocol.handles import WorkerRef
from common.protocol.messages import SamplingParams
from services.draft.branches import Branches
from services.draft.choices import GREEDY_TOP_TOKENS, TOP_TOKENS
from services.draft.drafting import Drafter
from services.draft.flights import Flights
from services.draft.proposer import MirrorKey

VOCAB = 50
BLOCK = 4
WORKERS = (WorkerRef("decode", "one", 1), WorkerRef("decode", "two", 1))


class Site:
    """A drafter, the simulated engine that computes its steps, and what became of the sequences on the decode side."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        max_sequences: int = 8,
        max_drafted: int = 5,
        token_budget: int = 32,
        retentions: Iterable[Retention] = (KEEP_ALL,),
        num_branches: int = 0,
        branches_beside: bool = True,
        ahead: str = "",
        stay_tokens: int = 0,
    ) -> None:
        """ahead: steps are planned while one is in the air, and read their rows "early" or "late", just before results are
        taken: a thread may pack a row after the drafter has gone on."""
        self.ahead = ahead
        self.flights: deque[tuple[StepPlan, StepResult | None]] = deque()
        groups = list(retentions)
        storages = [np.zeros((num_blocks, BLOCK * BYTES_PER_TOKEN), np.uint8) for _ in groups]
        self.runner = SimulatedRunner(
            "instant",
            storage=storages[0],
            block_tokens=BLOCK,
            max_context=400,
            vocab_size=VOCAB,
            fingerprint="simulated",
            time_scale=0,
            rule=TokenRule(VOCAB, reads=groups[0]),
            more=list(zip(storages[1:], groups[1:], strict=True)),
        )
        self.pool = GroupedPool(*(PoolGroup(BlockPool(num_blocks, BLOCK), retention) for retention in groups))
        self.drafter = Drafter(
            self.pool,
            max_sequences=max_sequences,
            max_drafted=max_drafted,
            token_budget=token_budget,
            max_context=400,
            vocab_size=VOCAB,
            num_branches=num_branches,
            branch_tokens=3,
            branches_beside=branches_beside,
            stay_tokens=stay_tokens,
        )
        self.plans: list[StepPlan] = []

    def step(self) -> list[MirrorKey] | None:
        """Plan what can be planned and take the oldest step's result, unless another may be planned before that."""
        planned = self.launch()
        if not self.flights:
            return None
        return [] if planned and self.ahead and len(self.flights) < 2 else self.land()

    def launch(self) -> bool:
        plan = self.drafter.plan()
        if plan is not None:
            self.plans.append(plan)
            self.flights.append((plan, None if self.ahead == "late" else self.runner.execute(plan)))
        return plan is not None

    def land(self) -> list[MirrorKey]:
        plan, result = self.flights.popleft()
        return self.drafter.commit(plan, result or self.runner.execute(plan))

    def settle(self) -> None:
        """Step until nothing is left to draft."""
        for _ in range(5000):
            if self.step() is None:
                return
            self.drafter.check()
        raise AssertionError("it never settles")

    def expected(self, tokens: list[int], seed: int, count: int = 5) -> list[int]:
        return self.runner.expected_tokens(tokens, sampled(seed), count)

    @property
    def computed_tokens(self) -> int:
        return sum(plan.num_tokens for plan in self.plans)


def sampled(seed: int) -> SamplingParams:
    return SamplingParams(seed=seed, temperature=0.8)


def sampling(seed: int) -> DraftSampling:
    return DraftSampling(seed=seed, temperature=0.8)


def key(index: int) -> MirrorKey:
    return WORKERS[index % 2], str(index)


OPERATION = st.tuples(
    st.sampled_from(
        ["open", "agree", "disagree", "branch", "branch", "shrink", "gap", "close", "lost worker", "step", "step", "step"]
    ),
    st.integers(0, 5),
    st.integers(0, 30),
)

LIVELOCK = [
    *[
        ("step", 2, 16),
        ("disagree", 3, 18),
        ("step", 2, 16),
        ("step", 0, 30),
        ("close", 2, 18),
        ("step", 4, 11),
        ("step", 1, 10),
    ],
    *[
        ("close", 4, 7),
        ("branch", 3, 29),
        ("gap", 4, 16),
        ("close", 2, 2),
        ("branch", 4, 3),
        ("disagree", 3, 18),
        ("step", 0, 11),
    ],
]
"""Branches went for a mirror that lacked blocks, in each step, and began anew at once: their steps held what it lacked."""


@given(
    st.lists(OPERATION, max_size=80),
    st.integers(12, 60),
    st.sampled_from(["all", "window", "chunk"]),
    st.sampled_from([0, 4]),
    st.booleans(),
    st.sampled_from(["", "early", "late"]),
    st.sampled_from([0, 3]),
)
@example(LIVELOCK, 18, "chunk", 4, True, "late", 0)
@settings(deadline=None, max_examples=300)
def test_proposals_are_what_the_model_writes_behind_the_confirmed_tokens(
    operations: list[tuple[str, int, int]], num_blocks: int, kind: str, num_branches: int, beside: bool, ahead: str, stay: int
) -> None:
    retentions = {"all": [KEEP_ALL], "window": [KEEP_ALL, Retention(window=6)], "chunk": [KEEP_ALL, Retention(chunk=8)]}[kind]
    site = Site(
        num_blocks=num_blocks,
        max_sequences=4,
        token_budget=16,
        retentions=retentions,
        num_branches=num_branches,
        branches_beside=beside,
        ahead=ahead,
        stay_tokens=stay,
    )
    drafter = site.drafter
    truth: dict[MirrorKey, list[int]] = {}  # the tokens that the decode worker has told
    for operation, index, number in operations:
        mirror, tokens = key(index), truth.get(key(index), [])
        if operation == "step":
            site.step()
        elif operation == "lost worker":
            drafter.close_worker(WORKERS[index % 2])
        elif operation == "close":
            drafter.close(mirror)
            truth.pop(mirror, None)
        elif operation == "open" or not tokens:
            tokens = tokens or [(index + step * step) % VOCAB for step in range(1 + 2 * number)]
            truth[mirror] = tokens
            assert drafter.update(mirror, 0, tokens, sampling(index))
        elif operation == "gap":
            assert not drafter.update(mirror, len(tokens) + 1 + number, [1])
        else:
            base = max(1, len(tokens) - number) if operation == "shrink" else len(tokens)
            fresh = site.expected(tokens[:base], index, 1 + number % 7)
            held = drafter._mirrors.get(mirror)
            if operation == "branch" and held is not None and held.branches and held.num_confirmed == len(tokens):
                branch = next(iter(held.branches.values()))  # decode says what a branch said, and a part of what is behind it
                base, fresh = len(tokens), [*held.text[len(tokens) : branch.position], *branch.tokens[: 1 + number % 4]]
            if operation == "disagree":
                fresh[number % len(fresh)] = (fresh[number % len(fresh)] + 1) % VOCAB
            if drafter.update(mirror, base, fresh):
                truth[mirror] = tokens[:base] + fresh
        drafter.check()
        for mirror, tokens in truth.items():
            if drafter.length(mirror) == len(tokens):
                table = drafter.table(mirror)
                (proposal,) = drafter.propose([mirror], 5)
                assert proposal == site.expected(tokens, int(mirror[1]), 5)[: len(proposal)]
                for branch in table:
                    before = [*tokens, *proposal[: branch.accepted], branch.tokens[0]]
                    assert branch.accepted < len(proposal) and branch.tokens[0] != proposal[branch.accepted]
                    assert branch.tokens[1:] == site.expected(before, int(mirror[1]), 5)[: len(branch.tokens) - 1]
    site.settle()
    for mirror, tokens in truth.items():
        if drafter.length(mirror) == len(tokens) and drafter.update(mirror, len(tokens), []):
            assert 5 <= drafter.num_drafted(mirror) <= 5 + stay or len(tokens) + 5 > drafter.max_context
    drafter.clear()
    drafter.check()
    assert all(group.pool.usage().free == num_blocks for group in site.pool.groups)


def test_a_confirmed_draft_is_not_computed_again() -> None:
    site, tokens = Site(), [3, 1, 4, 1, 5, 9, 2, 6]
    site.drafter.update(key(0), 0, tokens, sampling(0))
    site.settle()
    (proposal,) = site.drafter.propose([key(0)], 5)
    assert proposal == site.expected(tokens, 0) and site.computed_tokens == len(tokens) + 4
    assert site.drafter.update(key(0), len(tokens), proposal[:3])
    assert site.drafter.propose([key(0)], 5) == [[]], "what was proposed before is not said again"
    site.settle()
    assert site.computed_tokens == len(tokens) + 4 + 3
    assert site.drafter.num_tokens_in_vain == 0
    assert site.drafter.propose([key(0)], 5) == [site.expected(tokens + proposal[:3], 0)]


def test_a_correction_keeps_the_kv_of_what_is_the_same() -> None:
    site, tokens = Site(), [3, 1, 4, 1, 5, 9, 2, 6]
    site.drafter.update(key(0), 0, tokens, sampling(0))
    site.settle()
    (proposal,) = site.drafter.propose([key(0)], 5)
    corrected = [*proposal[:2], (proposal[2] + 1) % VOCAB]
    before = site.computed_tokens
    assert site.drafter.update(key(0), len(tokens), corrected)
    assert site.drafter.num_tokens_in_vain == 3
    site.settle()
    assert site.computed_tokens - before == 5, "the corrected token, and each one drafted but the last"
    assert site.drafter.propose([key(0)], 5) == [site.expected(tokens + corrected, 0)]


def test_a_mirror_that_is_sent_whole_again_computes_only_what_is_new() -> None:
    site, tokens = Site(), list(range(40))
    site.drafter.update(key(0), 0, tokens, sampling(0))
    site.settle()
    assert not site.drafter.update(key(0), 45, [1])
    assert site.step() is None, "a mirror with a gap is not drafted"
    before, tokens = site.computed_tokens, [*tokens, 7, 7, 7, 7, 7, 7]
    assert site.drafter.update(key(0), 0, tokens, sampling(0))
    site.settle()
    assert site.computed_tokens - before == 6 + 4
    assert site.drafter.propose([key(0)], 5) == [site.expected(tokens, 0)]


def test_other_sampling_parameters_draft_anew() -> None:
    site, tokens = Site(), [1, 2, 3]
    site.drafter.update(key(0), 0, tokens, sampling(0))
    site.settle()
    site.drafter.update(key(0), 0, tokens, sampling(9))
    site.settle()
    assert site.drafter.propose([key(0)], 5) == [site.expected(tokens, 9)]


def test_a_long_prompt_is_computed_in_chunks_beside_drafts() -> None:
    site = Site(num_blocks=128, token_budget=32)
    site.drafter.update(key(0), 0, [1, 2, 3], sampling(0))
    site.drafter.update(key(1), 0, [step % VOCAB for step in range(300)], sampling(1))
    site.settle()
    firsts = site.plans[:5]
    assert all({row.start < 20 for row in plan.rows} >= {True} for plan in firsts), "the short one drafts in each step"
    assert all(plan.num_tokens <= 32 + len(plan.rows) for plan in site.plans)
    assert len(site.plans) >= 300 // 32


def test_mirrors_with_the_fewest_drafted_tokens_go_first() -> None:
    """A step has room for two rows: nobody gets a third token before everyone has a second one."""
    site = Site(max_sequences=6)
    for index in range(6):
        site.drafter.update(key(index), 0, [index + 1], sampling(index))
    site.drafter.max_sequences = 2
    counts = [0] * 6
    while (drafted := site.step()) is not None:
        for _, name in drafted:
            counts[int(name)] += 1
        assert max(counts) - min(counts) <= 1
    assert counts == [5] * 6


def test_without_blocks_the_mirror_updated_least_recently_goes() -> None:
    site = Site(num_blocks=12)
    for index in range(3):
        site.drafter.update(key(index), 0, [index] * 14, sampling(index))
        site.settle()
    assert site.drafter.length(key(0)) == 0 and site.drafter.num_evicted == 1
    assert not site.drafter.update(key(0), 14, [1]), "its decode worker finds out by a gap"
    assert site.drafter.update(key(1), 14, [1]) and site.drafter.update(key(2), 14, [1])


def test_a_mirror_longer_than_the_pool_drops_nobody() -> None:
    site = Site(num_blocks=12)
    site.drafter.update(key(0), 0, [1] * 4, sampling(0))
    site.drafter.update(key(1), 0, [2] * 60, sampling(1))
    site.settle()
    assert site.drafter.propose([key(0), key(1)], 5) == [site.expected([1] * 4, 0), []]


@pytest.mark.parametrize("ending", ["close", "close_worker", "clear", "again"])
def test_a_mirror_that_ends_during_a_step_frees_its_blocks_when_the_step_has_run(ending: str) -> None:
    site = Site()
    site.drafter.update(key(0), 0, [1, 2, 3], sampling(0))
    plan = site.drafter.plan()
    assert plan is not None
    match ending:
        case "close_worker":
            assert site.drafter.close_worker(WORKERS[0]) == 1
        case "clear":
            site.drafter.clear()
        case _:
            site.drafter.close(key(0))
    assert site.pool.usage().owned == 1 and len(site.drafter) == 0
    if ending == "again":
        assert site.drafter.abort() == 1
    else:
        assert site.drafter.commit(plan, site.runner.execute(plan)) == []
    assert site.pool.usage().free == site.pool.usage().total
    site.drafter.check()


def test_a_step_that_fails_costs_its_mirrors_alone() -> None:
    site = Site()
    site.drafter.update(key(0), 0, [1, 2, 3], sampling(0))
    site.settle()
    site.drafter.update(key(1), 0, [1, 2, 3], sampling(1))
    assert site.drafter.plan() is not None
    assert site.drafter.abort() == 1
    assert [site.drafter.length(key(index)) for index in range(2)] == [3, 0]
    site.drafter.check()


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([VOCAB], DraftSampling()),
        ([-1], DraftSampling()),
        ([1], DraftSampling(temperature=float("nan"))),
        ([1], DraftSampling(temperature=-1.0)),
        ([1], DraftSampling(min_p=2.0)),
    ],
)
def test_what_would_fail_a_step_is_refused(tokens: list[int], said: DraftSampling) -> None:
    site = Site()
    with pytest.raises(ProtocolError):
        site.drafter.update(key(0), 0, tokens, said)
    assert len(site.drafter) == 0 and site.step() is None


def test_logits_that_are_not_finite_are_counted_and_end_a_mirrors_drafts() -> None:
    drafter, tokens = Site().drafter, [3, 1, 4]
    assert drafter.update(key(0), 0, tokens)
    plan = drafter.plan()
    assert plan is not None
    assert not drafter.commit(plan, StepResult(rows=[RowSamples([NO_TOKEN])]))
    assert drafter.num_broken == 1 and drafter.plan() is None
    assert drafter.update(key(0), 3, [1]) and drafter.plan() is None
    assert drafter.update(key(0), 0, tokens) and drafter.plan() is not None, "opened anew"


def test_it_drafts_no_further_ahead_than_it_may() -> None:
    site = Site(max_drafted=3)
    site.drafter.update(key(0), 0, [1, 2], sampling(0))
    site.settle()
    assert [len(proposal) for proposal in site.drafter.propose([key(0)], 10)] == [3]
    starts = [row.start for plan in site.plans for row in plan.rows]
    assert all(earlier < later for earlier, later in pairwise(starts))


def drafting(site: Site, tokens: list[int], said: DraftSampling | None = None) -> tuple[list[int], list[DraftBranch]]:
    """What is proposed behind `tokens`, and the table."""
    site.drafter.update(key(0), 0, tokens, said or sampling(0))
    site.settle()
    table = site.drafter.table(key(0))
    (proposal,) = site.drafter.propose([key(0)], 5)
    return proposal, table


def test_where_the_draft_is_wrong_and_a_branch_right_nothing_is_computed_again() -> None:
    site, tokens = Site(num_branches=6), [3, 1, 4, 1, 5, 9, 2, 6, 5]
    proposal, table = drafting(site, tokens)
    assert len(table) == 6 and all(len(branch.tokens) == 4 for branch in table)
    branch = table[2]
    said = [*proposal[: branch.accepted], *branch.tokens[:2]]
    drafted = site.drafter.num_drafted(key(0))
    before = sum(len(row.tokens) for plan in site.plans for row in plan.rows)
    assert site.drafter.update(key(0), len(tokens), said)
    assert (site.drafter.branches.num_taken, site.drafter.num_drafted(key(0))) == (1, 2) and drafted == 5
    assert site.drafter.propose([key(0)], 5) == [branch.tokens[2:]], "what was drafted behind it is proposed at once"
    site.drafter.branches.count = 0
    site.settle()
    assert site.computed_tokens - before == 3, "one token for each that is drafted further"
    assert site.drafter.propose([key(0)], 5) == [site.expected(tokens + said, 0)]


def test_a_branch_computes_nothing_that_its_mirror_has_computed() -> None:
    site = Site(num_branches=6)
    drafting(site, [3, 1, 4, 1, 5, 9, 2, 6, 5])
    rows = [row for plan in site.plans[1:] for row in plan.rows]
    assert rows and all(len(row.tokens) == 1 for row in rows)
    copies = [copy for plan in site.plans for copy in plan.copies]
    assert copies and not {copy.source for copy in copies} & {copy.target for copy in copies}


def test_branches_behind_a_long_text_take_and_give_back_no_more_than_behind_a_short_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is done for each of its blocks, whenever a branch begins or ends, takes longer than a step behind 100,000 tokens."""
    released: list[int] = []
    release = GroupedPool.release

    def counted(pool: GroupedPool, tables: list[list[int]]) -> None:
        released.append(sum(map(len, tables)))
        release(pool, tables)

    monkeypatch.setattr(GroupedPool, "release", counted)
    monkeypatch.setattr(GroupedPool, "retain", lambda *_: pytest.fail("every block of the text is retained"))
    found: dict[int, list[int]] = {}
    for length in (9, 361):
        site, text = Site(num_blocks=256, num_branches=6), [place % 40 + 3 for place in range(length)]
        _, table = drafting(site, text, DraftSampling())
        released.clear()
        site.drafter.update(key(0), length, table[0].tokens[:1], DraftSampling())
        site.settle()
        site.drafter.check()
        found[length] = list(released)
    assert found[9] == found[361] and sum(found[9]) > 0


def test_most_branches_are_where_the_first_rejection_is_likeliest() -> None:
    """The simulated engine is equally sure of all greedy tokens."""
    proposal, table = drafting(Site(num_branches=6), [3, 1, 4, 1, 5, 9, 2, 6, 5], DraftSampling())
    counts = [sum(branch.accepted == position for branch in table) for position in range(len(proposal))]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1] == 0


def test_a_table_is_sent_once_and_again_after_news() -> None:
    site, tokens = Site(num_branches=3), [3, 1, 4, 1, 5]
    proposal, table = drafting(site, tokens)
    assert table and site.drafter.table(key(0)) == []
    assert site.drafter.update(key(0), len(tokens), proposal[:1])
    site.settle()
    fresh = site.drafter.table(key(0))
    (later,) = site.drafter.propose([key(0)], 5)
    assert fresh and all(0 <= branch.accepted < len(later) for branch in fresh)


def test_branches_do_not_delay_what_is_proposed() -> None:
    """As many steps as without branches until everybody's draft is whole, in each order of rows."""
    lengths = []
    for num_branches, beside in ((0, True), (6, True), (6, False)):
        site = Site(max_sequences=6, num_branches=num_branches, branches_beside=beside)
        for index in range(3):
            site.drafter.update(key(index), 0, [index + 1] * 9, sampling(index))
        while any(site.drafter.num_drafted(key(index)) < 5 for index in range(3)):
            assert site.step() is not None
        lengths.append(len(site.plans))
    assert lengths[0] == lengths[1] == lengths[2]


def test_branches_give_their_blocks_to_mirrors() -> None:
    site = Site(num_blocks=13, num_branches=6)
    drafting(site, [1] * 14)
    site.drafter.update(key(1), 0, [2] * 14, sampling(1))
    site.settle()
    assert site.drafter.num_evicted == 0 and [site.drafter.num_drafted(key(index)) for index in range(2)] == [5, 5]


@pytest.mark.parametrize("ending", ["close", "abort", "clear"])
def test_a_mirror_that_ends_while_its_branches_run_frees_their_blocks_when_the_step_has_run(ending: str) -> None:
    site = Site(num_branches=4, branches_beside=False)
    site.drafter.update(key(0), 0, [1, 2, 3], sampling(0))
    while (plan := site.drafter.plan()) is not None and len(plan.rows) < 2:
        site.drafter.commit(plan, site.runner.execute(plan))
    assert plan is not None and len(plan.rows) == 4
    match ending:
        case "close":
            site.drafter.close(key(0))
        case "clear":
            site.drafter.clear()
        case _:
            assert site.drafter.abort() == 1
    site.drafter.check()
    if ending != "abort":
        assert site.pool.usage().owned > 0
        assert site.drafter.commit(plan, site.runner.execute(plan)) == []
    assert site.pool.usage().free == site.pool.usage().total


@pytest.mark.parametrize(("num_mirrors", "each"), [(1, 4), (2, 2), (3, 1), (4, 1), (5, 0), (8, 0)])
def test_mirrors_have_equal_shares_of_the_branches(num_mirrors: int, each: int) -> None:
    site = Site(num_blocks=256, max_sequences=64, num_branches=4)
    for index in range(num_mirrors):
        site.drafter.update(key(index), 0, [index + 1], sampling(index))
    site.settle()
    mirrors = site.drafter._mirrors.values()
    assert max(len(mirror.branches) for mirror in mirrors) == each
    assert bool(site.drafter.branches.num_tokens) == bool(each)
    asked = {row.sampling.logprobs >= 0 for plan in site.plans for row in plan.rows}
    assert asked == {each > 0}, "the likeliest tokens are asked for where they are of use"


@pytest.mark.parametrize(("said", "asked"), [(DraftSampling(), GREEDY_TOP_TOKENS), (sampling(1), TOP_TOKENS)])
def test_greedy_texts_ask_for_fewer_of_the_likeliest_tokens(said: DraftSampling, asked: int) -> None:
    site = Site(num_branches=4)
    site.drafter.update(key(0), 0, [1], said)
    site.settle()
    assert {row.sampling.logprobs for plan in site.plans for row in plan.rows} == {asked}


def test_branches_beyond_a_share_go_when_another_mirror_comes() -> None:
    site = Site(num_blocks=256, max_sequences=64, num_branches=4)
    site.drafter.update(key(0), 0, [1], sampling(0))
    site.settle()
    first = site.drafter._mirrors[key(0)]
    assert len(first.branches) == 4
    site.drafter.update(key(1), 0, [2], sampling(1))
    site.settle()
    assert len(first.branches) == 2
    site.drafter.check()


def test_a_proposal_with_its_table_takes_less_than_a_kilobyte() -> None:
    branches = Branches(Site().drafter.blocks, Flights(), count=16, length=16, reach=16, step_tokens=64, max_context=400)
    size = 1 + branches.length
    row = DraftRow("0" * 36, 2**31, [2**31] * 64)
    table = [DraftBranch(accepted=63, tokens=[2**31] * size) for _ in range(branches.share(1))]
    assert [branches.share(mirrors) for mirrors in (1, 2, 4, 8, 16, 17)] == [5, 5, 4, 2, 1, 0]
    message = Proposals(draft=WORKERS[0], rows=[row], tables={row.sequence: table})
    assert len(msgspec.msgpack.encode(message)) <= 1024
