"""How many proposed tokens are verified, of which sequence, in which step: what pays, by measured time and acceptance. Pure.

A step of R rows gives R tokens; with V proposed tokens among its inputs as many more as are accepted, and takes longer. The V
likeliest are verified for which tokens per second are most, none if that is best. What is compared are measured times of steps
(`step_costs`) and each sequence's measured acceptance, or chances that came with a proposal. Drafting takes no time here, but
for the head's, which runs in the same thread and is asked where that pays, too (`pace_with`).

Acceptance is measured without verifying, too: what was proposed is compared with what came. A sequence whose proposals do not
pay pauses, so that nobody drafts in vain. The one thing that costs something is a step without proposals when its time is not
known (`num_probes`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.decode.step_costs import SIZES, StepCosts

_MARGIN = 1.01
"""Times the tokens per second without proposals: less may be noise."""
_FIRST_RATE = 0.7
_RATE_WEIGHT = 0.15
_TRIALS = 8
"""Proposed tokens that are compared before a sequence pauses."""
_HOPELESS = 0.3
"""Below this acceptance a pause is twice as long as the one before; above it, what does not pay now may as soon as fewer rows
run."""


@dataclass(slots=True)
class Pace:
    """How well proposals for one sequence do: `rate`, the chance that a proposed token is accepted.

    `trials`: proposed tokens compared since the last pause. `asleep` counts down the tokens until it ends; `nap` is how long
    the next one will be.
    """

    rate: float
    nap: int
    asleep: int = 0
    trials: int = 0


class Pick(NamedTuple):
    """Tokens per second with the number of proposed tokens that is best, the chance of the least likely of these, and tokens
    per second without proposals."""

    pace: float
    price: float
    plain_pace: float


class SpeculationPolicy:
    """max_tokens: verified of one sequence. max_step_tokens: of a step that verifies, rows and proposed tokens.

    always: whatever is proposed is verified, within these bounds. nap_tokens: the first pause of a sequence whose proposals do
    not pay; max_nap_tokens: the longest.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        max_step_tokens: int,
        nap_tokens: int = 16,
        max_nap_tokens: int = 512,
        costs: StepCosts | None = None,
        always: bool = False,
    ) -> None:
        self.max_tokens = max_tokens
        self.max_step_tokens = max_step_tokens
        self.nap_tokens = nap_tokens
        self.max_nap_tokens = max_nap_tokens
        self.costs = costs or StepCosts()
        self.always = always
        self.num_probes = 0
        self._left = 0
        self._price = math.inf
        self._powers = np.arange(1, max_tokens + 1)

    def pace(self) -> Pace:
        return Pace(rate=_FIRST_RATE, nap=self.nap_tokens)

    def begin_step(self, num_rows: int, rates: Sequence[float], ladders: Sequence[Sequence[float]] = ()) -> None:
        """A step with `num_rows` decoding rows is about to be planned.

        rates: of the sequences that have proposals. ladders: of those with a chance for each proposed token, that it is
        accepted with all before it.
        """
        self._left = 0
        room = self.max_step_tokens - num_rows
        if not (rates or ladders) or room <= 0 or not self.max_tokens or not num_rows:
            return
        if self.always:
            self._left, self._price = room, 0.0
            return
        if not self.costs.is_known(num_rows):
            self.num_probes += 1
            return
        self._left = room
        every = [(np.array(rates)[:, None] ** self._powers).ravel(), *(ladder[: self.max_tokens] for ladder in ladders)]
        best = self._best(num_rows, np.concatenate(every), 0.0)
        self._price = best.price if best.pace > _MARGIN * best.plain_pace else math.inf

    def pace_with(self, num_rows: int, ladders: Sequence[Sequence[float]], drafting_s: float) -> Pick:
        """Return the best that steps of `num_rows` decoding rows can do with proposals whose tokens have these chances, each of
        which takes `drafting_s` to draft. Their time without proposals is known (`is_known`)."""
        return self._best(num_rows, np.concatenate([ladder[: self.max_tokens] for ladder in ladders]), drafting_s)

    def _best(self, num_rows: int, chances: NDArray[np.float64], drafting_s: float) -> Pick:
        room = self.max_step_tokens - num_rows
        chances = np.sort(chances)[: -room - 1 : -1]
        counts = np.array([size - num_rows for size in SIZES if num_rows < size < num_rows + len(chances)] + [len(chances)])
        seconds = self.costs.seconds(np.append(num_rows, num_rows + counts))
        paces = (num_rows + np.cumsum(chances)[counts - 1]) / (seconds[1:] + drafting_s)
        best = int(np.argmax(paces))
        return Pick(float(paces[best]), float(chances[counts[best] - 1]), num_rows / float(seconds[0]))

    def length(self, pace: Pace) -> int:
        """Tokens to verify for a sequence in this step."""
        if pace.asleep > 0 or pace.rate < self._price:
            return 0
        worth = self.max_tokens if self.always or pace.rate >= 1 else int(math.log(self._price) / math.log(pace.rate) + 1e-9)
        return max(0, min(worth, self.max_tokens, self._left))

    def worth(self, ladder: Sequence[float]) -> int:
        """Tokens to verify in this step of a proposal whose tokens have these chances, highest first."""
        worth = next((index for index, chance in enumerate(ladder) if chance < self._price), len(ladder))
        return max(0, min(worth, self.max_tokens, self._left))

    def spend(self, num_tokens: int) -> None:
        self._left -= num_tokens

    def passed(self, pace: Pace, num_tokens: int) -> None:
        """A sequence has got so many tokens."""
        pace.asleep = max(0, pace.asleep - num_tokens)

    def record(self, pace: Pace, hits: int, misses: int) -> None:
        """So many proposed tokens, one behind the other, were what came; then perhaps one was not."""
        trials = hits + misses
        if not trials:
            return
        pace.rate += (1.0 - (1.0 - _RATE_WEIGHT) ** trials) * (hits / trials - pace.rate)
        pace.trials += trials
        if pace.rate >= self._price:
            pace.nap, pace.trials = self.nap_tokens, 0
        elif pace.trials >= _TRIALS:
            pace.asleep, pace.trials = pace.nap, 0
            pace.nap = min(2 * pace.nap, self.max_nap_tokens) if pace.rate < _HOPELESS else self.nap_tokens
