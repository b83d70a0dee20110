"""Weights of 4 or 8 bits with a scale for each group of inputs: the one layout that every such checkpoint format is packed to.

    weight[n, k] = number(code[n, k]) · scale[n, g] + offset[n, g],  g = k // group

`number` is `code - 8` ("int4"), a table's entry ("nf4", "fp4"), or the code itself ("int8"). Formats with zero points have
offsets, `(8 - zero) · scale`. Two neighbouring groups are the runs of one step: their codes share bytes, and a step's bytes of
all outputs are contiguous, so that a kernel reads whole runs of memory whatever the group size, and a product of one run
needs only one scale. Groups larger than 128 are stored as several of 128; two groups of 16 are one run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from common.ops.quant.group_layout import MIN_RUN, Code, GroupLayout, can_group, run_of

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""QLoRA's 4-bit NormalFloat (arXiv 2305.14314, appendix E), as bitsandbytes has it."""
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""E2M1 of the OCP microscaling formats: sign, two bits of exponent, one of mantissa."""
_TABLES: dict[Code, tuple[float, ...]] = {"nf4": NF4, "fp4": FP4, "int4": tuple(float(code - 8) for code in range(16))}


@dataclass(slots=True, frozen=True)
class GroupedWeight:
    """A weight [out, in] of `code`, `group` inputs a scale (at most 128).

    data: 4 bits: uint8 [steps, out, run], inputs of the step's first run in the low halves of its bytes, those of the second in
    the high ones; "int8": int8 [steps, 2, out, run].
    scales: int32 [pairs of groups, out], two float16: the first group's in the low half. offsets: the same, or None.
    channel: float32 [out], which multiplies an output's scales and offsets: a power of two, or a scale of the whole weight.
    order: int64 [in], or None: column i of what is stored is input order[i] (act-order).
    """

    data: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    channel: torch.Tensor
    code: Code
    group: int
    in_features: int
    order: torch.Tensor | None = None

    @property
    def out_features(self) -> int:
        return self.data.shape[-2]

    @property
    def layout(self) -> GroupLayout:
        return GroupLayout(self.code, self.group, self.in_features, self.order is not None)

    @property
    def run(self) -> int:
        """Inputs of half a step."""
        return run_of(self.group)

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""
        return sum(part.nbytes for part in (self.data, self.scales, self.offsets, self.channel) if part is not None)


def pack_grouped(
    codes: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    *,
    code: Code,
    group: int,
    order: torch.Tensor | None = None,
    channel: torch.Tensor | None = None,
) -> GroupedWeight:
    """codes: uint8 [out, in], 0 … 15, or int8 for "int8". scales, offsets: floating [out, ⌈in / group⌉].

    order: the columns of `codes` are inputs in this order. channel: float32 [out], already divided out of scales and offsets,
    or None, for whatever lets float16 hold them best.

    :raises ValueError: if shapes do not fit each other, or the group size can't be packed (see `can_group`).
    """
    out_features, in_features = codes.shape
    groups = -(-in_features // group)
    for given in (scales, offsets):
        if given is not None and given.shape != (out_features, groups):
            raise ValueError(f"groups of {group} inputs have scales {[out_features, groups]}, not {list(given.shape)}")
    if not can_group(group, in_features):
        raise ValueError(f"groups of {group} inputs can't be packed; 16, 32, 64 and multiples of 128 can")
    layout = GroupLayout.of(code, group, in_features)
    stored, run, steps = layout.group, run_of(layout.group), layout.steps
    if offsets is not None and stored < MIN_RUN:
        raise ValueError(f"groups of {group} inputs can't have offsets")
    padding = 2 * steps * run - in_features
    filled = F.pad(codes, (0, padding), value=8 if code == "int4" else 0)
    halves = filled.view(out_features, steps, 2, run)
    if code == "int8":
        data = halves.permute(1, 2, 0, 3).contiguous()
    else:
        data = (halves[:, :, 0] | (halves[:, :, 1] << 4)).transpose(0, 1).contiguous()
    pairs = steps * run // stored
    wide = [_stretched(part.float(), group, stored, 2 * pairs) for part in (scales, offsets) if part is not None]
    if channel is None:
        channel = _channel(wide)
        wide = [part / channel[:, None] for part in wide]
    packed = [_pairs(part, pairs) for part in wide]
    return GroupedWeight(data, packed[0], packed[1] if len(packed) > 1 else None, channel, code, stored, in_features, order)


def join_grouped(parts: list[GroupedWeight]) -> GroupedWeight | None:
    """Weights below each other as one; None where they differ in group, code, or order of their inputs."""
    first = parts[0]
    for other in parts[1:]:
        if first.layout != other.layout:
            return None
        if first.order is not None and other.order is not None and not torch.equal(first.order, other.order):
            return None
    if len(parts) == 1:
        return first
    offsets = None
    if any(part.offsets is not None for part in parts):
        offsets = torch.cat([torch.zeros_like(part.scales) if part.offsets is None else part.offsets for part in parts], 1)
    return replace(
        first,
        data=torch.cat([part.data for part in parts], -2),
        scales=torch.cat([part.scales for part in parts], 1),
        offsets=offsets,
        channel=torch.cat([part.channel for part in parts]),
    )


def codes_of(weight: GroupedWeight) -> torch.Tensor:
    """uint8 (or int8) [out, in], in the stored order of columns."""
    if weight.code == "int8":
        halves = weight.data.permute(2, 0, 1, 3)
    else:
        packed = weight.data.transpose(0, 1)
        halves = torch.stack([packed & 15, packed >> 4], 2)
    return halves.reshape(weight.out_features, -1)[:, : weight.in_features]


def dequantise_grouped(weight: GroupedWeight) -> torch.Tensor:
    """The reference: float32 [out, in], columns in the order of the inputs."""
    codes = codes_of(weight)
    numbers = codes.float() if weight.code == "int8" else table_of(weight.code, codes.device)[codes.long()]
    values = numbers * _groups(weight.scales, weight)
    if weight.offsets is not None:
        values += _groups(weight.offsets, weight)
    values *= weight.channel[:, None]
    if weight.order is None:
        return values
    ordered = torch.empty_like(values)
    ordered[:, weight.order] = values
    return ordered


def table_of(code: Code, device: torch.device) -> torch.Tensor:
    """float32 [16]: the number of each code."""
    return torch.tensor(_TABLES[code], device=device)


def _stretched(values: torch.Tensor, group: int, stored: int, groups: int) -> torch.Tensor:
    """Scales of groups of `group` as scales of `groups` groups of `stored`; 0 past the last."""
    if values.shape[1] == 1:
        return values.expand(-1, groups)
    values = values.repeat_interleave(group // stored, 1)
    return F.pad(values, (0, max(0, groups - values.shape[1])))[:, :groups]


def _channel(wide: list[torch.Tensor]) -> torch.Tensor:
    """The power of two above an output's largest scale, so that what was float16 or bfloat16 stays exact. float32 [out]."""
    largest = wide[0].abs().amax(1)
    if len(wide) > 1:
        largest = torch.maximum(largest, wide[1].abs().amax(1) / 8)
    _, exponent = torch.frexp(largest.clamp_min(1e-30))
    return torch.ldexp(torch.ones_like(largest), exponent)


def _pairs(values: torch.Tensor, pairs: int) -> torch.Tensor:
    """float32 [out, 2 · pairs] → int32 [pairs, out]."""
    halves = values.to(torch.float16).reshape(-1).view(torch.int32)
    return halves.view(-1, pairs).t().contiguous()


def _groups(pairs: torch.Tensor, weight: GroupedWeight) -> torch.Tensor:
    """The reverse of `_pairs`, for each input: float32 [out, in]."""
    # a clone, since a dimension of 1 may keep any stride in what is contiguous already
    halves = pairs.t().clone(memory_format=torch.contiguous_format).view(torch.float16).float()
    return halves.repeat_interleave(weight.group, 1)[:, : weight.in_features]
