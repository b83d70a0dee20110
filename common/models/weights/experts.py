"""The experts of a layer, from the files: each expert's linears by themselves, or all of them stacked in one tensor."""

from __future__ import annotations

import torch

from common.models.spec import ExpertsSpec, LayerNames
from common.models.weights.base import WeightLoader
from common.ops.moe.experts import pack_experts
from common.ops.moe.form import ExpertWeights


def take_experts(loader: WeightLoader, prefix: str, names: LayerNames, spec: ExpertsSpec, hidden: int) -> ExpertWeights:
    """Return the weights in the loader's dtype, FP8 ones of single experts dequantised. prefix: of the layer.

    :raises WeightsError: if a tensor is missing or has another shape.
    """
    prefix, middle = f"{prefix}.{names.experts}", spec.intermediate_size
    if names.each_expert:
        return _each(loader, prefix, names.each_expert, spec, hidden)
    count = spec.router.num_experts
    gate_up = loader.take(f"{prefix}.gate_up_proj", count, hidden, 2 * middle).transpose(1, 2)
    down = loader.take(f"{prefix}.down_proj", count, middle, hidden).transpose(1, 2)
    gate_up_bias = down_bias = None
    if spec.bias:
        gate_up_bias = loader.take(f"{prefix}.gate_up_proj_bias", count, 2 * middle)
        down_bias = loader.take(f"{prefix}.down_proj_bias", count, hidden)
    if names.interleaved_gate_up:
        gate_up = _halves(gate_up)
        gate_up_bias = None if gate_up_bias is None else _halves(gate_up_bias)
    return pack_experts(gate_up.contiguous(), down.contiguous(), gate_up_bias, down_bias)


def _each(loader: WeightLoader, prefix: str, names: tuple[str, ...], spec: ExpertsSpec, hidden: int) -> ExpertWeights:
    count, middle = spec.router.num_experts, spec.intermediate_size
    gate, up, down = names
    made = torch.empty(count, 2 * middle, hidden, dtype=loader.dtype, device=loader.device)
    back = torch.empty(count, hidden, middle, dtype=loader.dtype, device=loader.device)
    for expert in range(count):
        made[expert, :middle] = loader.take(f"{prefix}.{expert}.{gate}.weight", middle, hidden)
        made[expert, middle:] = loader.take(f"{prefix}.{expert}.{up}.weight", middle, hidden)
        back[expert] = loader.take(f"{prefix}.{expert}.{down}.weight", hidden, middle)
    return pack_experts(made, back)


def _halves(x: torch.Tensor) -> torch.Tensor:
    """x: [experts, 2 * middle, …], rows of gate and up in turns. Returns the gate's first."""
    return torch.cat((x[:, ::2], x[:, 1::2]), 1)
