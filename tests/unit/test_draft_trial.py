"""Draft workers are asked where that is faster, whatever they take from the target; what trying costs is bounded."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from services.decode.draft_trial import FIRST, DraftTrial

DEPTH = 4


@dataclass
class World:
    """accuracy: of a proposed token. slower: times that a step takes while a draft worker computes, which it does for some
    steps after it was told last. noise: of a step's time. catch_up: steps that it computes texts after a rest, before it
    proposes anything."""

    accuracy: float
    slower: float
    noise: float = 0.1
    rows: int = 1
    catch_up: int = 0

    def run(self, trial: DraftTrial, steps: int, seed: int = 1) -> tuple[int, float]:
        """Tokens, and seconds."""
        draws = random.Random(seed)
        total, elapsed, asked_ago, missing = 0, 0.0, 0, self.catch_up
        for _ in range(steps):
            asked_ago = 0 if trial.asking else asked_ago + 1
            missing = max(0, missing - 1) if trial.asking else self.catch_up
            accepted = sum(self._accepted(draws, asked_ago) for _ in range(self.rows)) if not missing else 0
            tokens = self.rows + accepted
            seconds = 0.01 * (self.slower if asked_ago < 3 else 1.0) * draws.lognormvariate(0, self.noise)
            trial.step(self.rows, tokens, seconds, lambda missing=missing: not missing)
            total, elapsed = total + tokens, elapsed + seconds
        return total, elapsed

    def _accepted(self, draws: random.Random, asked_ago: int) -> int:
        accepted = 0
        while asked_ago < 2 and accepted < DEPTH and draws.random() < self.accuracy:
            accepted += 1
        return accepted

    def paces(self, steps: int) -> tuple[float, float, float]:
        """Tokens per second: with trials, always asked, never asked."""
        quiet = DraftTrial(enabled=False)
        quiet.asking = False
        found = [self.run(trial, steps) for trial in (DraftTrial(), DraftTrial(enabled=False), quiet)]
        return tuple(tokens / seconds for tokens, seconds in found)  # type: ignore[return-value]


@pytest.mark.parametrize("rows", [1, 8, 40])
@pytest.mark.parametrize("slower", [1.0, 1.3, 2.5])
@pytest.mark.parametrize("accuracy", [0.0, 0.3, 0.8])
def test_the_better_way_is_found_and_kept(accuracy: float, slower: float, rows: int) -> None:
    tried, asked, quiet = World(accuracy, slower, rows=rows).paces(6000)
    assert tried >= 0.97 * max(asked, quiet)


def test_the_first_answer_pays_for_the_first_trial_and_the_second_does_not() -> None:
    world, trial = World(0.3, 2.5), DraftTrial()
    tokens, seconds = world.run(trial, 256)
    alone = 1 / 0.01
    assert tokens / seconds > 0.8 * alone
    tokens, seconds = world.run(trial, 256)
    assert tokens / seconds > 0.97 * alone


def test_quiet_that_is_clearly_slower_is_tried_for_a_few_steps() -> None:
    trial = DraftTrial()
    World(0.8, 1.0, noise=0.02, rows=8).run(trial, 300)
    assert 0 < trial.num_quiet <= 11
    trial = DraftTrial()
    World(0.1, 1.0, noise=0.02, rows=8).run(trial, 300)
    assert trial.num_quiet >= 18, "what is not clear is tried for longer"


@pytest.mark.parametrize("rows", [1, 8, 40])
@pytest.mark.parametrize("catch_up", [30, 60, 200])
def test_texts_that_draft_workers_compute_first_are_waited_for(catch_up: int, rows: int) -> None:
    """Else a drafter of long texts, which has nothing to say for as long as a trial, would be given up again and again."""
    tried, asked, quiet = World(0.8, 1.0, rows=rows, catch_up=catch_up).paces(12_000)
    assert tried >= 0.9 * asked > 2 * quiet
    tokens, seconds = World(0.8, 1.0, rows=rows, catch_up=catch_up).run(DraftTrial(), 512)
    assert tokens / seconds > 1.6 * quiet, "they are not given up for long because they were not ready at first"


@pytest.mark.parametrize("catch_up", [60, 1 << 30])
@pytest.mark.parametrize("slower", [1.0, 1.3, 2.5])
def test_waiting_for_draft_workers_costs_little(slower: float, catch_up: int) -> None:
    for seed in range(4):
        world, trial = World(0.0, slower, catch_up=catch_up), DraftTrial()
        first = world.run(trial, 512, seed)
        later = world.run(trial, 6000, seed)
        assert first[0] / first[1] > 0.7 * 100
        assert later[0] / later[1] > 0.96 * 100


def test_what_changes_is_found_out() -> None:
    trial = DraftTrial()
    World(0.8, 1.0).run(trial, 3000)
    World(0.0, 2.0).run(trial, 3000)
    assert not trial.asking
    tokens, seconds = World(0.8, 1.0).run(trial, 12000)
    assert trial.asking and tokens / seconds > 200


def test_numbers_of_rows_have_verdicts_of_their_own() -> None:
    trial = DraftTrial()
    World(0.8, 1.5, rows=1).run(trial, 600)
    World(0.0, 1.5, rows=64).run(trial, 600)
    assert not trial.asking
    World(0.8, 1.5, rows=1).run(trial, 2)
    assert trial.asking
    World(0.0, 1.5, rows=64).run(trial, 2)
    assert not trial.asking


def test_off_means_always_asked_and_a_step_without_time_is_none() -> None:
    trial = DraftTrial(enabled=False)
    World(0.0, 3.0).run(trial, 2000)
    assert trial.asking and trial.num_quiet == 0
    trial = DraftTrial()
    for _ in range(10 * FIRST):
        trial.step(0, 0, 0.01)
        trial.step(1, 1, 0.0)
    assert trial.asking and trial.num_quiet == 0
