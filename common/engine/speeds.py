"""How fast an engine has been lately, so that the router can decide by measured cost. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from common.engine.plan import StepPlan

_WEIGHT = 0.1
_PREFILL_SHARE = 4
"""Tokens of prompts a row, from which on a step counts as prefill."""

_HORIZON_TOKENS = 8192
"""A rate is that of about so many tokens, the latest: short prompts, whose steps are slow by the token, count for little."""
_LEAST_TOKENS = 256
_MOST_TIMES = 8.0
"""A step counts as at most so many times as long as the rate says, and one that took so many times less shows that the rate
says nothing. A worker that was once stopped for a while would look slow, be sent no prompts where there are others, and never
show another speed. The last tokens of a very long prompt take some six times as long as the first ones."""
_LEAST_STEP_TOKENS = 32
"""A step of fewer tokens, of a canary or of what a cached prefix leaves, says nothing of how fast prompts are computed. An idle
worker gets a canary every half minute, and would look slower with each."""


class TokenRate:
    """Prompt tokens a second, of the latest `horizon` tokens; 0 until two steps and a few hundred tokens were measured. Steps
    of fewer than 32 do not count."""

    def __init__(self, horizon: int = _HORIZON_TOKENS) -> None:
        self.horizon = horizon
        self._tokens = 0.0
        self._seconds = 0.0
        self._steps = 0

    def measure(self, tokens: int, seconds: float) -> None:
        if tokens < _LEAST_STEP_TOKENS:
            return
        typical_s = tokens * self._seconds / self._tokens if self._tokens else 0.0
        kept = math.exp(-tokens / self.horizon) if _MOST_TIMES * seconds >= typical_s else 0.0
        if self.token_s:
            seconds = min(seconds, _MOST_TIMES * typical_s)
        self._steps += 1
        self._tokens = kept * self._tokens + tokens
        self._seconds = kept * self._seconds + seconds

    @property
    def per_s(self) -> float:
        return 1 / self.token_s if self.token_s else 0.0

    @property
    def token_s(self) -> float:
        """Seconds a token."""
        return self._seconds / self._tokens if self._tokens >= _LEAST_TOKENS and self._steps > 1 else 0.0


@dataclass(slots=True)
class Speeds:
    """0 where nothing was measured yet."""

    step_ms: float = 0.0
    tokens_per_s: float = 0.0
    prefill: TokenRate = field(default_factory=TokenRate)

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.prefill.per_s

    def measure(self, plan: StepPlan, elapsed_s: float) -> None:
        """A step has run; with a runner that runs ahead, `elapsed_s` counts from the end of the step before."""
        elapsed_s = max(elapsed_s, 1e-6)
        sampled = sum(row.num_samples for row in plan.rows)
        self.step_ms += _WEIGHT * (elapsed_s * 1000 - self.step_ms)
        self.tokens_per_s += _WEIGHT * (sampled / elapsed_s - self.tokens_per_s)
        prompts = sum(len(row.tokens) for row in plan.rows if row.is_prompt_part)
        if prompts >= _PREFILL_SHARE * len(plan.rows):
            self.prefill.measure(plan.num_tokens, elapsed_s)
