"""A mixture of experts with 4-bit weights on Hopper, for many tokens: weights are unpacked in warps of their own.

Tokens are sorted by expert and copied, as for the library (`experts_library.py`), so that a tile's activations are rows side by
side. The first product applies the activation; what the second gives is added in the order of each token's routing.
"""

from __future__ import annotations

import torch

from common.ops.linear.unpacking import Codes, Gate, PairTiles, multiply_unpacking
from common.ops.moe.candidates import ExpertCandidate
from common.ops.moe.form import ExpertActivation, Routing
from common.ops.moe.packed_weight import PackedWeight
from common.ops.moe.sort_triton import sorted_pairs
from common.ops.moe.sorted_triton import returned, scattered


def experts_unpacking(
    x: torch.Tensor,
    routing: Routing,
    gate_up: PackedWeight,
    down: PackedWeight,
    activation: ExpertActivation,
    chosen: ExpertCandidate,
    *,
    weigh_inputs: bool = False,
) -> torch.Tensor:
    """See `experts`. x: bf16 [rows, hidden], contiguous; weights: mxfp4 or int4."""
    found = sorted_pairs(routing.ids, gate_up.experts, chosen.block_m, with_places=True)
    given = scattered(x, found, routing.ids.shape[1])
    middle = torch.empty(len(given), down.k, dtype=x.dtype, device=x.device)
    weighed = PairTiles(found.tiles, found.order, routing.weights) if weigh_inputs else PairTiles(found.tiles)
    gate = Gate(activation.kind, activation.alpha, activation.limit)
    multiply_unpacking(given, _codes(gate_up, gate_up.bias), middle, block_m=chosen.block_m, tiles=weighed, gate=gate)
    answers = torch.empty(len(given), down.n, dtype=x.dtype, device=x.device)
    multiply_unpacking(middle, _codes(down, None), answers, block_m=chosen.block_m, tiles=PairTiles(found.tiles))
    return returned(answers, down.bias, routing, found, weigh=not weigh_inputs)


def _codes(weight: PackedWeight, bias: torch.Tensor | None) -> Codes:
    assert weight.scale is not None
    mxfp4 = weight.format == "mxfp4"
    return Codes(weight.values, weight.scale, weight.offset, weight.channel, bias, int(mxfp4), mxfp4, weight.run, weight.n)
