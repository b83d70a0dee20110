"""compressed-tensors' int-quantized (W8A8): 8-bit integers with a scale for each output or for all.

    X.weight         int8 [out, in]
    X.weight_scale   [out, 1] or one number, any floating dtype
    weight = code · scale

Activations are left as they are (W8A16), which is closer to the model than the 8 bits that the file allows for them.
"""

from __future__ import annotations

from common.models.formats.groups import Groups, Tensors, checked_scales
from common.models.formats.scheme import ShardUnits, WeightScheme
from common.models.weights.errors import WeightsError


class Int8:
    """See `GroupFormat`."""

    def units(self, scheme: WeightScheme) -> ShardUnits:
        return ShardUnits()  # an output's scale is every rank's

    def main(self, module: str) -> str:
        return f"{module}.weight"

    def load(self, tensors: Tensors, module: str, outputs: int, inputs: int, scheme: WeightScheme) -> Groups:
        codes = tensors(f"{module}.weight", outputs, inputs)
        name = f"{module}.weight_scale"
        scales = tensors(name)
        if scales.numel() not in (1, outputs):
            raise WeightsError(f"{name} has shape {list(scales.shape)}, {[outputs, 1]} were expected")
        zero = f"{module}.weight_zero_point"
        if zero in tensors.shapes and bool((tensors(zero) != 0).any()):
            raise WeightsError(f"{zero} is not 0: INT8 weights with zero points are not supported")
        return Groups(codes, checked_scales(name, scales).reshape(-1, 1).expand(outputs, 1), None, "int8", inputs)
