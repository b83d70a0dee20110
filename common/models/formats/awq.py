"""AWQ, as AutoAWQ packs it for its GEMM kernels (arXiv 2306.00978): 4 bits, zero points, groups along the inputs.

X.qweight   int32 [in, out / 8]        nibble i of a word is output 8·w + ORDER[i]
X.qzeros    int32 [in / group, out / 8] likewise
X.scales    float16 [in / group, out]
weight = (code - zero) · scale
"""

from __future__ import annotations

import torch

from common.models.formats.groups import Groups, Tensors, checked_scales, integer_groups, unpacked_words
from common.models.formats.scheme import ShardUnits, WeightScheme
from common.models.weights.errors import WeightsError

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Awq:
    """See `GroupFormat`."""

    def units(self, scheme: WeightScheme) -> ShardUnits:
        return ShardUnits(8, scheme.group or 1)  # outputs by whole words

    def main(self, module: str) -> str:
        return f"{module}.qweight"

    def load(self, tensors: Tensors, module: str, outputs: int, inputs: int, scheme: WeightScheme) -> Groups:
        group = scheme.group or inputs
        if inputs % group or outputs % 8:
            raise WeightsError(f"{module}: AWQ packs multiples of {group} inputs and 8 outputs, not {inputs} and {outputs}")
        codes = _outputs(tensors(f"{module}.qweight", inputs, outputs // 8))
        zeros = _outputs(tensors(f"{module}.qzeros", inputs // group, outputs // 8))
        scales = checked_scales(f"{module}.scales", tensors(f"{module}.scales", inputs // group, outputs))
        return integer_groups(codes.t().contiguous(), scales.t().contiguous(), zeros.t().float().contiguous(), group, None, 4)


def _outputs(words: torch.Tensor) -> torch.Tensor:
    """int32 [a, out / 8] → uint8 [a, out]."""
    nibbles = unpacked_words(words, 4).view(len(words), -1, 8)
    outputs = torch.empty_like(nibbles)
    outputs[:, :, list(ORDER)] = nibbles
    return outputs.flatten(1)
