"""The dense MLP: down(activation(gate(x)) · up(x))."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.models.blocks.border import Border, Norms
from common.models.blocks.loading import take_fused, take_norms
from common.models.blocks.shards import ShardRule
from common.models.spec import DenseSpec, ModelSpec
from common.models.weights.base import WeightLoader
from common.ops.linear.gate_up import gate_up
from common.ops.linear.linear import linear, takes_quantised
from common.ops.linear.weight import LinearWeight, Role
from common.ops.tensors import Activation


@dataclass(slots=True, frozen=True)
class DenseBlock:
    """gate_up: the fused projections, the gate's rows first. It keeps nothing in the cache."""

    spec: DenseSpec
    norms: Norms
    gate_up: LinearWeight
    down: LinearWeight

    def forward(self, border: Border) -> Border:
        x = border.read(self.norms, self.gate_up)
        middle = gated(x, self.spec, self.gate_up, self.down)
        return Border(border.residual).leave_linear(middle, self.down, self.norms)

    @property
    def linears(self) -> dict[Role, LinearWeight]:
        return {"gate_up": self.gate_up, "down": self.down}


SHARDS: dict[str, ShardRule] = {"norms": "replicated", "gate_up": "outputs", "down": "inputs"}


def feed_forward(x: Activation, spec: DenseSpec, into: LinearWeight, down: LinearWeight) -> torch.Tensor:
    """x: [rows, hidden_size]. Returns the same, or float32 partial sums of it [splits, …]."""
    return linear(gated(x, spec, into, down), down, split=True)


def gated(x: Activation, spec: DenseSpec, into: LinearWeight, down: LinearWeight) -> Activation:
    """x: [rows, hidden_size]. Returns [rows, intermediate_size], quantised if `down` wants that."""
    assert spec.activation != "clamped_swiglu", "an expert's"
    rows = len(x) if isinstance(x, torch.Tensor) else len(x.data)
    return gate_up(x, into, activation=spec.activation, quantise=takes_quantised(down, rows))


def load_dense(loader: WeightLoader, model: ModelSpec, layer: int, spec: DenseSpec) -> DenseBlock:
    """:raises WeightsError: if the weights don't fit."""
    names, prefix = model.names.layer, f"{model.names.layers}.{layer}"
    norms = take_norms(loader, model, prefix, names.mlp_norms)
    return DenseBlock(spec, norms, *take_feed_forward(loader, model, prefix, names.gate_up, names.down, spec))


def take_feed_forward(
    loader: WeightLoader, model: ModelSpec, prefix: str, gate_up: Sequence[str], down: str, spec: DenseSpec
) -> tuple[LinearWeight, LinearWeight]:
    """Return the fused projections and the one back."""
    middle = spec.intermediate_size
    return (
        take_fused(loader, prefix, gate_up, (middle, middle), model.hidden_size, spec.bias),
        take_fused(loader, prefix, (down,), (model.hidden_size,), middle, spec.bias),
    )
