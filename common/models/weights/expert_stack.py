"""The linears of all experts as one tensor for a GPU: quantised where the kernels read the format, else in the model's dtype.

Which formats they read is a rule of `formats/stored.py`. Two things only the values tell: whether scales of MXFP4 are powers of
two, and whether offsets of INT4 are whole zero points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.models.formats.groups import Groups
from common.models.formats.stored import Fp8Form, GroupsForm, experts_format
from common.models.weights.fp8 import Fp8Weight
from common.ops.moe.grouped_weight import GroupedWeight
from common.ops.moe.packed_layout import GroupedFormat

_HALF = 8
_E8M0_BIAS = 127


Stored = Groups | Fp8Weight | torch.Tensor
"""A module's weight as the files hold it."""


@dataclass(slots=True, frozen=True)
class _Kept:
    """One part of an expert's linear, as `GroupedWeight` describes it without the first dimension."""

    format: GroupedFormat
    values: torch.Tensor
    scale: torch.Tensor
    zeros: torch.Tensor | None = None


def plain(part: Stored, dtype: torch.dtype) -> torch.Tensor:
    """Return [out, in] in `dtype`."""
    return part.to(dtype) if isinstance(part, torch.Tensor) else part.dequantise().to(dtype)


def stack_experts(
    experts: Sequence[Sequence[Stored]], bias: torch.Tensor | None, dtype: torch.dtype, *, keep: bool
) -> GroupedWeight:
    """Return one linear of every expert. experts: of each, the parts that lie below each other, [out, in]. bias: [experts,
    rows of all parts]. keep: whether quantised weights stay so where they can."""
    if keep and (kept := _kept(experts)) is not None:
        scale = torch.stack([torch.cat([part.scale for part in parts]) for parts in kept])
        values = torch.stack([_cat_values([part.values for part in parts]) for parts in kept])
        zeros = None
        if any(part.zeros is not None for parts in kept for part in parts):
            zeros = torch.stack([torch.cat([_zeros(part) for part in parts]) for parts in kept])
        first = kept[0][0]
        if first.format == "fp8":
            values = values.view(torch.float8_e4m3fn)
        return GroupedWeight(values, first.format, scale if first.format != "int4" else _narrow(scale), zeros, bias)
    sizes = [len(_data(part)) for part in experts[0]]
    rows, columns = sum(sizes), _data(experts[0][0]).shape[1]
    values = torch.empty(len(experts), rows, columns, dtype=dtype, device=_data(experts[0][0]).device)
    for mine, parts in zip(values, experts, strict=True):
        for place, part in zip(mine.split(sizes), parts, strict=True):
            place.copy_(plain(part, dtype))
    return GroupedWeight(values, bias=bias)


def _kept(experts: Sequence[Sequence[Stored]]) -> list[list[_Kept]] | None:
    """None where a part is in no format that can be kept, or parts differ in format or group."""
    found: list[list[_Kept]] = []
    for parts in experts:
        row: list[_Kept] = []
        for part in parts:
            kept = _keep_fp8(part) if isinstance(part, Fp8Weight) else _keep_groups(part) if isinstance(part, Groups) else None
            if kept is None or (found and _kind(kept) != _kind(found[0][0])) or (row and _kind(kept) != _kind(row[0])):
                return None
            row.append(kept)
        found.append(row)
    return found


def _kind(part: _Kept) -> tuple[GroupedFormat, torch.Size]:
    return part.format, part.scale.shape[1:]


def _keep_fp8(part: Fp8Weight) -> _Kept | None:
    """Blocks lie below each other only where each part has whole ones."""
    kept = experts_format(Fp8Form(part.scale.ndim == 2), *part.data.shape) == "fp8"
    return _Kept("fp8", part.data.view(torch.uint8), part.scale) if kept else None


def _keep_groups(part: Groups) -> _Kept | None:
    offsets = "none" if part.offsets is None else "zeros"
    form = GroupsForm(part.code, part.group, offsets, part.order is not None, part.channel is not None)
    format = experts_format(form, *part.codes.shape)
    if format == "plain":
        return None
    packed = part.codes[:, ::2] | (part.codes[:, 1::2] << 4)
    if format == "mxfp4":
        exponents = _exponents(part.scales)
        return None if exponents is None else _Kept("mxfp4", packed, exponents)
    if part.offsets is None:
        return _Kept("int4", packed, part.scales)
    zeros = _HALF - part.offsets / part.scales.clamp_min(torch.finfo(torch.float32).tiny)
    whole = zeros.round()
    if bool(((zeros - whole).abs() > 1e-3).any()) or bool((whole < 0).any()) or bool((whole > 255).any()):
        return None
    return _Kept("int4", packed, part.scales, whole.to(torch.uint8))


def _exponents(scales: torch.Tensor) -> torch.Tensor | None:
    """Powers of two as E8M0; None if a scale is none."""
    mantissa, exponent = torch.frexp(scales.double())
    if not bool((mantissa == 0.5).all()):
        return None
    return (exponent - 1 + _E8M0_BIAS).to(torch.uint8)


def _zeros(part: _Kept) -> torch.Tensor:
    if part.zeros is not None:
        return part.zeros
    return torch.full(part.scale.shape, _HALF, dtype=torch.uint8, device=part.scale.device)


def _narrow(scale: torch.Tensor) -> torch.Tensor:
    """The 16-bit dtype that holds all scales exactly, if there is one."""
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(scale.to(dtype).float(), scale):
            return scale.to(dtype)
    return scale


def _cat_values(values: list[torch.Tensor]) -> torch.Tensor:
    return values[0] if len(values) == 1 else torch.cat(values)


def _data(part: Stored) -> torch.Tensor:
    return part.codes if isinstance(part, Groups) else part.data
