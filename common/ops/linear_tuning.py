"""Measures the linears of a model, when it is loaded: which implementation, and which activations, for each bucket.

Measured as they run: in a CUDA graph, with programmatic dependent launch, over several copies of the weight so that L2 holds
none of them. What a choice costs elsewhere is added: partial sums are read by the next op; activations that no norm
quantises on its way are quantised by a kernel of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Literal

import torch

from common.ops import linear_device
from common.ops.linear import FP8_BLOCK, LinearWeight
from common.ops.linear_candidates import ROW_BUCKETS, Candidate, Op
from common.ops.quantise import quantise_rows
from common.ops.tensors import Activation
from common.ops.tuning import Case, Tuned, launches_for, tune

TunedFormat = Literal["plain", "fp8", "fp8_blocks"]
Role = Literal["qkv", "output", "gate_up", "down", "head"]
"""What a linear is in the decoder. Norms before qkv, gate_up and head can quantise; before the others nothing does."""

LinearShape = tuple[TunedFormat, int, int, Role]
"""(format, out_features, in_features, role)"""

_OPS: dict[Role, Op] = {"qkv": "split", "output": "split", "gate_up": "gated", "down": "split", "head": "linear"}
_ROTATED_BYTES = 256 << 20
"""Several times what L2 holds (50–60 MB on H200, 126 MB on B200)."""
_PARTIALS_BYTES_PER_S = 5e12
"""Partial sums were just written and are read from L2."""
_BYTES_PER_S, _FLOPS = 3.5e12, 6e14


def tune_linears(
    shapes: Iterable[LinearShape],
    *,
    dtype: torch.dtype,
    device: torch.device,
    buckets: Sequence[int] = ROW_BUCKETS,
    measure: Callable[[Callable[[int], object], int], float] | None = None,
) -> Tuned:
    """Measures what the table of this GPU does not know, and saves it. Head: only buckets up to 512 rows, which it is used for.

    Needs a few hundred MB, or two copies of the largest weight, meanwhile. measure: as in `tuning.tune`.
    """
    linear_device.TABLE.open(device)
    wanted = list(dict.fromkeys(shapes))
    scratch = _Scratch(device, dtype)
    total = Tuned()
    for shape in wanted:
        weights = scratch.weights(shape)
        for found in _tune_shape(shape, weights, dtype, buckets, measure):
            total.seconds |= found.seconds
            total.failed |= found.failed
    if total.seconds:
        linear_device.TABLE.save()
    linear_device.forget_choices()
    return total


def _tune_shape(
    shape: LinearShape,
    weights: list[LinearWeight],
    dtype: torch.dtype,
    buckets: Sequence[int],
    measure: Callable[[Callable[[int], object], int], float] | None,
) -> Iterable[Tuned]:
    op, weight = _OPS[shape[3]], weights[0]
    precisions = (False,) if weight.format == "plain" else (False, True)
    sizes = [rows for rows in buckets if shape[3] != "head" or rows <= 512]
    activations = torch.randn(max(sizes), weight.in_features, dtype=dtype, device=weight.data.device)
    cases = [
        _case(op, shape[3], weights, activations[:rows].contiguous(), quantised) for rows in sizes for quantised in precisions
    ]
    table = linear_device.TABLE
    tuned = tune(table, cases, measure=measure)
    if len(precisions) > 1:
        for rows in sizes:
            keys = [linear_device.choice_key(op, weight, rows, quantised) for quantised in precisions]
            known = [key for key in keys if key in tuned.seconds]
            if known:
                best = min(known, key=lambda key: min(tuned.seconds[key].values()))
                chosen = table.get(best)
                assert chosen is not None
                table.put(linear_device.activations_key(weight, rows), chosen)
    yield tuned


def _case(op: Op, role: Role, weights: list[LinearWeight], x: torch.Tensor, quantised: bool) -> Case[Candidate]:
    weight, rows = weights[0], len(x)
    given: Activation = quantise_rows(x) if quantised else x
    quantises = quantised and role in ("output", "down")

    def run(candidate: Candidate, i: int) -> object:
        ready = quantise_rows(x) if quantises else given
        return linear_device.run(op, ready, weights[i % len(weights)], candidate)

    def extra_s(candidate: Candidate) -> float:
        """Reading partial sums instead of results."""
        if op != "split" or candidate.splits == 1:
            return 0.0
        return rows * weight.out_features * (4 * candidate.splits - x.element_size()) / _PARTIALS_BYTES_PER_S

    estimate = max(weight.data.nbytes / _BYTES_PER_S, 2 * rows * weight.data.numel() / _FLOPS)
    return Case(
        key=linear_device.choice_key(op, weight, rows, quantised),
        candidates=linear_device.options(op, weight, rows, quantised),
        run=run,
        launches=launches_for(estimate),
        extra_s=extra_s,
        kernel=lambda candidate: replace(candidate, splits=min(candidate.splits, 2)),  # float32 out, or not
    )


class _Scratch:
    """Random weights that stand for the model's: distinct ones in one buffer, which shapes share."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._flat: dict[torch.dtype, torch.Tensor] = {}

    def weights(self, shape: LinearShape) -> list[LinearWeight]:
        """As many as keep L2 from holding them, at least two."""
        kind, out_features, in_features, _ = shape
        item = self._dtype if kind == "plain" else torch.float8_e4m3fn
        size = out_features * in_features
        copies = max(2, math.ceil(_ROTATED_BYTES / (size * item.itemsize)))
        flat = self._buffer(item, copies * size)
        weight = LinearWeight(
            flat[:0], None, in_features, out_features, "plain" if kind == "plain" else "fp8", dtype=self._dtype
        )
        if kind == "fp8":
            weight = replace(weight, scale=torch.rand(out_features, device=self._device))
        elif kind == "fp8_blocks":
            blocks = (-(-out_features // FP8_BLOCK), -(-in_features // FP8_BLOCK))
            weight = replace(weight, scale=torch.rand(blocks, device=self._device))
        return [replace(weight, data=flat[i * size : (i + 1) * size].view(out_features, in_features)) for i in range(copies)]

    def _buffer(self, item: torch.dtype, size: int) -> torch.Tensor:
        flat = self._flat.get(item)
        if flat is None or len(flat) < size:
            self._flat.pop(item, None)
            flat = torch.empty(size, dtype=item, device=self._device)
            step = 1 << 26
            for start in range(0, size, step):  # 8-bit floats are made from wider ones
                part = flat[start : start + step]
                part.copy_(torch.randn(len(part), dtype=self._dtype, device=self._device))
            self._flat[item] = flat
        return flat
