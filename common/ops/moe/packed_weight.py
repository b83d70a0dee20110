"""The order in which the kernels read the linears of experts: 4-bit codes so that a tile of a step is one run of memory.

A step of 4-bit codes is two runs of `run` columns. Its byte i holds column i of the first run in the low half and column i of
the second in the high half, so that both halves of a tile are whole columns side by side: nothing is shuffled after unpacking,
and each thread loads 16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from common.ops.moe.grouped_weight import GroupedWeight
from common.ops.moe.packed_layout import MIN_RUN, GroupedFormat, int4_run


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A linear of every expert.

    values: [experts, n, k] for plain and fp8; uint8 [experts, steps, n, run] for 4-bit codes, ⌈k / (2 · run)⌉ steps.
    scale: float32 [experts, ⌈n / 128⌉, ⌈k / 128⌉] for fp8 with scales of blocks; for mxfp4 int32 [experts, ⌈k / 128⌉, n], four
    exponents (E8M0, of at most 1) of 32 columns each, the first in the low byte; for int4 int32 [experts, steps, n], two
    float16, the first run's in the low half.
    offset: as the scale of int4: what is added to (code - 8) · scale; None without zero points.
    channel: float32 [experts, n], a factor of the whole row: of fp8 with scales of channels, of mxfp4, and of int4's scales and
    offsets.
    bias: [experts, n] or None.
    experts, n, k: of the linear, without padding.
    run: columns of one half of a byte; 0 for other formats.
    batch_invariant: whether a token is computed in the same way whatever tokens come with it, at a cost.
    """

    values: torch.Tensor
    format: GroupedFormat
    experts: int
    n: int
    k: int
    scale: torch.Tensor | None = None
    offset: torch.Tensor | None = None
    channel: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    run: int = 0
    batch_invariant: bool = False

    @property
    def nbytes(self) -> int:
        tensors = (self.values, self.scale, self.offset, self.channel, self.bias)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @property
    def in_blocks(self) -> bool:
        """Whether fp8 values have scales of 128 × 128 blocks."""
        return self.format == "fp8" and self.scale is not None


def packed_weight(weight: GroupedWeight, *, batch_invariant: bool = False) -> PackedWeight:
    """Return `weight` in the kernels' order. Values of plain and fp8 are shared, 4-bit codes are copied. batch_invariant: see
    `PackedWeight`."""
    size, invariant = (weight.experts, weight.n, weight.k), batch_invariant
    if weight.format == "plain":
        return PackedWeight(weight.values, "plain", *size, bias=weight.bias, batch_invariant=invariant)
    scale = weight.scale
    assert scale is not None
    if weight.format == "fp8":
        if scale.ndim == 3:
            return PackedWeight(weight.values, "fp8", *size, scale=scale, bias=weight.bias, batch_invariant=invariant)
        return PackedWeight(weight.values, "fp8", *size, channel=scale, bias=weight.bias, batch_invariant=invariant)
    if weight.format == "mxfp4":
        values, highest = _packed_codes(weight.values, MIN_RUN), scale.amax(2)
        relative = (scale.int() - highest.int()[:, :, None] + 127).clamp(min=0).to(torch.uint8)
        return PackedWeight(
            values,
            "mxfp4",
            *size,
            scale=_in_words(relative, 4).view(torch.int32).squeeze(-1),
            channel=torch.exp2(highest.float() - 127),
            bias=weight.bias,
            run=MIN_RUN,
            batch_invariant=invariant,
        )
    run = int4_run(weight.group, weight.k)
    per_run = scale.float().repeat_interleave(weight.group // run, 2)
    channel = per_run.abs().amax(2).clamp(min=torch.finfo(torch.float32).tiny)
    per_run = per_run / channel[:, :, None]
    offset = None
    if weight.zeros is not None:
        zeros = weight.zeros.repeat_interleave(weight.group // run, 2)
        offset = _in_words(((8 - zeros.float()) * per_run).half(), 2).view(torch.int32).squeeze(-1)
    return PackedWeight(
        _packed_codes(weight.values, run),
        "int4",
        *size,
        scale=_in_words(per_run.half(), 2).view(torch.int32).squeeze(-1),
        offset=offset,
        channel=channel,
        bias=weight.bias,
        run=run,
        batch_invariant=invariant,
    )


def _packed_codes(values: torch.Tensor, run: int) -> torch.Tensor:
    """values: uint8 [experts, n, k / 2], even columns in the low halves. Returns [experts, steps, n, run]; padding is 0."""
    experts, n, half_k = values.shape
    steps = -(-half_k // run)
    packed = torch.empty(experts, steps, n, run, dtype=torch.uint8, device=values.device)
    for expert, given in enumerate(values):  # one at a time: unpacked codes take twice the memory
        codes = torch.stack((given & 15, given >> 4), dim=-1).view(n, -1)
        codes = torch.nn.functional.pad(codes, (0, 2 * steps * run - 2 * half_k)).view(n, steps, 2, run)
        packed[expert] = (codes[:, :, 0] | (codes[:, :, 1] << 4)).transpose(0, 1)
    return packed


def _in_words(scale: torch.Tensor, count: int) -> torch.Tensor:
    """scale: [experts, n, groups]. Returns [experts, ⌈groups / count⌉, n, count], contiguous; padding is 0."""
    experts, n, groups = scale.shape
    words = -(-groups // count)
    padded = torch.nn.functional.pad(scale, (0, words * count - groups))
    return padded.view(experts, n, words, count).transpose(1, 2).contiguous()
