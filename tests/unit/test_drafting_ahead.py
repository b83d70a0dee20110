"""A draft model's next step is planned while one is in the air, and updates come in between: what they void is not used."""

from __future__ import annotations

import pytest

from services.draft.mirror import Branch
from tests.unit.test_drafting import VOCAB, Site, key, sampling


@pytest.mark.parametrize("ahead", ["early", "late"])
def test_what_is_closed_in_the_air_gives_its_blocks_back_when_its_steps_have_run(ahead: str) -> None:
    site = Site(num_branches=4, ahead=ahead)
    for index in range(3):
        site.drafter.update(key(index), 0, [index + step for step in range(6)], sampling(index))
    for _ in range(4):
        site.step()
    assert site.flights
    site.drafter.clear()
    site.drafter.check()
    assert site.pool.groups[0].pool.usage().owned
    while site.flights:
        site.land()
    assert not site.pool.groups[0].pool.usage().owned


def test_a_step_that_fails_takes_those_behind_it_along() -> None:
    site = Site(num_branches=4, ahead="late")
    for index in range(3):
        site.drafter.update(key(index), 0, [index + step for step in range(6)], sampling(index))
    site.step()
    assert site.drafter.plan() is not None
    assert site.drafter.abort() == 3
    assert len(site.drafter) == 0 and not site.pool.groups[0].pool.usage().owned
    site.flights.clear()
    site.drafter.update(key(0), 0, [1, 2, 3], sampling(0))
    site.settle()
    assert site.drafter.propose([key(0)], 5) == [site.expected([1, 2, 3], 0)]


def test_a_mirror_that_decode_overtakes_goes_on_with_what_is_in_the_air() -> None:
    site, tokens = Site(ahead="late"), [3, 1, 4, 1, 5]
    right = site.expected(tokens, 0, 9)
    site.drafter.update(key(0), 0, tokens, sampling(0))
    site.step()
    assert site.drafter.update(key(0), len(tokens), right[:2]), "two tokens that steps in the air compute"
    site.settle()
    assert site.drafter.propose([key(0)], 5) == [right[2:7]]
    assert site.computed_tokens == len(tokens) + 6, "nothing twice"


@pytest.mark.parametrize("ahead", ["early", "late"])
def test_what_is_fed_with_a_token_that_decode_has_not_said_is_void(ahead: str) -> None:
    site, tokens = Site(ahead=ahead), [3, 1, 4, 1, 5]
    site.drafter.update(key(0), 0, tokens, sampling(0))
    assert site.launch() and site.launch(), "the second is fed with what the first one samples"
    said = [*tokens, (site.expected(tokens, 0, 1)[0] + 1) % VOCAB]
    assert site.drafter.update(key(0), len(tokens), said[-1:])
    site.settle()
    assert site.drafter.propose([key(0)], 5) == [site.expected(said, 0)]


@pytest.mark.parametrize("ahead", ["early", "late"])
def test_a_branch_takes_over_while_it_and_its_mirror_are_in_the_air(ahead: str) -> None:
    site, tokens = Site(num_branches=6, max_drafted=9, ahead=ahead), [3, 1, 4, 1, 5, 9, 2, 6, 5]
    site.drafter.update(key(0), 0, tokens, sampling(0))
    mirror = site.drafter._mirrors[key(0)]

    def both() -> Branch | None:
        flying = (one for one in mirror.branches.values() if one.air.num_steps and 1 < len(one.tokens) < 3)
        return next(flying, None) if mirror.air.num_steps else None

    while (branch := both()) is None:
        site.launch() if len(site.flights) < 2 else site.land()
    said = [*mirror.text[len(tokens) : branch.position], *branch.tokens[:2]]
    computed = site.computed_tokens
    assert site.drafter.update(key(0), len(tokens), said) and site.drafter.branches.num_taken == 1
    site.drafter.check()
    site.drafter.update(key(1), 0, [7] * 9, sampling(1))  # takes blocks
    site.drafter.branches.count = 0
    site.settle()
    assert site.drafter.propose([key(0), key(1)], 9) == [site.expected(tokens + said, 0, 9), site.expected([7] * 9, 1, 9)]
    assert site.computed_tokens - computed <= 9 + 8 + 9, "what is in the air for the branch is not computed again"


def test_rows_keep_their_places_from_step_to_step() -> None:
    """So that an engine can go on with the inputs of the step before."""
    site = Site(max_drafted=12, ahead="early")
    texts = [[index + 1] * 8 for index in range(4)]
    for index, tokens in enumerate(texts):
        site.drafter.update(key(index), 0, tokens, sampling(index))
    for _ in range(4):
        site.step()
    wrong = [(site.expected(texts[1], 1)[0] + 1) % VOCAB]
    site.drafter.update(key(1), 8, wrong)  # it goes on from here, and was updated last
    site.drafter.close(key(2))
    site.plans.clear()
    for _ in range(3):
        site.step()
    cut, *later = site.plans
    assert [row.feed for row in cut.rows] == [0, -1, 3], "the last one comes into the place of the one that is closed"
    assert all([row.feed for row in plan.rows] == [0, 1, 2] for plan in later)


@pytest.mark.parametrize("ahead", ["", "early"])
def test_a_mirror_at_its_limit_is_drafted_on_beside_others_in_the_blocks_that_it_has(ahead: str) -> None:
    site, tokens = Site(stay_tokens=8, ahead=ahead), [3, 1, 4, 1, 5]
    site.drafter.update(key(0), 0, tokens, sampling(0))
    site.settle()
    assert site.drafter.num_drafted(key(0)) == 5, "not alone"
    held = site.pool.groups[0].pool.usage().owned
    site.drafter.update(key(1), 0, [2, 7, 1, 8], sampling(1))
    site.settle()
    assert site.drafter.num_drafted(key(0)) == 8, "13 tokens: the last one is not computed, and 12 fill three blocks"
    assert site.drafter.propose([key(0)], 16) == [site.expected(tokens, 0, 5)], "no more than its limit is proposed"
    assert site.pool.groups[0].pool.usage().owned == held + 2, "those of the other one, of nine tokens"
    assert site.drafter.update(key(0), 5, site.expected(tokens, 0, 2))
    assert site.drafter.propose([key(0)], 16) == [site.expected(tokens, 0, 7)[2:]], "what it has drafted already"


def test_no_branch_begins_behind_what_is_proposed() -> None:
    site, tokens = Site(num_blocks=256, num_branches=12, max_drafted=4, stay_tokens=16), [3, 1, 4, 1, 5, 9]
    site.drafter.update(key(0), 0, tokens, sampling(0))
    for index in range(1, 12):
        site.drafter.update(key(1), 0, [index, *tokens], sampling(index))  # others to go on beside
        site.settle()
        assert all(branch.accepted < 4 for branch in site.drafter.table(key(0)))
    assert site.drafter.num_drafted(key(0)) > 4
