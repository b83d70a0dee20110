"""How many prompt tokens a step may compute beside decoding rows, so that these keep their ITL. Pure.

    step of rows and a part of a prompt = step of the rows alone + what the usual part adds
                                          + (tokens of the part - those of the usual part) × a further token's time

What a part adds is not proportional to its tokens. With the first ones kernels for a few rows give way to those for many, or
they are computed while the weights are read, and cost nothing. The usual part is the average of the latest steps of about the
planned size; what it adds takes up what the first term misses: rows that came, or whose contexts grew, since the last step
without a prompt; when such a step shows that rows take longer, as much is taken off. What a further token costs is measured
(`further_cost.py`). At first that may be too little: a part therefore has at most twice the tokens of the usual one.

Prompt throughput beside rows is predicted with the same formula: the part that fills the objective, divided by the step that
it would make, however short the parts are that have been needed of late. The prediction follows the decoding rows even while no
prompt is computed. The router sends no prompts to a worker that looks slow, and without prompts nothing would correct its
measurements. So a single long step, for example one that collects garbage, is counted as at most twice its predicted
duration.

Throughput is not measured with short prompts as they are: most of such a step goes into reading the weights, as in a step of
rows alone, whose time is subtracted. Otherwise a worker that has computed short prompts only would look slow, get no long
prompt, and never show how fast it is. Before the first part beside rows, the prediction is for the part that fills the
objective, by what a token costs in steps of prompts alone.

Parts fill the objective only where first tokens need it. A task says when its first token is due, and prompts that have time
are computed in shorter steps, so that rows keep nearer to their own pace. Such a step takes half of the objective at least. A
worker that spends much of its time on prompts does not wait: what it leaves for later would delay the next prompt.

Where the rows alone come near the objective, a part may still make the step a quarter longer, and where they miss it, twice as
long: prompts go on, instead of waiting for an objective that cannot be met.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from common.engine.sequence import Sequence
from common.protocol.capacity import WINDOW_MS, Capacity
from services.decode.further_cost import FurtherCost

LEAST_TOKENS = 64
GRAIN_TOKENS = 128
"""A step of at least twice as many tokens, its rows among them, has a multiple of it: CUDA graphs are padded to that."""
IDLE_TOKENS = 2048
"""A step without decoding rows computes up to so many tokens all the same: rows that arrive meanwhile wait for it."""
_MARGIN = 0.9
"""The share of the objective that a step is planned to take: measured times scatter."""
_LEAST_MARGIN = 0.5
"""The share of the objective that a step with a part is planned to take at least, however much time its prompt has. Shorter
parts would cost more by the token."""
_HASTE = 1.25
"""Prompts are computed at least so many times as fast as their first tokens need: measured times scatter."""
_BUSY_HORIZON_S = 4.0
"""The share of steps' time that goes into steps with prompts is averaged over about so long."""
_BUSY = 0.3
"""From this share on, prompts are computed as fast as the objective lets: the next one is likely to come soon."""
_NEAR = 0.8
"""Of the objective, up to which rows alone leave it within reach."""
_STEP_WEIGHT = 0.2
_PART_WEIGHT = 0.2
_STRIDE = 2.0
"""A part has at most so many times the tokens of the usual one, whose time says little of much longer ones."""
_MAX_TIMES_PREDICTED = 2.0
"""A step with a part is counted as at most so many times its predicted duration."""
_LEAST_SHARE = 0.7
"""The least that a token of a part is predicted to cost, as a share of a further token's cost: decoding rows are bound by
memory bandwidth, so a part beside them can be cheaper by the token than a prompt alone."""
_STALE_STEPS = 10
"""So many steps of rows alone after one with a part show what these rows took beside it."""


class PromptBudget:
    """objective_s: for the time between a row's tokens, 0 for none."""

    def __init__(self, objective_s: float) -> None:
        self.objective_s = objective_s
        self.step_s = 0.0
        """Of decoding rows alone; 0: unknown."""
        self._usual_tokens, self._usual_s = 0.0, 0.0
        """Of the usual part, and what it adds to a step of rows."""
        self._further = FurtherCost()
        self._steps_since_part = _STALE_STEPS
        """Steps without a part beside rows since the last one with one."""
        self._busy = 0.0
        """The share of the latest steps' time that went into steps with prompts."""
        self._planned = 0
        """Tokens of the part that was planned last beside rows."""

    @property
    def token_s(self) -> float:
        """What a further token of a prompt adds to a step; 0: unknown."""
        return self._further.token_s

    def observe(self, *, rows: int, prompt_tokens: int, seconds: float) -> None:
        """A step of so many decoding rows and tokens of prompts took so long."""
        self._busy += min(1.0, seconds / _BUSY_HORIZON_S) * ((prompt_tokens > 0) - self._busy)
        if prompt_tokens and rows:
            is_predicted = self._usual_tokens and self.token_s
            max_s = _MAX_TIMES_PREDICTED * self._predicted_s(prompt_tokens) if is_predicted else math.inf
            added_s = min(seconds, max_s) - self.step_s
            self._further.observe_part(prompt_tokens, added_s, is_likely=self.step_s > 0 and seconds <= max_s)
            if 2 * prompt_tokens >= self._planned or seconds > self.objective_s:  # a prompt's end says little of whole parts
                weight = _PART_WEIGHT if self._usual_tokens else 1.0
                self._usual_tokens += weight * (prompt_tokens - self._usual_tokens)
                self._usual_s += weight * (added_s - self._usual_s)
        elif prompt_tokens:
            self._further.observe_alone(prompt_tokens, seconds, self.step_s)
        else:
            more_s = (_STEP_WEIGHT if self.step_s else 1.0) * (seconds - self.step_s)
            self.step_s += more_s
            if self._steps_since_part < _STALE_STEPS:  # what parts were taken to add was partly rows that had come
                self._usual_s = max(0.0, self._usual_s - max(0.0, more_s))
        self._steps_since_part = 0 if prompt_tokens and rows else self._steps_since_part + 1

    def limit(self, rows: int, budget: int, needed_per_s: float = math.inf) -> int:
        """Return how many prompt tokens a step with so many decoding rows may compute, `budget` at most.

        needed_per_s: prompt tokens a second that bring first tokens in time, see `needed_rate`; by default as many as possible.
        """
        if not self.objective_s:
            return budget
        if not rows:
            return min(budget, IDLE_TOKENS)
        self._planned = self._part(rows, needed_per_s)
        return min(budget, self._planned)

    def _part(self, rows: int, needed_per_s: float = math.inf, stride: float = _STRIDE) -> int:
        """stride: how many times the tokens of the usual part it may have."""
        if not self._usual_tokens or not self.token_s:
            return GRAIN_TOKENS
        limit_s = max(self.objective_s, self._growth * self.step_s)
        tokens = self._tokens_within(self._planned_step_s(needed_per_s), stride)
        if tokens + rows < 2 * GRAIN_TOKENS:
            return max(LEAST_TOKENS, tokens)
        excess = (tokens + rows) % GRAIN_TOKENS
        longer = tokens + GRAIN_TOKENS - excess
        if 2 * excess >= GRAIN_TOKENS and longer <= self._tokens_within(limit_s, stride):
            return longer
        return max(LEAST_TOKENS, tokens - excess)

    def _expected_part(self, rows: int) -> int:
        """Return how many tokens the next part beside so many rows is predicted to have; `token_s` must be known. Until one has
        been measured: how many parts will have once they have grown."""
        if self._usual_tokens:
            return self._part(rows, stride=math.inf)
        return max(GRAIN_TOKENS, int((self._target_s - self.step_s) / self.token_s))

    def _tokens_within(self, seconds: float, stride: float) -> int:
        """Of the part that makes a step of rows take so long."""
        tokens = self._usual_tokens + (seconds - self.step_s - self._usual_s) / self.token_s
        return int(min(tokens, stride * max(self._usual_tokens, GRAIN_TOKENS)))

    def _predicted_s(self, tokens: int) -> float:
        """Return the predicted seconds of a step of rows with a part of `tokens` tokens; `token_s` must be known."""
        return self.step_s + max(0.0, self._usual_s + (tokens - self._usual_tokens) * self.token_s)

    @property
    def _target_s(self) -> float:
        """What a step of rows with a part is planned to take at most."""
        return max(_MARGIN * self.objective_s, self._growth * self.step_s)

    def _planned_step_s(self, needed_per_s: float) -> float:
        """Return what a step of rows with a part is planned to take, if so many prompt tokens a second are needed: the longer,
        the more of its time the worker spends on prompts."""
        share = _HASTE / (1.0 - min(self._busy / _BUSY, 0.99) ** 4) * needed_per_s * self.token_s
        if share >= 1.0:
            return self._target_s
        fixed_s = self.step_s + self._usual_s - self._usual_tokens * self.token_s
        least_s = max(_LEAST_MARGIN * self.objective_s, self._growth * self.step_s)
        return min(self._target_s, max(least_s, fixed_s / (1.0 - share)))

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
        if not rows:
            alone_s = self._further.alone_s
            return 1 / alone_s if alone_s else self._further.short.per_s or self._further.beside.per_s
        if not self.token_s:
            return 0.0
        part = min(budget, self._expected_part(rows) if self.objective_s else budget)
        return part / max(self._predicted_s(part), _LEAST_SHARE * part * self.token_s)


def needed_rate(prompts: Collection[Sequence], now: float, remaining: Callable[[Sequence], float]) -> float:
    """Return how many prompt tokens a second bring each prompt's first token when it is due. Infinite, which is as many as
    possible: one of them is due at no time, or late, or a preempted one that is computed again.

    remaining: prompts with the least are computed first.
    """
    if any(sequence.due_at <= now or sequence.num_outputs for sequence in prompts):
        return math.inf
    tokens, needed = 0, 0.0
    for sequence in sorted(prompts, key=remaining):
        tokens += sequence.num_unplanned
        needed = max(needed, tokens / (sequence.due_at - now))
    return needed
