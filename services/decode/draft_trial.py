"""Whether draft workers are told what is decoded: what they give and cost together, found by trying both. Pure.

A draft worker may take from its target what no step's time shows beside another's: cores, bandwidth, a GPU that both share. So
tokens per second are measured while draft workers are asked, and while they are told nothing and come to rest:

    asked ─ every now and then ─► quiet, for some steps ─► the better of the two, for longer each time it wins again

Each number of rows (by powers of two) has a verdict of its own. Steps with prompts among them count for nothing. Nor do steps
in which draft workers are asked and compute texts that they were not told of before: long ones take more steps than a trial
has, and nothing is proposed until then. How long that is waited for is bounded, by steps and by what they cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

SETTLING = 6
"""Steps of a phase that are not measured: drafts that were on their way arrive, or have to be made first."""
FIRST = 24
"""Steps of the first phase; draft workers are asked."""
TRIAL = {True: 40, False: 18}
"""Steps of a trial, of asking and of quiet: how many tokens a step gives varies more when some are proposed."""
MAX_WAIT = {True: 64, False: 256}
"""Steps of a phase in which draft workers may compute texts before it is measured: of the first phase, which is given up then,
and of a trial, which is measured all the same."""
_MAX_LOST = 12.0
"""Steps' time that a trial may lose by that, beside the other way."""
HOLD = 512
MAX_HOLD = 4096
"""Steps for which a verdict holds at first, and at most: twice as long each time it is the same."""
_UNKNOWN_HOLD = 64
"""Quiet steps until draft workers are asked again that were not ready in the first phase: of asking, nothing is known."""
_KEPT = 0.5
"""Of what was measured before, at the beginning of a phase and after each `_LOOK` steps of one."""
_LOOK = 64
_WORSE = 0.95
"""Times the pace of the other way when that was tried: less, and it is tried again."""
_ENOUGH = 8
_CLEAR = 1.3
"""A trial ends after so many measured steps if one way is so many times as fast."""
_ENOUGH_QUIET = 4
"""Measured steps after which a trial of quiet ends if asking is so many times as fast. Quiet steps vary little, each giving one
token a row, and such an end only keeps the verdict that holds."""
_OUTLIER = 4.0
"""Times the mean: a longer step is something else, a compilation or another process."""


@dataclass(slots=True)
class _Measured:
    """Tokens that steps gave, and what they took."""

    steps: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        if self.steps:
            seconds = min(seconds, _OUTLIER * self.seconds / self.steps)
        self.steps += 1
        self.tokens += tokens
        self.seconds += seconds

    def fade(self) -> None:
        self.steps, self.tokens, self.seconds = (_KEPT * x for x in (self.steps, self.tokens, self.seconds))

    @property
    def pace(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class _Verdict:
    """best: whether draft workers are asked. asking: whether they are now, which is the other way in a trial. left: steps until
    this phase ends; measured: of it, steps so far; waited: steps before these, and lost_s: seconds that these took longer than
    the other way. hold: how long the verdict holds the next time."""

    best: bool = True
    asking: bool = True
    left: int = FIRST
    measured: int = 0
    waited: int = 0
    lost_s: float = 0.0
    hold: int = HOLD
    arms: dict[bool, _Measured] = field(default_factory=lambda: {True: _Measured(), False: _Measured()})

    @property
    def is_first(self) -> bool:
        return not self.arms[False].steps

    @property
    def may_wait(self) -> bool:
        """Whether the next step need not be measured, if draft workers are not ready: asking them is tried, for the first time
        or again."""
        return self.asking and (self.is_first or not self.best) and not self.measured

    def wait(self, num_tokens: int, seconds: float) -> bool:
        """A step is not to be measured. Return whether that is enough: it takes too long, or costs too much."""
        self.waited += 1
        quiet = self.arms[False]
        self.lost_s += max(0.0, seconds - num_tokens / quiet.pace) if quiet.pace else 0.0
        return self.waited >= MAX_WAIT[self.is_first] or self.lost_s > _MAX_LOST * quiet.seconds / max(1.0, quiet.steps)


class DraftTrial:
    """asking: whether draft workers are told of tokens now. enabled: else they always are.

    num_quiet: steps in which they were not told. num_tried: steps of trials, which measure again what was slower.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self.num_quiet = 0
        self.num_tried = 0
        self.asking = True
        self._verdicts: dict[int, _Verdict] = {}

    def step(self, num_rows: int, num_tokens: int, seconds: float, is_ready: Callable[[], bool] = lambda: True) -> None:
        """A step of `num_rows` decoding rows, and no prompts, gave `num_tokens` tokens in so many seconds. is_ready(): whether
        draft workers have computed what they were told of."""
        if not self.enabled or num_rows <= 0 or seconds <= 0:
            return
        verdict = self._verdicts.setdefault(num_rows.bit_length(), _Verdict())
        self.num_quiet += not self.asking
        self.num_tried += self.asking is not verdict.best
        is_own = verdict.asking is self.asking  # else the step before had another number of rows
        if is_own and verdict.may_wait and not is_ready():
            if not verdict.wait(num_tokens, seconds):
                return
            if verdict.is_first:
                verdict.left = 0
        if is_own:
            verdict.left -= 1
            verdict.measured += 1
            if verdict.measured > SETTLING:
                verdict.arms[verdict.asking].add(num_tokens, seconds)
        if verdict.left <= 0 or _is_clear(verdict):
            _next_phase(verdict)
        self.asking = verdict.asking


def _is_clear(verdict: _Verdict) -> bool:
    """Whether a trial need not go on, or a verdict no longer holds."""
    this, other = verdict.arms[verdict.asking], verdict.arms[not verdict.asking]
    measured = verdict.measured - SETTLING
    if verdict.asking is not verdict.best:
        is_slower, is_faster = _CLEAR * this.pace <= other.pace, this.pace >= _CLEAR * other.pace
        enough = _ENOUGH_QUIET if is_slower and not verdict.asking else _ENOUGH
        return measured >= enough and (is_slower or is_faster)
    if not other.steps or measured <= 0 or measured % _LOOK:
        return False
    this.fade()
    return this.pace < _WORSE * other.pace


def _next_phase(verdict: _Verdict) -> None:
    if verdict.asking is verdict.best:
        verdict.asking = not verdict.best
        verdict.left = TRIAL[verdict.asking]
    else:
        best = verdict.arms[True].pace >= verdict.arms[False].pace
        verdict.hold = min(2 * verdict.hold, MAX_HOLD) if best is verdict.best and verdict.arms[best].steps else HOLD
        verdict.best = verdict.asking = best
        verdict.left = verdict.hold if verdict.arms[True].steps else _UNKNOWN_HOLD
    verdict.measured, verdict.waited, verdict.lost_s = 0, 0, 0.0
    verdict.arms[verdict.asking].fade()
