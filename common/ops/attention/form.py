"""What attention computes, apart from its tensors: which keys a query sees, and what happens to their scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """The attention of one layer.

    scale: factor of the scores q·k.
    window: keys that a query sees, its own included; 0 for all keys up to its own.
    chunk: positions of a chunk; a query sees only keys of its own chunk (position // chunk). 0 for no chunks.
    soft_cap: scores become soft_cap · tanh(score / soft_cap), after scaling and before masking; 0 for no cap.
    sinks: float32 [heads], a logit for each head that joins the softmax without a value (gpt-oss); None for none.
    """

    scale: float
    window: int = 0
    chunk: int = 0
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None

    def first_key(self, position: int) -> int:
        """Return the first key that the query at `position` sees."""
        first = position - self.window + 1 if self.window else 0
        return max(first, position // self.chunk * self.chunk if self.chunk else 0, 0)
