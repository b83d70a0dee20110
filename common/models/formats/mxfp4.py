"""MXFP4 (OCP microscaling): E2M1 in groups of 32, with a power of two for each.

    compressed-tensors   X.weight_packed uint8 [out, in / 2], X.weight_scale uint8 [out, in / 32]
    gpt-oss              X_blocks uint8 [experts, out, in / 32, 16], X_scales uint8 [experts, out, in / 32]

The low half of a byte comes first; a scale s is 2^(s - 127).
"""

from __future__ import annotations

import torch

from common.models.formats.groups import Groups, Tensors, unpacked_bytes
from common.models.formats.scheme import ShardUnits, WeightScheme
from common.models.weights.errors import WeightsError

GROUP = 32
_BIAS, _NAN = 127, 255


class Mxfp4:
    """See `GroupFormat`; of linears. Experts: `experts_reference`."""

    def units(self, scheme: WeightScheme) -> ShardUnits:
        return ShardUnits(1, GROUP)

    def main(self, module: str) -> str:
        return f"{module}.weight_packed"

    def load(self, tensors: Tensors, module: str, outputs: int, inputs: int, scheme: WeightScheme) -> Groups:
        if inputs % GROUP:
            raise WeightsError(f"{module}: MXFP4 packs multiples of {GROUP} inputs, not {inputs}")
        codes = unpacked_bytes(tensors(f"{module}.weight_packed", outputs, inputs // 2))
        name = f"{module}.weight_scale"
        return Groups(codes, powers_of_two(name, tensors(name, outputs, inputs // GROUP)), None, "fp4", GROUP)


def experts_reference(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """blocks: uint8 [experts, out, groups, 16]; scales: uint8 [experts, out, groups]. Returns float32 [experts, out, in].

    :raises WeightsError: if shapes do not fit each other, or a scale is NaN.
    """
    if blocks.ndim != 4 or blocks.shape[3] != GROUP // 2 or scales.shape != blocks.shape[:3]:
        raise WeightsError(f"MXFP4 blocks {list(blocks.shape)} and scales {list(scales.shape)} do not fit each other")
    experts, outputs, groups, _ = blocks.shape
    codes = unpacked_bytes(blocks).view(experts * outputs, groups * GROUP)
    exact = powers_of_two("scales", scales.view(experts * outputs, groups))
    return Groups(codes, exact, None, "fp4", GROUP).dequantise().view(experts, outputs, -1)


def powers_of_two(name: str, scales: torch.Tensor) -> torch.Tensor:
    """E8M0 → float32. :raises WeightsError: if one is NaN."""
    if scales.dtype != torch.uint8:
        raise WeightsError(f"{name} is {scales.dtype}; E8M0 scales are bytes")
    if bool((scales == _NAN).any()):
        raise WeightsError(f"{name} holds a scale that is NaN")
    return torch.ldexp(torch.ones(scales.shape, device=scales.device), scales.int() - _BIAS)
