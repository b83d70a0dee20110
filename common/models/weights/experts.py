"""The experts of a layer, from the files: each expert's linears by themselves, or all of them stacked in one tensor.

    experts.N.gate_proj …               as any linear of the model, in any format
    experts.gate_up_proj, down_proj     floats [experts, inputs, outputs]
    experts.X_blocks, X_scales          MXFP4 of gpt-oss, bytes [experts, outputs, inputs / 32, 16] and [experts, outputs, …]

On a GPU they stay quantised where the kernels read the format (`formats/stored.py`); on a CPU they are dequantised, one
expert at a time. No more than one layer's experts are there twice.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from common.models.formats.mxfp4 import GROUP, experts_reference
from common.models.spec import EACH_EXPERT, ExpertsSpec, LayerNames
from common.models.weights.base import WeightLoader
from common.models.weights.errors import WeightsError
from common.models.weights.expert_stack import Stored, plain, stack_experts
from common.ops.backend import on_device
from common.ops.linear.weight import LinearWeight, pack_linear
from common.ops.moe.experts import pack_experts
from common.ops.moe.form import ExpertWeights
from common.ops.moe.grouped_weight import GroupedWeight

_NAN = 255


def take_experts(loader: WeightLoader, prefix: str, names: LayerNames, spec: ExpertsSpec, hidden: int) -> ExpertWeights:
    """Return the weights of a layer's experts, packed for the loader's device. prefix: of the layer.

    :raises WeightsError: if a tensor is missing or has another shape, or scales are NaN.
    """
    prefix = f"{prefix}.{names.experts}"
    if loader.has(f"{prefix}.gate_up_proj_blocks"):
        return _blocks(loader, prefix, names, spec, hidden)
    each = names.each_expert or (() if loader.has(f"{prefix}.gate_up_proj") else _unrolled(loader, prefix))
    if each:
        return _each(loader, prefix, each, spec, hidden)
    count, middle = spec.router.num_experts, spec.intermediate_size
    gate_up = loader.take(f"{prefix}.gate_up_proj", count, hidden, 2 * middle).transpose(1, 2)
    down = loader.take(f"{prefix}.down_proj", count, middle, hidden).transpose(1, 2)
    gate_up_bias, down_bias = _stacked_biases(loader, prefix, names, spec, hidden)
    if names.interleaved_gate_up:
        gate_up = _halves(gate_up)
    invariant = loader.batch_invariant
    return pack_experts(gate_up.contiguous(), down.contiguous(), gate_up_bias, down_bias, batch_invariant=invariant)


def _unrolled(loader: WeightLoader, prefix: str) -> tuple[str, ...]:
    """Quantisers write the linears of stacked experts one by one."""
    first = f"{prefix}.0.{EACH_EXPERT[0]}."
    return EACH_EXPERT if any(name.startswith(first) for name in loader.source.shapes) else ()


def _each(loader: WeightLoader, prefix: str, names: tuple[str, ...], spec: ExpertsSpec, hidden: int) -> ExpertWeights:
    count, middle = spec.router.num_experts, spec.intermediate_size
    gate, up, down = names

    def parts() -> Iterator[tuple[list[Stored], list[Stored]]]:
        for expert in range(count):
            one = f"{prefix}.{expert}"
            first: list[Stored] = [loader.take_stored(f"{one}.{name}", middle, hidden) for name in (gate, up)]
            yield first, [loader.take_stored(f"{one}.{down}", hidden, middle)]

    gate_up_bias = down_bias = None
    if spec.bias:
        biases = [[loader.take(f"{prefix}.{expert}.{name}.bias", middle) for name in (gate, up)] for expert in range(count)]
        gate_up_bias = torch.stack([torch.cat(pair) for pair in biases])
        down_bias = torch.stack([loader.take(f"{prefix}.{expert}.{down}.bias", hidden) for expert in range(count)])
    if not _for_gpu(loader):
        return _on_cpu(parts(), gate_up_bias, down_bias, loader.dtype)
    into, back = zip(*parts(), strict=True)
    keep = loader.keeps_quantised
    return ExpertWeights.grouped(
        stack_experts(into, gate_up_bias, loader.dtype, keep=keep),
        stack_experts(back, down_bias, loader.dtype, keep=keep),
        batch_invariant=loader.batch_invariant,
    )


def _on_cpu(
    parts: Iterator[tuple[list[Stored], list[Stored]]],
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> ExpertWeights:
    """Pack one expert after the other."""
    gate_up: list[LinearWeight] = []
    down: list[LinearWeight] = []
    for expert, (first, second) in enumerate(parts):
        whole = torch.cat([plain(part, dtype) for part in first])
        gate_up.append(pack_linear(whole, None if gate_up_bias is None else gate_up_bias[expert]))
        down.append(pack_linear(plain(second[0], dtype), None if down_bias is None else down_bias[expert]))
    return ExpertWeights(tuple(gate_up), tuple(down))


def _blocks(loader: WeightLoader, prefix: str, names: LayerNames, spec: ExpertsSpec, hidden: int) -> ExpertWeights:
    count, middle = spec.router.num_experts, spec.intermediate_size
    if hidden % GROUP or middle % GROUP:
        raise WeightsError(f"{prefix}: MXFP4 packs multiples of {GROUP} inputs, not {hidden} and {middle}")
    gate_up_bias, down_bias = _stacked_biases(loader, prefix, names, spec, hidden)
    linears: list[GroupedWeight] = []
    on_cpu = not _for_gpu(loader)
    packed: list[list[LinearWeight]] = []
    for name, rows, inputs, bias in (
        ("gate_up_proj", 2 * middle, hidden, gate_up_bias),
        ("down_proj", hidden, middle, down_bias),
    ):
        blocks = loader.take_codes(f"{prefix}.{name}_blocks", count, rows, inputs // GROUP, GROUP // 2)
        scales = loader.take_codes(f"{prefix}.{name}_scales", count, rows, inputs // GROUP)
        if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
            raise WeightsError(f"{prefix}.{name}_blocks and _scales are bytes, not {blocks.dtype} and {scales.dtype}")
        if bool((scales == _NAN).any()):
            raise WeightsError(f"{prefix}.{name}_scales holds a scale that is NaN")
        if name == "gate_up_proj" and names.interleaved_gate_up:
            blocks, scales = _halves(blocks), _halves(scales)
        if on_cpu:
            each = zip(blocks.split(1), scales.split(1), bias if bias is not None else [None] * count, strict=True)
            packed.append([pack_linear(experts_reference(one, two)[0].to(loader.dtype), three) for one, two, three in each])
        elif loader.keeps_quantised:
            linears.append(GroupedWeight(blocks.flatten(2).contiguous(), "mxfp4", scales.contiguous(), bias=bias))
        else:
            whole = torch.empty(count, rows, inputs, dtype=loader.dtype, device=loader.device)
            for place, one, two in zip(whole, blocks.split(1), scales.split(1), strict=True):
                place.copy_(experts_reference(one, two)[0])
            linears.append(GroupedWeight(whole, bias=bias))
    if on_cpu:
        return ExpertWeights(tuple(packed[0]), tuple(packed[1]))
    return ExpertWeights.grouped(*linears, batch_invariant=loader.batch_invariant)


def _for_gpu(loader: WeightLoader) -> bool:
    return on_device(torch.empty(0, device=loader.device))


def _stacked_biases(
    loader: WeightLoader, prefix: str, names: LayerNames, spec: ExpertsSpec, hidden: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if not spec.bias:
        return None, None
    count = spec.router.num_experts
    gate_up = loader.take(f"{prefix}.gate_up_proj_bias", count, 2 * spec.intermediate_size)
    down = loader.take(f"{prefix}.down_proj_bias", count, hidden)
    return (_halves(gate_up).contiguous() if names.interleaved_gate_up else gate_up), down


def _halves(x: torch.Tensor) -> torch.Tensor:
    """x: [experts, 2 * middle, …], rows of gate and up in turns. Returns the gate's first."""
    return torch.cat((x[:, ::2], x[:, 1::2]), 1)
