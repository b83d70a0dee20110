"""compressed-tensors' pack-quantized: integers of 4 or 8 bits, symmetric or with zero points, per channel or in groups.

X.weight_packed       int32 [out, in · bits / 32]      code i of a word is input (32 / bits)·w + i, plus half the range
X.weight_scale        [out, groups], any floating dtype
X.weight_zero_point   int32 [out · bits / 32, groups]  code i of a word is output (32 / bits)·w + i; int8 [out, groups] too
X.weight_g_idx        int32 [in], each input's group (actorder "group")
X.weight_shape        int64 [2]
weight = (code - zero) · scale
"""

from __future__ import annotations

import torch

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


class Packed:
    """See `GroupFormat`."""

    def units(self, scheme: WeightScheme) -> ShardUnits:
        each = 32 // scheme.bits  # outputs by whole words of zero points, inputs of one group by whole words of codes
        return ShardUnits(each, 0 if scheme.act_order and scheme.group else scheme.group or each)

    def main(self, module: str) -> str:
        return f"{module}.weight_packed"

    def load(self, tensors: Tensors, module: str, outputs: int, inputs: int, scheme: WeightScheme) -> Groups:
        group, each = scheme.group or inputs, 32 // scheme.bits
        groups = -(-inputs // group)
        shape = f"{module}.weight_shape"
        if shape in tensors.shapes and tensors(shape, 2).tolist() != [outputs, inputs]:
            raise WeightsError(f"{shape} is {tensors(shape, 2).tolist()}, the configuration asks for {[outputs, inputs]}")
        words = tensors(f"{module}.weight_packed", outputs, -(-inputs // each))
        codes = unpacked_words(words, scheme.bits)[:, :inputs].contiguous()
        name = f"{module}.weight_scale"
        scales = tensors(name)
        if scales.numel() == 1:
            scales = scales.reshape(1, 1).expand(outputs, groups)
        if scales.shape != (outputs, groups):
            raise WeightsError(f"{name} has shape {list(scales.shape)}, {[outputs, groups]} were expected")
        order = None
        if f"{module}.weight_g_idx" in tensors.shapes:
            indices = tensors(f"{module}.weight_g_idx", inputs)
            if not bool((indices < 0).any()):  # -1: no order
                order = in_group_order(f"{module}.weight_g_idx", indices, group, groups)
        if order is not None:
            codes = codes[:, order]
        zeros = self._zeros(tensors, module, outputs, groups, scheme)
        return integer_groups(codes, checked_scales(name, scales).contiguous(), zeros, group, order, scheme.bits)

    def _zeros(self, tensors: Tensors, module: str, outputs: int, groups: int, scheme: WeightScheme) -> torch.Tensor | None:
        name = f"{module}.weight_zero_point"
        if name not in tensors.shapes:
            return None
        each = 32 // scheme.bits
        if tensors.shapes[name] == (outputs, groups):  # not packed, signed
            return tensors(name).float() + (1 << (scheme.bits - 1))
        words = tensors(name, -(-outputs // each), groups)
        return unpacked_words(words.t().contiguous(), scheme.bits)[:, :outputs].t().float().contiguous()
