"""How long a GPU takes for a layer of a step: what decides whether launching its kernels one by one is the slower part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from common.engine.plan import StepRow
from common.models.blocks.moe import ExpertsBlock
from common.models.decoder import Decoder

_FLOPS = 6e14
"""A second, of linears and of attention to prompts in bfloat16 on an H100."""
_FP8_FLOPS = 1.1e15


class LayerCost(NamedTuple):
    """Of a decoder's layers, the mean. linears: seconds a token. attention: seconds for each pair of a query and a key before
    it; that of layers with windows or chunks is taken to be nothing."""

    linears: float
    attention: float

    def seconds(self, rows: Sequence[StepRow]) -> float:
        """Return how long a layer takes for these rows of a step."""
        tokens = sum([len(row.tokens) for row in rows])
        pairs = sum([len(row.tokens) * (row.start + len(row.tokens) / 2) for row in rows])
        return self.linears * tokens + self.attention * pairs


def layer_cost(decoder: Decoder) -> LayerCost:
    """Return what a decoder's layers cost on an H100, by their operations."""
    linears = attention = 0.0
    for layer in decoder.layers:
        for weight in layer.linears.values():
            linears += 2 * weight.parameters / (_FP8_FLOPS if weight.format == "fp8" else _FLOPS)
        if isinstance(layer.mlp, ExpertsBlock):
            linears += 2 * layer.mlp.parameters / _FLOPS
        spec = layer.mixer.spec
        if spec.retention[0] == "full":
            attention += 4 * spec.query_size / _FLOPS
    return LayerCost(linears / len(decoder.layers), attention / len(decoder.layers))
