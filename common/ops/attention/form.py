"""What attention computes, apart from its tensors: which keys a query sees, and what happens to their scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class Reach(NamedTuple):
    """Which keys a query sees besides causality. Layers of equal reach share the plan of a step.

    window: keys that a query sees, its own included; 0 for all keys up to its own.
    chunk: positions of a chunk; a query sees only keys of its own chunk (position // chunk). 0 for no chunks.
    """

    window: int = 0
    chunk: int = 0

    def first_key(self, position: int) -> int:
        """Return the first key that the query at `position` sees."""
        first = position - self.window + 1 if self.window else 0
        return max(first, position // self.chunk * self.chunk if self.chunk else 0, 0)


UNLIMITED = Reach()


class FormKind(NamedTuple):
    """What a plan is made for: layers of equal kind share the plan of a step."""

    reach: Reach = UNLIMITED
    has_sinks: bool = False
    is_capped: bool = False

    @property
    def is_adjusted(self) -> bool:
        """Return whether scores have a cap or sinks."""
        return self.has_sinks or self.is_capped


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

    def __post_init__(self) -> None:
        """:raises ValueError: for numbers that make no attention."""
        if not self.scale > 0 or self.window < 0 or self.chunk < 0 or not self.soft_cap >= 0:
            raise ValueError(
                "scale must be positive, window, chunk and soft cap not negative, not "
                f"{self.scale}, {self.window}, {self.chunk}, {self.soft_cap}"
            )

    @property
    def reach(self) -> Reach:
        """Return which keys a query sees."""
        return Reach(self.window, self.chunk)

    @property
    def kind(self) -> FormKind:
        """Return which plan serves this layer."""
        return FormKind(self.reach, self.sinks is not None, self.soft_cap > 0)

    @property
    def is_plain(self) -> bool:
        """Tell whether this is causal softmax attention over all keys."""
        return self.kind == FormKind()

    def first_key(self, position: int) -> int:
        """Return the first key that the query at `position` sees."""
        return self.reach.first_key(position)

    def check(self, num_heads: int, device: torch.device) -> None:
        """:raises ValueError: if the sinks are not float32 [num_heads] on `device`, contiguous."""
        sinks = self.sinks
        if sinks is None:
            return
        if sinks.shape != (num_heads,) or sinks.dtype != torch.float32 or not sinks.is_contiguous():
            raise ValueError(f"sinks are contiguous float32 [{num_heads}], not {sinks.dtype} {list(sinks.shape)}")
        if sinks.device != device:
            raise ValueError(f"sinks must be on {device}, not on {sinks.device}")
