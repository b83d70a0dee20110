"""What crosses the border between two blocks of a decoder."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from common.ops.linear.linear import add_linear, linear, takes_quantised
from common.ops.linear.weight import LinearWeight
from common.ops.norm.add_rms_norm import add_rms_norm
from common.ops.norm.rms_norm import rms_norm
from common.ops.tensors import Activation


@dataclass(slots=True, frozen=True)
class Norms:
    """A block's norms, [hidden_size] each in the model's dtype: before it, and behind it before the residual is added; None
    where it has none."""

    before: torch.Tensor | None
    behind: torch.Tensor | None
    eps: float


@dataclass(slots=True, frozen=True)
class Border:
    """The residual stream, and what the block before has made for it and not yet added.

    residual: [rows, hidden_size] in the model's dtype; changed in place by a reader, which adds `delta`, and by a block that
    adds what it made itself.
    delta: None; [rows, hidden_size] in that dtype; or float32 partial sums [splits, rows, hidden_size], to be added first to
    last.
    behind: [hidden_size], the norm that the sum goes through before it is added; None for none.

    The block that reads adds, normalises, and quantises for its first linear, all in one kernel: so sums stay partial and
    activations leave no kernel unquantised.
    """

    residual: torch.Tensor
    delta: torch.Tensor | None = None
    behind: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        return len(self.residual)

    def read(self, norms: Norms, reader: LinearWeight | None) -> Activation:
        """Add `delta` to the residual, and return what the block's first linear takes: [rows, hidden_size] in the model's
        dtype, or quantised where `reader` wants that.

        The residual changes in place; what is returned may be the residual itself.
        """
        quantise = reader is not None and takes_quantised(reader, self.rows)
        return add_rms_norm(self.residual, self.delta, norms.before, norms.eps, behind=self.behind, quantise=quantise)

    def stream(self, eps: float) -> torch.Tensor:
        """Return a copy of the residual with what is to be added to it, [rows, hidden_size]."""
        if self.delta is None:
            return self.residual.clone()
        added = total(self.delta, self.residual.dtype)
        return self.residual + (added if self.behind is None else rms_norm(added, self.behind, eps))

    def leave(self, delta: torch.Tensor, norms: Norms) -> Border:
        """Return the border behind a block that has read this one and made `delta`, as `Border.delta` describes it."""
        return Border(self.residual, delta, norms.behind)

    def leave_linear(self, x: Activation, weight: LinearWeight, norms: Norms) -> Border:
        """As `leave` with linear(x, weight), which may be added to the residual at once."""
        if norms.behind is None and add_linear(self.residual, x, weight):
            return Border(self.residual)
        return self.leave(linear(x, weight, split=True), norms)

    def select(self, rows: torch.Tensor) -> Border:
        """Return those rows of a border that was read. rows: int64."""
        return Border(self.residual.index_select(0, rows))


def total(delta: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """delta: as `Border.delta`. Returns [rows, size] in `dtype`."""
    return delta if delta.ndim == 2 else delta.sum(0).to(dtype)
