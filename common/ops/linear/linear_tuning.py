"""Measures the linears of a model, when it is loaded: which implementation, and which activations, for each bucket.

Measured as they run: in a CUDA graph, with programmatic dependent launch, over several copies of the weight so that L2 holds
none of them. What a choice costs elsewhere is added: partial sums are read by the next op; activations that no norm
quantises on its way are quantised by a kernel of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import cast

import torch

from common.ops import backend
from common.ops.linear import device as linear_device
from common.ops.linear.candidates import ROW_BUCKETS, Candidate, Op
from common.ops.linear.weight import FP8_BLOCK, LinearWeight, Role, linear_from_grouped
from common.ops.quant.group_layout import MIN_RUN, Code
from common.ops.quant.grouped import GroupedWeight
from common.ops.quant.quantise import quantise_rows
from common.ops.tensors import Activation
from common.ops.tuning import Case, Tuned, launches_for, tune

TunedFormat = str
"""plain, fp8, fp8_blocks, or what `linear_device.grouped_name` says of a weight in groups."""

LinearShape = tuple[TunedFormat, int, int, Role]
"""(format, out_features, in_features, role)"""

_OPS: dict[Role, Op] = {
    "qkv": "split",
    "output": "split",
    "gate_up": "gated",
    "down": "split",
    "head": "wide",
    "router": "split",
}
_ROTATED_BYTES = 256 << 20
"""Several times what L2 holds (50–60 MB on H200, 126 MB on B200)."""
_PARTIALS_BYTES_PER_S = 5e12
"""Partial sums were just written and are read from L2."""
_NORM_BYTES_PER_S = 1.3e11
"""What a norm reads of a row, which one multiprocessor does: 0.5 µs for four more splits of 4096 numbers, on an H200."""
_ALONE_S = 1.5e-6
"""What a library's kernel costs beside ours, beyond its own time: without programmatic dependent launch neither it nor the
kernel behind it begins early. In steps of 64 rows of Llama-3.1-8B it was 1.9 µs, on an H200."""
_HEAD_ROWS = 512
_ALIGNED_ELEMENTS = 256
_BYTES_PER_S, _FLOPS = 3.5e12, 6e14


def tune_linears(
    shapes: Iterable[LinearShape],
    *,
    dtype: torch.dtype,
    device: torch.device,
    buckets: Sequence[int] = ROW_BUCKETS,
    measure: Callable[[Callable[[int], object], int], float] | None = None,
) -> Tuned:
    """Measures what the table of this GPU does not know, and saves it. The head up to 512 rows.

    Needs a few hundred MB, or two copies of the largest weight, meanwhile. measure: as in `tuning.tune`.
    """
    wanted = list(dict.fromkeys(shapes))

    def unknown() -> list[LinearShape]:
        linear_device.TABLE.open(device)
        return [shape for shape in wanted if not _is_known(shape, dtype, device, buckets)]

    tuned = Tuned()
    if unknown():
        with linear_device.TABLE.exclusive():  # another process may have measured them meanwhile
            tuned = _tune_shapes(unknown(), dtype, device, buckets, measure)
    if tuned.seconds and device.type == "cuda":
        torch.cuda.empty_cache()  # the KV pool is sized by what is free
    linear_device.forget_choices()
    return tuned


def tuned_format(weight: LinearWeight) -> TunedFormat:
    """Return the format of `weight` for a `LinearShape`."""
    if weight.grouped is not None:
        return linear_device.grouped_name(weight)
    if weight.format != "fp8":
        return "plain"
    return "fp8_blocks" if weight.scale is not None and weight.scale.ndim == 2 else "fp8"


def _is_known(shape: LinearShape, dtype: torch.dtype, device: torch.device, buckets: Sequence[int]) -> bool:
    op, weight = _OPS[shape[3]], _described(shape, dtype, device)
    return all(
        linear_device.TABLE.get(linear_device.choice_key(op, weight, rows, quantised))
        in linear_device.options(op, weight, rows, quantised)
        for rows in _sizes(shape, buckets)
        for quantised in _precisions(weight)
    )


def _sizes(shape: LinearShape, buckets: Sequence[int]) -> list[int]:
    return [rows for rows in buckets if shape[3] != "head" or rows <= _HEAD_ROWS]


def _precisions(weight: LinearWeight) -> tuple[bool, ...]:
    """Of activations: quantised?"""
    return (False, True) if weight.format == "fp8" else (False,)


def _described(shape: LinearShape, dtype: torch.dtype, device: torch.device) -> LinearWeight:
    """A weight of this shape without its numbers."""
    kind, out_features, in_features, _ = shape
    if kind == "plain":
        data = torch.empty(0, dtype=dtype, device=device)
        return LinearWeight(data, None, in_features, out_features, "plain", dtype=dtype)
    if kind not in ("fp8", "fp8_blocks"):
        return linear_from_grouped(_described_groups(kind, out_features, in_features, device), dtype=dtype)
    blocks = (-(-out_features // FP8_BLOCK), -(-in_features // FP8_BLOCK))
    scale = torch.full((out_features,) if kind == "fp8" else blocks, 0.01, device=device)
    data = torch.empty(0, dtype=torch.float8_e4m3fn, device=device)
    return LinearWeight(data, None, in_features, out_features, "fp8", scale, dtype)


def _described_groups(kind: TunedFormat, out_features: int, in_features: int, device: torch.device) -> GroupedWeight:
    """Codes without memory (a stride of 0), scales of 0.01."""
    name, _, offset = kind.partition("+")
    code, _, group = name.partition("/")
    size, run = int(group), max(MIN_RUN, int(group))
    steps = -(-in_features // (2 * run))
    scales = torch.full((steps * run // size, out_features, 2), 0.01, dtype=torch.float16, device=device).view(torch.int32)[
        :, :, 0
    ]
    shape = (steps, 2, out_features, run) if code == "int8" else (steps, out_features, run)
    data = torch.zeros(1, dtype=torch.int8 if code == "int8" else torch.uint8, device=device).expand(shape)
    channel = torch.ones(out_features, device=device)
    offsets = scales.contiguous() if offset else None
    return GroupedWeight(data, scales.contiguous(), offsets, channel, cast(Code, code), size, in_features)


def _tune_shapes(
    shapes: Sequence[LinearShape],
    dtype: torch.dtype,
    device: torch.device,
    buckets: Sequence[int],
    measure: Callable[[Callable[[int], object], int], float] | None,
) -> Tuned:
    buffers: dict[torch.dtype, torch.Tensor] = {}
    total = Tuned()
    for shape in shapes:
        op, weights = _OPS[shape[3]], _weights(_described(shape, dtype, device), buffers)
        weight, sizes = weights[0], _sizes(shape, buckets)
        activations = torch.randn(max(sizes), weight.in_features, dtype=dtype, device=device)
        cases = [
            _case(op, shape[3], weights, activations[:rows], quantised) for rows in sizes for quantised in _precisions(weight)
        ]
        tuned = tune(linear_device.TABLE, cases, measure=measure)
        total.seconds |= tuned.seconds
        total.failed |= tuned.failed
        if weight.format == "fp8":
            _choose_activations(op, weight, sizes, tuned)
        if tuned.seconds:
            linear_device.TABLE.save()  # at once: a start that is cut short goes on from here
    return total


def _choose_activations(op: Op, weight: LinearWeight, sizes: Sequence[int], tuned: Tuned) -> None:
    """Quantised where the best that takes them is faster than the best that does not."""
    for rows in sizes:
        keys = [linear_device.choice_key(op, weight, rows, quantised) for quantised in _precisions(weight)]
        known = [key for key in keys if key in tuned.seconds]
        if known:
            chosen = linear_device.TABLE.get(min(known, key=lambda key: min(tuned.seconds[key].values())))
            assert chosen is not None
            linear_device.TABLE.put(linear_device.activations_key(weight, rows), chosen)


def _case(op: Op, role: Role, weights: list[LinearWeight], x: torch.Tensor, quantised: bool) -> Case[Candidate]:
    weight, rows = weights[0], len(x)
    given: Activation = quantise_rows(x) if quantised else x
    quantises = quantised and role in ("output", "down", "head")

    def run(candidate: Candidate, i: int) -> object:
        ready = quantise_rows(x) if quantises else given
        return linear_device.run(op, ready, weights[i % len(weights)], candidate)

    def extra_s(candidate: Candidate) -> float:
        """Seconds that a choice costs the kernels beside it: a reader of partial sums, or neighbours of the library's."""
        if candidate.kind == "library":
            return _ALONE_S if backend.pdl(x) else 0.0
        if op != "split" or candidate.splits == 1:
            return 0.0
        more = weight.out_features * (4 * candidate.splits - x.element_size())  # bytes of a row
        alone = 0.0 if role == "qkv" else more / _NORM_BYTES_PER_S
        return max(alone, rows * more / _PARTIALS_BYTES_PER_S)

    estimate = max(weight.data.nbytes / _BYTES_PER_S, 2 * rows * weight.parameters / _FLOPS)
    return Case(
        key=linear_device.choice_key(op, weight, rows, quantised),
        candidates=linear_device.options(op, weight, rows, quantised),
        run=run,
        launches=launches_for(estimate),
        extra_s=extra_s,
        expected=lambda: linear_device.run(op, given, weight, Candidate("library", quantised)).float(),
        # float32 out, or not
        kernel=lambda candidate: None if candidate.kind == "library" else replace(candidate, splits=min(candidate.splits, 2)),
    )


def _weights(described: LinearWeight, buffers: dict[torch.dtype, torch.Tensor]) -> list[LinearWeight]:
    """With random numbers, as many as keep L2 from holding them, at least two. Shapes share a buffer."""
    if described.grouped is not None:
        return _grouped_weights(described, described.grouped, buffers)
    item, device = described.data.dtype, described.data.device
    size = described.out_features * described.in_features
    stride = -(-size // _ALIGNED_ELEMENTS) * _ALIGNED_ELEMENTS
    copies = max(2, math.ceil(_ROTATED_BYTES / (size * item.itemsize)))
    flat = buffers.get(item)
    if flat is None or len(flat) < copies * stride:
        buffers.pop(item, None)
        flat = buffers[item] = torch.empty(copies * stride, dtype=item, device=device)
        for part in flat.split(1 << 26):  # 8-bit floats are made from wider ones
            part.copy_(torch.randn(len(part), dtype=described.dtype, device=device))
    shape = (described.out_features, described.in_features)
    return [replace(described, data=flat[i * stride : i * stride + size].view(shape)) for i in range(copies)]


def _grouped_weights(
    described: LinearWeight, grouped: GroupedWeight, buffers: dict[torch.dtype, torch.Tensor]
) -> list[LinearWeight]:
    """As `_weights`, of random codes; all have the same scales."""
    item, device, shape = grouped.data.dtype, grouped.data.device, grouped.data.shape
    size = math.prod(shape)
    stride = -(-size // _ALIGNED_ELEMENTS) * _ALIGNED_ELEMENTS
    copies = max(2, math.ceil(_ROTATED_BYTES / size))
    flat = buffers.get(item)
    if flat is None or len(flat) < copies * stride:
        buffers.pop(item, None)
        info = torch.iinfo(item)
        flat = buffers[item] = torch.randint(info.min, info.max + 1, (copies * stride,), dtype=item, device=device)
    parts = [replace(grouped, data=flat[i * stride : i * stride + size].view(shape)) for i in range(copies)]
    return [replace(described, data=part.data, grouped=part) for part in parts]
