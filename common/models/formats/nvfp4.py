"""NVFP4: E2M1 in groups of 16, an E4M3 scale for each and one float32 for the whole weight.

    compressed-tensors   X.weight_packed uint8 [out, in / 2], X.weight_scale E4M3 [out, in / 16]; X.weight_global_scale divides
    modelopt             X.weight        uint8 [out, in / 2], X.weight_scale likewise; X.weight_scale_2 multiplies

The low half of a byte comes first. Activations are left as they are; scales for them are not read.
"""

from __future__ import annotations

from common.models.formats.groups import Groups, Tensors, checked_scales, unpacked_bytes
from common.models.formats.scheme import ShardUnits, WeightScheme
from common.models.weights.errors import WeightsError

GROUP = 16


class Nvfp4:
    """See `GroupFormat`."""

    def __init__(self, *, modelopt: bool) -> None:
        self._name, self._global = ("weight", "weight_scale_2") if modelopt else ("weight_packed", "weight_global_scale")
        self._divides = not modelopt

    def units(self, scheme: WeightScheme) -> ShardUnits:
        return ShardUnits(1, GROUP)  # the scale of the whole weight is every rank's

    def main(self, module: str) -> str:
        return f"{module}.{self._name}"

    def load(self, tensors: Tensors, module: str, outputs: int, inputs: int, scheme: WeightScheme) -> Groups:
        if inputs % GROUP:
            raise WeightsError(f"{module}: NVFP4 packs multiples of {GROUP} inputs, not {inputs}")
        codes = unpacked_bytes(tensors(self.main(module), outputs, inputs // 2))
        name = f"{module}.weight_scale"
        scales = checked_scales(name, tensors(name, outputs, inputs // GROUP))
        whole = tensors(f"{module}.{self._global}").float().reshape(-1)
        if whole.numel() != 1 or not bool((whole > 0).all()) or not bool(whole.isfinite().all()):
            raise WeightsError(f"{module}.{self._global} must be one positive number")
        channel = (1 / whole if self._divides else whole).expand(outputs).contiguous()
        return Groups(codes, scales, None, "fp4", GROUP, None, channel)
