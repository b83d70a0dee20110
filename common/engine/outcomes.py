"""What may follow a step that still runs: proposals for its likely outcomes. Pure.

A step verifies proposed tokens of a sequence and samples one more behind those that hold. While it runs nobody knows how many
that will be, and the next step is planned all the same: its row says what is being verified (`StepRow.verified`), and what to
propose behind each outcome that somebody expected (`StepRow.outcomes`). Whoever has the samples, a device as a rule, finds the
outcome, and with it the row's first token, the positions of all, and the proposal. An outcome that nobody expected costs
nothing but the chance: the row then gives one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Outcome(NamedTuple):
    """The step before accepts `accepted` of the tokens that it verifies and samples `token` behind them; then `proposal` may
    follow."""

    accepted: int
    token: int
    proposal: list[int]


def accept(proposed: Sequence[int], sampled: Sequence[int]) -> int:
    """How many leading proposed tokens equal the sampled ones; the row then yields one token more than that."""
    count = 0
    for guess, token in zip(proposed, sampled, strict=False):
        if guess != token:
            break
        count += 1
    return count


def proposal_behind(outcomes: Sequence[Outcome], accepted: int, token: int) -> list[int]:
    """What the first of `outcomes` that came true proposes; [] if none did."""
    for outcome in outcomes:
        if outcome.accepted == accepted and outcome.token == token:
            return outcome.proposal
    return []


def width_of(outcomes: Sequence[Outcome]) -> int:
    """Tokens that a row must have room for, to verify whatever is proposed."""
    return max([len(outcome.proposal) for outcome in outcomes]) if outcomes else 0
