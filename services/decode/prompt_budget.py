"""How many prompt tokens a step may compute beside decoding rows, so that these keep their ITL. Pure.

    step of rows and a part of a prompt = step of the rows alone + tokens of the part × a token's time

Both are averages of what was measured lately. What a token costs takes up what the first term misses: rows that came, or whose
contexts grew, since the last step without a prompt. Beside rows, which wait for memory, a token costs less than in a step of
its own: how fast prompts are computed with and without rows is measured apart.

Where the rows alone come near the objective, a part may still make the step a quarter longer, and where they miss it, twice as
long: prompts go on, instead of waiting for an objective that cannot be met.
"""

from __future__ import annotations

from common.engine.speeds import TokenRate
from common.protocol.capacity import WINDOW_MS, Capacity

LEAST_TOKENS = 64
GRAIN_TOKENS = 128
"""Parts of at least so many tokens are a multiple of it: attention to a prompt's earlier parts takes few pieces then."""
IDLE_TOKENS = 2048
"""A step without decoding rows computes up to so many tokens all the same: rows that arrive meanwhile wait for it."""
_MARGIN = 0.9
"""The share of the objective that a step is planned to take: measured times scatter."""
_NEAR = 0.8
"""Of the objective, up to which rows alone leave it within reach."""
_HORIZON_TOKENS = 4096
_STEP_WEIGHT = 0.2


class PromptBudget:
    """objective_s: for the time between a row's tokens, 0 for none."""

    def __init__(self, objective_s: float) -> None:
        self.objective_s = objective_s
        self.step_s = 0.0
        """Of decoding rows alone; 0: unknown."""
        self._more = TokenRate(_HORIZON_TOKENS)
        """Of what a part adds to a step of rows."""
        self._beside, self._alone = TokenRate(_HORIZON_TOKENS), TokenRate(_HORIZON_TOKENS)
        """Of whole steps with a part, and rows or none."""

    @property
    def token_s(self) -> float:
        """What a token of a prompt adds to a step; 0: unknown."""
        return self._more.token_s or self._alone.token_s

    def observe(self, *, rows: int, prompt_tokens: int, seconds: float) -> None:
        """A step of so many decoding rows and tokens of prompts took so long."""
        if prompt_tokens and rows:
            self._more.measure(prompt_tokens, max(0.0, seconds - self.step_s))
            self._beside.measure(prompt_tokens, seconds)
        elif prompt_tokens:
            self._alone.measure(prompt_tokens, seconds)
        else:
            self.step_s += (_STEP_WEIGHT if self.step_s else 1.0) * (seconds - self.step_s)

    def limit(self, rows: int, budget: int) -> int:
        """Return how many prompt tokens a step with so many decoding rows may compute, `budget` at most."""
        if not self.objective_s:
            return budget
        if not rows:
            return min(budget, IDLE_TOKENS)
        if not self.token_s:
            return min(budget, GRAIN_TOKENS)
        step_s = max(_MARGIN * self.objective_s, self._growth * self.step_s)
        tokens = int((step_s - self.step_s) / self.token_s)
        if tokens >= GRAIN_TOKENS:
            tokens -= tokens % GRAIN_TOKENS
        return min(budget, max(LEAST_TOKENS, tokens))

    @property
    def _growth(self) -> float:
        """How many times as long as without it a part may make a step of rows, whatever the objective."""
        missed = (self.step_s / self.objective_s - _NEAR) / (1 - _NEAR)
        return 1.25 + 0.75 * min(1.0, max(0.0, missed))

    def capacity(self, rows: int, *, budget: int, backlog_tokens: int, places: int) -> Capacity:
        """Return what the engine says of itself, with so many decoding rows, tokens of prompts that wait, and free places."""
        tokens = int(self._per_s(rows, budget) * WINDOW_MS / 1000)
        itl_ms = round(self.step_s * 1000, 3) if rows else 0.0
        is_slow = rows > 0 and self.step_s > self.objective_s > 0
        return Capacity(tokens, backlog_tokens, itl_ms, 0 if is_slow else places)

    def _per_s(self, rows: int, budget: int) -> float:
        """Return how many tokens of prompts a second are computed beside so many rows; 0: unknown."""
        measured = self._beside.per_s if rows else self._alone.per_s
        if measured or not self.token_s:
            return measured
        part = self.limit(rows, budget)
        return part / (part * self.token_s + (self.step_s if rows else 0.0))
