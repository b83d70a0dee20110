"""Measure the mixtures of experts of a model when it is loaded: which implementation for each bucket of rows.

Measured as they run, with the model's own weights: a CUDA graph of calls with programmatic dependent launch, whose tokens are
routed uniformly, to other experts in each call, so that L2 holds few of the weights that a call reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from common.ops.moe import device as experts_device
from common.ops.moe.candidates import ROW_BUCKETS, ExpertCandidate, invariant_candidate
from common.ops.moe.form import ExpertActivation, Routing
from common.ops.moe.packed_weight import PackedWeight
from common.ops.tuning import Case, Tuned, launches_for, tune

BUDGET_S = 40.0
_ROUTINGS = 8
_BYTES_PER_S, _FLOPS = 2e12, 2e14


class TunedExperts(NamedTuple):
    """The experts of a layer. dtype: of activations."""

    gate_up: PackedWeight
    down: PackedWeight
    activation: ExpertActivation
    top_k: int
    dtype: torch.dtype


def tune_experts(
    layers: Iterable[TunedExperts],
    *,
    buckets: Sequence[int] = ROW_BUCKETS,
    budget_s: float = BUDGET_S,
    measure: Callable[[Callable[[int], object], int], float] | None = None,
) -> Tuned:
    """Measure what the table of this GPU does not know, and save it. Layers of equal shape are measured once.

    budget_s: no shape is begun after so many seconds; the rest keep their defaults, and are measured at the next start.
    measure: as in `tuning.tune`.
    """
    begun, total = time.monotonic(), Tuned()
    wanted = {_key(layer, 0): layer for layer in layers}
    if not wanted:
        return total
    device = next(iter(wanted.values())).gate_up.values.device

    def unknown() -> list[TunedExperts]:
        experts_device.TABLE.open(device)
        return [layer for layer in wanted.values() if not all(_is_known(layer, rows) for rows in buckets)]

    if unknown():
        with experts_device.TABLE.exclusive():  # another process may have measured them meanwhile
            for layer in unknown():
                if time.monotonic() - begun > budget_s:
                    break
                tuned = tune(experts_device.TABLE, [_case(layer, rows) for rows in buckets], measure=measure)
                total.seconds |= tuned.seconds
                total.failed |= tuned.failed
                if tuned.seconds:
                    experts_device.TABLE.save()  # at once: a start that is cut short goes on from here
    if total.seconds and device.type == "cuda":
        torch.cuda.empty_cache()  # the KV pool is sized by what is free
    experts_device.forget_choices()
    return total


def uniform_routing(experts: int, top_k: int, rows: int, device: torch.device) -> Routing:
    """Return different random experts for each token, all of the same weight."""
    ids = torch.rand(rows, experts, device=device).topk(top_k, dim=1).indices.int()
    return Routing(ids, torch.full((rows, top_k), 1 / top_k, device=device))


def _key(layer: TunedExperts, rows: int) -> str:
    return experts_device.choice_key(layer.gate_up, layer.activation, rows, layer.top_k, layer.dtype)


def _is_known(layer: TunedExperts, rows: int) -> bool:
    options = experts_device.options(layer.gate_up, rows, layer.top_k, layer.dtype)
    return experts_device.TABLE.get(_key(layer, rows)) in options


def _case(layer: TunedExperts, rows: int) -> Case[ExpertCandidate]:
    from common.ops.moe.experts_triton import experts_triton

    gate_up, down, device = layer.gate_up, layer.down, layer.gate_up.values.device
    x = torch.randn(rows, gate_up.k, dtype=layer.dtype, device=device)
    routings = [uniform_routing(gate_up.experts, layer.top_k, rows, device) for _ in range(_ROUTINGS)]

    def run(candidate: ExpertCandidate, i: int) -> object:
        return experts_triton(x, routings[i % _ROUTINGS], gate_up, down, layer.activation, candidate)

    touched = min(1.0, rows * layer.top_k / gate_up.experts)
    flops = 2 * rows * layer.top_k * (gate_up.n * gate_up.k + down.n * down.k)
    estimate = max(touched * (gate_up.nbytes + down.nbytes) / _BYTES_PER_S, flops / _FLOPS)
    safe = invariant_candidate(experts_device.shape_of(gate_up, layer.top_k, layer.dtype))
    return Case(
        key=_key(layer, rows),
        candidates=experts_device.options(gate_up, rows, layer.top_k, layer.dtype),
        run=run,
        kernel=lambda candidate: replace(candidate, splits=1),
        expected=lambda: experts_triton(x, routings[0], gate_up, down, layer.activation, safe).float(),
        launches=max(_ROUTINGS, launches_for(estimate)) if rows <= 256 else launches_for(estimate),
    )
