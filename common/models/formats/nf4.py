"""NF4, as bitsandbytes stores it (QLoRA, arXiv 2305.14314): 4-bit NormalFloat in blocks of the flattened weight.

X.weight                                  uint8 [out · in / 2, 1]   the high half of a byte comes first
X.weight.absmax                           float32 [blocks], or uint8 codes of it (double quantisation)
X.weight.quant_map                        float32 [16], the table
X.weight.nested_absmax, nested_quant_map  float32 [blocks / 256], [256]: absmax = map[code] · nested_absmax + offset
X.weight.quant_state.bitsandbytes__nf4    JSON as bytes: blocksize, shape, nested_blocksize, nested_offset
"""

from __future__ import annotations

from typing import Any

import torch

from common.models.formats.groups import Groups, Tensors, checked_scales
from common.models.formats.nf4_state import parse_state
from common.models.formats.scheme import ShardUnits, WeightScheme
from common.models.weights.errors import WeightsError
from common.ops.quant.grouped import NF4


class Nf4:
    """See `GroupFormat`."""

    def units(self, scheme: WeightScheme) -> ShardUnits:
        return ShardUnits(1, scheme.group)

    def main(self, module: str) -> str:
        return f"{module}.weight.quant_state.bitsandbytes__nf4"

    def load(self, tensors: Tensors, module: str, outputs: int, inputs: int, scheme: WeightScheme) -> Groups:
        name = self.main(module)
        state = parse_state(name, bytes(tensors(name).cpu().tolist()), (outputs, inputs))
        block = state["blocksize"]
        weight = f"{module}.weight"
        packed = tensors(weight)
        if packed.dtype != torch.uint8 or packed.numel() * 2 != outputs * inputs:
            raise WeightsError(f"{weight} holds {packed.numel()} bytes, {outputs * inputs // 2} were expected")
        table = tensors(f"{weight}.quant_map", 16)
        if not torch.allclose(table.float().cpu(), torch.tensor(NF4), atol=1e-6):
            raise WeightsError(f"{weight}.quant_map is not NF4's table")
        flat = packed.reshape(-1)
        codes = torch.stack([flat >> 4, flat & 15], -1).view(outputs, inputs)
        scales = _scales(tensors, weight, state, outputs * inputs // block)
        return Groups(codes, checked_scales(f"{weight}.absmax", scales).view(outputs, -1), None, "nf4", block)


def _scales(tensors: Tensors, weight: str, state: dict[str, Any], blocks: int) -> torch.Tensor:
    """float32 [blocks]."""
    stored = tensors(f"{weight}.absmax", blocks)
    if stored.dtype != torch.uint8:
        return stored
    nested = state.get("nested_blocksize", 256)
    factors = tensors(f"{weight}.nested_absmax", -(-blocks // nested)).float()
    values = tensors(f"{weight}.nested_quant_map", 256).float()[stored.long()]
    return values * factors.repeat_interleave(nested)[:blocks] + float(state.get("nested_offset", 0.0))
