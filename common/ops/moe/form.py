"""What a mixture of experts computes, apart from its tensors, and what its parts hand to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from common.ops.linear.weight import LinearWeight
from common.ops.moe.grouped_weight import GroupedWeight
from common.ops.moe.packed_weight import PackedWeight, packed_weight

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
    """Every expert's linears: gate above up, [2 * intermediate, hidden], and down, [hidden, intermediate].

    gate_up, down: one linear per expert on a CPU; empty on a GPU.
    on_gpu: on a GPU, those of all experts: gate_up and down, in the kernels' order.
    """

    gate_up: tuple[LinearWeight, ...]
    down: tuple[LinearWeight, ...]
    on_gpu: tuple[PackedWeight, PackedWeight] | None = None

    @classmethod
    def grouped(cls, gate_up: GroupedWeight, down: GroupedWeight, *, batch_invariant: bool = False) -> ExpertWeights:
        """Return weights for a GPU. 4-bit codes are copied into the kernels' order, the others are shared. batch_invariant: see
        `PackedWeight`.

        :raises ValueError: if the two don't fit each other.
        """
        if (gate_up.experts, gate_up.k, gate_up.n) != (down.experts, down.n, 2 * down.k):
            raise ValueError(f"{list(gate_up.values.shape)} experts can't come before {list(down.values.shape)}")
        packed = [packed_weight(weight, batch_invariant=batch_invariant) for weight in (gate_up, down)]
        return cls((), (), (packed[0], packed[1]))

    @property
    def num_experts(self) -> int:
        return len(self.down) if self.on_gpu is None else self.on_gpu[0].experts

    @property
    def parameters(self) -> int:
        if self.on_gpu is not None:
            return sum(weight.experts * weight.n * weight.k for weight in self.on_gpu)
        return sum(weight.parameters for weight in (*self.gate_up, *self.down))
