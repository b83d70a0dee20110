"""What a mixture of experts computes, apart from its tensors, and what its parts hand to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from common.ops.linear.weight import LinearWeight

Scoring = Literal["softmax", "sigmoid", "softmax_selected"]
ActivationKind = Literal["silu", "gelu_tanh", "clamped_swiglu"]


@dataclass(frozen=True, slots=True)
class RouterForm:
    """How experts are chosen and weighed.

    top_k: experts of a token.
    scoring: "softmax" over all experts, "sigmoid" of each, or "softmax_selected": over the chosen ones alone.
    renormalise: whether the weights of a token are divided by their sum.
    scale: factor of the weights, after that.
    groups, top_groups: experts lie in so many groups of equal size, and only the best of these are chosen from. A group is as
    good as the sum of its two best scores (DeepSeek-V3, arXiv 2412.19437). 1 and 1 for no groups.
    """

    top_k: int
    scoring: Scoring = "softmax"
    renormalise: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1


class Routing(NamedTuple):
    """ids: int32 [rows, top_k], the best first; weights: float32 [rows, top_k]."""

    ids: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True, slots=True)
class ExpertActivation:
    """What stands between an expert's two linears, of gate and up.

    silu, gelu_tanh: activation(gate) * up.
    clamped_swiglu: (up + 1) * gate * sigmoid(alpha * gate), with gate at most `limit` and up within it (gpt-oss).
    """

    kind: ActivationKind = "silu"
    alpha: float = 1.702
    limit: float = 7.0


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Every expert's linears: gate above up, [2 * intermediate, hidden], and down, [hidden, intermediate]."""

    gate_up: tuple[LinearWeight, ...]
    down: tuple[LinearWeight, ...]

    @property
    def num_experts(self) -> int:
        return len(self.down)

    @property
    def parameters(self) -> int:
        return sum(weight.parameters for weight in (*self.gate_up, *self.down))
