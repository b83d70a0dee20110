"""The mixture of experts: a router, the experts that it chooses for each token, and maybe one that every token visits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from common.models.blocks.border import Border, Norms, total
from common.models.blocks.loading import take_norms
from common.models.blocks.mlp import feed_forward, take_feed_forward
from common.models.blocks.shards import ShardRule
from common.models.spec import DenseSpec, ExpertsSpec, ModelSpec
from common.models.weights.base import WeightLoader
from common.models.weights.experts import take_experts
from common.ops.linear.linear import linear
from common.ops.linear.weight import LinearWeight, Role
from common.ops.moe.experts import experts
from common.ops.moe.form import ExpertActivation, ExpertWeights, RouterForm
from common.ops.moe.route import route


@dataclass(slots=True, frozen=True)
class ExpertsBlock:
    """It keeps nothing in the cache.

    router: [num_experts, hidden_size], with its bias. choice_bias: float32 [num_experts] or None.
    shared: gate and up, and down, of the expert that all tokens visit; None for none.
    """

    spec: ExpertsSpec
    norms: Norms
    router: LinearWeight
    choice_bias: torch.Tensor | None
    weights: ExpertWeights
    shared: tuple[LinearWeight, LinearWeight] | None

    def forward(self, border: Border) -> Border:
        x = border.read(self.norms, None)  # the router and the experts take nothing quantised
        assert isinstance(x, torch.Tensor)
        router, spec = self.spec.router, self.spec
        form = RouterForm(top_k=router.top_k, scoring=router.scoring, renormalise=router.renormalise, scale=router.weight_scale)
        activation = ExpertActivation(spec.activation, spec.alpha, spec.limit)
        routing = route(linear(x, self.router, split=True), form, self.choice_bias)
        alone = self.shared is None
        delta = experts(x, routing, self.weights, activation, weigh_inputs=router.weigh_inputs, split=alone)
        if self.shared is not None:
            dense = DenseSpec(intermediate_size=spec.shared_size, activation=spec.activation)
            delta = delta + total(feed_forward(x, dense, *self.shared), x.dtype)
        return Border(border.residual).leave(delta, self.norms)

    @property
    def parameters(self) -> int:
        """Numbers in the linears that a token goes through."""
        routed = self.weights.parameters * self.spec.router.top_k // self.spec.router.num_experts
        return routed + self.router.parameters + sum(weight.parameters for weight in self.shared or ())

    @property
    def linears(self) -> dict[Role, LinearWeight]:
        """None of the linears that FP8 choices and tables of kernels know by their roles."""
        return {}


SHARDS: dict[str, ShardRule] = {
    "norms": "replicated",
    "router": "replicated",
    "choice_bias": "replicated",
    "weights": "experts",
    "shared_gate_up": "outputs",
    "shared_down": "inputs",
}


def load_experts(loader: WeightLoader, model: ModelSpec, layer: int, spec: ExpertsSpec) -> ExpertsBlock:
    """:raises WeightsError: if the weights don't fit."""
    names, prefix, hidden = model.names.layer, f"{model.names.layers}.{layer}", model.hidden_size
    norms = take_norms(loader, model, prefix, names.mlp_norms)
    count, router = spec.router.num_experts, f"{prefix}.{names.router}"
    bias = loader.take(f"{router}.bias", count) if spec.router.bias else None
    choice_bias, shared = None, None
    if spec.router.choice_bias:
        shape = (1, count) if names.choice_bias_in_rows else (count,)
        choice_bias = loader.take(f"{prefix}.{names.choice_bias}", *shape, dtype=torch.float32).flatten()
    if spec.shared_size:
        dense = DenseSpec(intermediate_size=spec.shared_size, activation=spec.activation)
        shared = take_feed_forward(loader, model, prefix, names.shared_gate_up, names.shared_down, dense)
    return ExpertsBlock(
        spec=spec,
        norms=norms,
        router=loader.pack_plain(loader.take(f"{router}.weight", count, hidden), bias),
        choice_bias=choice_bias,
        weights=take_experts(loader, prefix, names, spec, hidden),
        shared=shared,
    )
