"""GPTQ, as AutoGPTQ and GPTQModel pack it (arXiv 2210.17323): 4 or 8 bits, zero points, inputs quantised in any order.

X.qweight   int32 [in · bits / 32, out]       code i of a word is input (32 / bits)·w + i
X.qzeros    int32 [groups, out · bits / 32]   code i of a word is output (32 / bits)·w + i; less by 1 in version 1
X.scales    float16 [groups, out]
X.g_idx     int32 [in]                        each input's group; with act-order (desc_act) not in order
weight = (code - zero) · scale
"""

from __future__ import annotations

from common.models.formats.groups import (
    Groups,
    Tensors,
    checked_scales,
    in_group_order,
    integer_groups,
    unpacked_words,
)
from common.models.formats.scheme import ShardUnits, WeightScheme
from common.models.weights.errors import WeightsError


class Gptq:
    """See `GroupFormat`."""

    def units(self, scheme: WeightScheme) -> ShardUnits:
        each = 32 // scheme.bits  # outputs by whole words of zero points, inputs of one group by whole words of codes
        return ShardUnits(each, 0 if scheme.act_order and scheme.group else scheme.group or each)

    def main(self, module: str) -> str:
        return f"{module}.qweight"

    def load(self, tensors: Tensors, module: str, outputs: int, inputs: int, scheme: WeightScheme) -> Groups:
        group, each = scheme.group or inputs, 32 // scheme.bits
        if inputs % group or inputs % each or outputs % each:
            raise WeightsError(
                f"{module}: GPTQ packs multiples of {group} inputs and {each} outputs, not {inputs} and {outputs}"
            )
        groups = inputs // group
        words = tensors(f"{module}.qweight", inputs // each, outputs)
        codes = unpacked_words(words.t().contiguous(), scheme.bits)
        zeros = unpacked_words(tensors(f"{module}.qzeros", groups, outputs // each), scheme.bits).t().float()
        scales = checked_scales(f"{module}.scales", tensors(f"{module}.scales", groups, outputs)).t().contiguous()
        order = None
        if f"{module}.g_idx" in tensors.shapes:
            order = in_group_order(f"{module}.g_idx", tensors(f"{module}.g_idx", inputs), group, groups)
        if order is not None:
            codes = codes[:, order]
        return integer_groups(codes, scales, zeros + scheme.zero_offset, group, order, scheme.bits)
