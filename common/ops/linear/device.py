"""`linear` and `gate_up` on a GPU: choice of the implementation, and what the libraries do.

A choice depends on the op, the weight's format and shape and on a bucket of rows: measured when the model was loaded (see
`linear_tuning.py`), else the default of `candidates.py`. A batch-invariant weight has one for every number of rows.
FP8 weights meet bf16 activations (W8A16: the weight is converted in registers) or quantised ones (W8A8), whichever was faster.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F

from common.ops import backend
from common.ops.linear.candidates import (
    Candidate,
    Op,
    Scaling,
    Shape,
    bucket,
    candidates,
    default_quantised,
    invariant_candidate,
    library_scales,
)
from common.ops.linear.specialised import gate_up_specialised, specialised_candidates
from common.ops.linear.streaming import is_fastest, linear_streaming, streaming_candidates
from common.ops.linear.unpacking import linear_unpacking, unpacking_candidates
from common.ops.linear.weight import GateActivation, LinearWeight
from common.ops.quant.quantise import quantise_rows
from common.ops.quant.quantise_reference import dequantise_weight_reference
from common.ops.tensors import Activation, Quantised
from common.ops.tuning import Table

_OPS = Path(__file__).parents[1]
TABLE = Table("linear", Candidate, sorted((*_OPS.glob("*.py"), *_OPS.glob("linear/*.py"), *_OPS.glob("quant/*.py"))))
"""An edit of any source whose kernels are timed, or that they are made of, measures again."""

_ADDED_ROWS = 1024
"""From here on activations are in no cache when the norm reads them: it should read one tensor and not two."""
_DEQUANTISED_BYTES = 64 << 20

_chosen: dict[tuple[object, ...], Candidate] = {}


def linear_device(x: Activation, weight: LinearWeight, *, split: bool, wide: bool = False) -> torch.Tensor:
    """As `linear`."""
    rows = len(x.data if isinstance(x, Quantised) else x)
    if not rows:
        dtype = torch.float32 if wide else weight.dtype
        return torch.empty(0, weight.out_features, dtype=dtype, device=weight.data.device)
    op: Op = "wide" if wide else "split" if split else "linear"
    x = _prepared(x, weight)
    return run(op, x, weight, choose(op, weight, rows, isinstance(x, Quantised)))


def add_linear_device(residual: torch.Tensor, x: torch.Tensor, weight: LinearWeight) -> bool:
    """As `add_linear`, for plain weights: the library adds what it multiplies to what is there."""
    if len(x) < _ADDED_ROWS or weight.bias is not None or choose("split", weight, len(x), False).kind != "library":
        return False
    residual.addmm_(x, weight.data.t())
    return True


def gate_up_device(x: Activation, weight: LinearWeight, *, activation: GateActivation = "silu", quantise: bool) -> Activation:
    """As `gate_up`. Gelu is a pass of its own behind the linear, but in the warp-specialised kernel."""
    rows = len(x.data if isinstance(x, Quantised) else x)
    if not rows:
        empty = torch.empty(0, weight.out_features // 2, dtype=weight.dtype, device=weight.data.device)
        return quantise_rows(empty) if quantise else empty
    x = _prepared(x, weight)
    quantised = isinstance(x, Quantised)
    chosen = choose("gated", weight, rows, quantised)
    if chosen.kind == "specialised":
        assert isinstance(x, torch.Tensor)
        middle = gate_up_specialised(x, weight, chosen, activation)
    elif activation == "gelu_tanh":
        from common.ops.linear.gate_up_triton import silu_mul_triton

        products = run("linear", x, weight, choose("linear", weight, rows, quantised))
        return silu_mul_triton(products, weight.dtype, quantise=quantise, gelu=True)
    elif chosen.kind == "library":
        return _library_gated(x, weight, chosen, quantise=quantise)
    else:
        middle = run("gated", x, weight, chosen)
    return quantise_rows(middle) if quantise else middle


def wants_quantised(weight: LinearWeight, rows: int) -> bool:
    """Are quantised activations faster for this fp8 weight?"""
    shape = shape_of("linear", weight)
    if weight.batch_invariant:
        return True
    known = _table(weight).get(activations_key(weight, bucket(rows)))
    return default_quantised(shape, rows) if known is None else known.quantised


def choose(op: Op, weight: LinearWeight, rows: int, quantised: bool) -> Candidate:
    """The implementation for `rows` activations, quantised or not."""
    size = 0 if weight.batch_invariant else bucket(rows)
    kind = grouped_name(weight) or (weight.data.dtype, _scaling(weight))
    key = (op, kind, weight.dtype, weight.out_features, weight.in_features, quantised, size)
    found = _chosen.get(key)
    if found is None:
        found = _chosen[key] = _choose(op, weight, size, quantised)
    return found


def forget_choices() -> None:
    """After the table changed."""
    _chosen.clear()


def options(op: Op, weight: LinearWeight, size: int, quantised: bool) -> list[Candidate]:
    """What may be chosen from, the default first."""
    shape, num_sms = shape_of(op, weight), backend.num_sms(weight.data.get_device())
    found = candidates(shape, size, quantised, num_sms)
    if weight.dtype != torch.bfloat16:
        return found
    is_hopper = backend.has_warpgroup_products(weight.data.device)
    if weight.grouped is None:
        return found + specialised_candidates(shape, size) if is_hopper else found
    if is_hopper:
        found += unpacking_candidates(shape, size, num_sms)
    streaming = streaming_candidates(shape, size, num_sms) if backend.pdl(weight.data) else []
    if streaming and is_hopper and is_fastest(shape, num_sms):
        return [one for one in streaming if one.in_bytes] or streaming
    return found + streaming


def shape_of(op: Op, weight: LinearWeight) -> Shape:
    shape = Shape(op, weight.out_features, weight.in_features, weight.data.element_size(), _scaling(weight))
    if (grouped := weight.grouped) is None:
        return shape
    return shape._replace(
        group=grouped.group,
        bits=8 if grouped.code == "int8" else 4,
        offsets=grouped.offsets is not None,
        activation_bytes=weight.dtype.itemsize,
        integers=grouped.code.startswith("int"),
    )


def choice_key(op: Op, weight: LinearWeight, size: int, quantised: bool) -> str:
    """Of the table."""
    return f"{op} {_described(weight)} {'quantised' if quantised else 'plain'} {size}"


def activations_key(weight: LinearWeight, size: int) -> str:
    """Of the table: a candidate of the precision that activations should have."""
    return f"activations {_described(weight)} {size}"


def run(op: Op, x: Activation, weight: LinearWeight, chosen: Candidate) -> torch.Tensor:
    """With one implementation. x: [rows, in_features], rows ≥ 1, quantised as `chosen` wants it."""
    if chosen.kind == "library":
        if op == "wide":
            return _library_wide(x, weight)
        if op != "gated":
            return _library(x, weight, chosen)
        middle = _library_gated(x, weight, chosen, quantise=False)
        assert isinstance(middle, torch.Tensor)
        return middle
    if chosen.kind == "persistent":
        from common.ops.linear.gemm_triton import linear_persistent

        return linear_persistent(op, x, weight, chosen)
    if chosen.kind == "grouped":
        from common.ops.linear.grouped_triton import linear_grouped

        assert isinstance(x, torch.Tensor)
        return linear_grouped(op, x, weight, chosen)
    if chosen.kind == "unpacking":
        assert isinstance(x, torch.Tensor)
        return linear_unpacking(op, x, weight, chosen)
    if chosen.kind == "streaming":
        assert isinstance(x, torch.Tensor)
        return linear_streaming(op, x, weight, chosen)
    if chosen.kind == "specialised":
        assert isinstance(x, torch.Tensor)
        return gate_up_specialised(x, weight, chosen)
    if chosen.kind == "gemv":
        from common.ops.linear.gemv_triton import linear_gemv

        assert isinstance(x, torch.Tensor)
        return linear_gemv(op, x, weight, chosen)
    from common.ops.linear.dot_triton import linear_dot

    return linear_dot(op, x, weight, chosen)


def _prepared(x: Activation, weight: LinearWeight) -> Activation:
    """Contiguous, and quantised if that is faster."""
    if isinstance(x, Quantised):
        return x
    rows = len(x)
    if weight.grouped is not None and weight.grouped.order is not None:
        return x.index_select(1, weight.grouped.order)
    return quantise_rows(x) if weight.format == "fp8" and wants_quantised(weight, rows) else x.contiguous()


def _choose(op: Op, weight: LinearWeight, size: int, quantised: bool) -> Candidate:
    if weight.batch_invariant:
        return invariant_candidate(shape_of(op, weight), backend.num_sms(weight.data.get_device()))
    return _table(weight).choose(choice_key(op, weight, size, quantised), options(op, weight, size, quantised))


def _table(weight: LinearWeight) -> Table[Candidate]:
    if not TABLE.is_open:
        TABLE.open(weight.data.device)
    return TABLE


def _scaling(weight: LinearWeight) -> Scaling:
    return "none" if weight.scale is None else "channel" if weight.scale.ndim == 1 else "blocks"


def grouped_name(weight: LinearWeight) -> str:
    """What is in a weight in groups: "int4/128", "int4/32+offsets"; empty for others."""
    if weight.grouped is None:
        return ""
    return f"{weight.grouped.code}/{weight.grouped.group}{'' if weight.grouped.offsets is None else '+offsets'}"


def _described(weight: LinearWeight) -> str:
    item, model = (str(dtype).removeprefix("torch.") for dtype in (weight.data.dtype, weight.dtype))
    return f"{grouped_name(weight) or item} {_scaling(weight)} {model} {weight.out_features}x{weight.in_features}"


# ── the library ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _library_grouped(x: torch.Tensor, weight: LinearWeight, *, wide: bool = False) -> torch.Tensor:
    """With a dequantised copy, in parts that L2 holds."""
    from common.ops.linear.grouped_triton import dequantise_rows

    assert weight.grouped is not None
    dtype = torch.float32 if wide else weight.dtype
    out = torch.empty(len(x), weight.out_features, dtype=dtype, device=x.device)
    at_once = max(256, _DEQUANTISED_BYTES // (weight.in_features * x.element_size()) // 256 * 256)
    for first in range(0, weight.out_features, at_once):
        rows = min(at_once, weight.out_features - first)
        part = dequantise_rows(weight.grouped, first, rows, x.dtype)
        place = out[:, first : first + rows]
        if wide:
            place.copy_(_product(x, part, None))
        else:
            torch.mm(x, part.t(), out=place)
    return out if weight.bias is None else out.add_(weight.bias)


def _library(x: Activation, weight: LinearWeight, chosen: Candidate) -> torch.Tensor:
    if weight.grouped is not None:
        assert isinstance(x, torch.Tensor)
        return _library_grouped(x, weight)
    if isinstance(x, Quantised) and not library_scales(shape_of("linear", weight)):
        x = (x.data.float() * x.scale[:, None]).to(weight.dtype)
    if isinstance(x, Quantised):
        if chosen.tensor_scale or weight.dtype != torch.bfloat16:
            from common.ops.linear.gate_up_triton import rescale_triton

            assert weight.scale is not None
            return rescale_triton(_unscaled(x, weight), x.scale, weight.scale, weight.bias, weight.dtype)
        return _scaled(x, weight)
    if weight.scale is None:
        return F.linear(x, weight.data, weight.bias)
    if weight.scale.ndim == 2:
        return F.linear(x, dequantise_weight_reference(weight.data, weight.scale).to(x.dtype), weight.bias)
    y = F.linear(x, weight.data.to(x.dtype)).float() * weight.scale
    return (y if weight.bias is None else y + weight.bias).to(weight.dtype)


def _library_wide(x: Activation, weight: LinearWeight) -> torch.Tensor:
    """float32, rounded once."""
    if weight.grouped is not None:
        assert isinstance(x, torch.Tensor)
        return _library_grouped(x, weight, wide=True)
    if isinstance(x, Quantised) and library_scales(shape_of("wide", weight)):
        from common.ops.linear.gate_up_triton import rescale_triton

        assert weight.scale is not None
        return rescale_triton(_unscaled(x, weight, torch.float32), x.scale, weight.scale, weight.bias, torch.float32)
    if isinstance(x, Quantised):
        x = (x.data.float() * x.scale[:, None]).to(weight.dtype)
    if weight.scale is None:
        return _product(x, weight.data, weight.bias)
    if weight.scale.ndim == 2:
        return _product(x, dequantise_weight_reference(weight.data, weight.scale).to(x.dtype), weight.bias)
    y = _product(x, weight.data.to(x.dtype), None).mul_(weight.scale)
    return y if weight.bias is None else y.add_(weight.bias)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x Wᵀ + b as the library accumulates it: float32."""
    if x.dtype == torch.float32 or not x.is_cuda:  # torch writes wider results of 16-bit products on CUDA only
        y = F.linear(x.float(), weight.float())
    else:
        y = torch.mm(x, weight.t(), out_dtype=torch.float32)
    return y if bias is None else y.add_(bias)


def _library_gated(x: Activation, weight: LinearWeight, chosen: Candidate, *, quantise: bool) -> Activation:
    from common.ops.linear.gate_up_triton import silu_mul_triton

    fused = library_scales(shape_of("gated", weight)) and (chosen.tensor_scale or weight.dtype != torch.bfloat16)
    if isinstance(x, Quantised) and fused:
        assert weight.scale is not None
        scales = (x.scale, weight.scale)
        return silu_mul_triton(_unscaled(x, weight), weight.dtype, scales=scales, bias=weight.bias, quantise=quantise)
    return silu_mul_triton(_library(x, weight, chosen), weight.dtype, quantise=quantise)


def _scaled(x: Quantised, weight: LinearWeight) -> torch.Tensor:
    """With scales of rows and columns, bf16."""
    assert weight.scale is not None
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        x.data,
        weight.data.t(),
        scale_a=x.scale[:, None],
        scale_b=weight.scale[None, :],
        bias=weight.bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


def _unscaled(x: Quantised, weight: LinearWeight, wide: torch.dtype | None = None) -> torch.Tensor:
    """Σ of products of the 8-bit numbers in `wide`; None: bf16, which holds their range, or float32 for finer models."""
    one = _one(x.data.device)
    wide = wide or (torch.bfloat16 if weight.dtype == torch.bfloat16 else torch.float32)
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        x.data, weight.data.t(), scale_a=one, scale_b=one, out_dtype=wide, use_fast_accum=True
    )


_ones: dict[torch.device, torch.Tensor] = {}


def _one(device: torch.device) -> torch.Tensor:
    if device not in _ones:
        _ones[device] = torch.ones((), dtype=torch.float32, device=device)
    return _ones[device]
