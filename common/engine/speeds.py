"""How fast an engine has been lately: moving averages, so that the router can decide by measured cost. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from common.engine.plan import StepPlan

_WEIGHT = 0.1
_PREFILL_SHARE = 4
"""Tokens a row, from which on a step counts as prefill."""


@dataclass(slots=True)
class Speeds:
    """0 where nothing was measured yet."""

    step_ms: float = 0.0
    tokens_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0

    def measure(self, plan: StepPlan, elapsed_s: float) -> None:
        """A step has run; with a runner that runs ahead, `elapsed_s` counts from the end of the step before."""
        elapsed_s = max(elapsed_s, 1e-6)
        sampled = sum(row.num_samples for row in plan.rows)
        self.step_ms += _WEIGHT * (elapsed_s * 1000 - self.step_ms)
        self.tokens_per_s += _WEIGHT * (sampled / elapsed_s - self.tokens_per_s)
        if plan.num_tokens >= _PREFILL_SHARE * len(plan.rows):
            weight = _WEIGHT if self.prefill_tokens_per_s else 1.0
            self.prefill_tokens_per_s += weight * (plan.num_tokens / elapsed_s - self.prefill_tokens_per_s)
