"""How long planning may wait while a step runs, for news that the next step should know of. Pure.

    a step runs    ├──────────────────────────────────────────┤
    the next one          wait          plan, submit   margin

What a draft worker proposes while a step runs is of use to the next one only if that is not planned yet. The wait is as long as
leaves the margin: it is measured for each step, and the next wait follows it. It shrinks faster than it grows, since an engine
that has nothing to do costs more than a proposal that comes too late.
"""

from __future__ import annotations

MARGIN_S = 0.7e-3
"""Between the submission of a step and the time at which the end of the one before it is known, a little after that end."""
_GROWTH = 0.25
_MAX_GROWTH_S = 0.5e-3
_SHRINKAGE = 1.5
"""Shares of what a margin is more, or less, than it should be. One that is far too long may be that of a long step."""


class LatePlanning:
    """`wait_s`: from the beginning of the step that runs to the planning of the next one. It is told of steps that were planned
    so; those that were planned at once say nothing."""

    def __init__(self) -> None:
        self.wait_s = 0.0

    def ended(self, margin_s: float) -> None:
        """A step has ended, so many seconds after the next one had been submitted; negative: before that."""
        more = margin_s - MARGIN_S
        if more < 0:
            self.wait_s = max(0.0, self.wait_s + _SHRINKAGE * more)
        else:
            self.wait_s += min(_GROWTH * more, _MAX_GROWTH_S)

    def missed(self, step_s: float) -> None:
        """A step has ended, after so many seconds, before the next one was planned."""
        self.wait_s = max(0.0, min(self.wait_s, step_s) - 2 * MARGIN_S)
