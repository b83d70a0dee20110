"""A mixture of experts: each token goes through the experts that it was routed to, and their answers are added up.

Rows do not affect each other on a CPU: an expert's linears don't depend on how many rows it has (`ops.linear`), and a token's
answers are added in the order of its routing.
"""

from __future__ import annotations

import torch

from common.ops.backend import on_device
from common.ops.linear.linear import linear
from common.ops.linear.weight import pack_linear
from common.ops.moe.experts_reference import activate_reference
from common.ops.moe.form import ExpertActivation, ExpertWeights, Routing
from common.ops.moe.grouped_weight import GroupedWeight


def pack_experts(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    batch_invariant: bool = False,
) -> ExpertWeights:
    """Return the weights of all experts, packed for their device.

    gate_up: [experts, 2 * intermediate, hidden], gate above up. down: [experts, hidden, intermediate]. Biases: [experts, 2 *
    intermediate] and [experts, hidden]. batch_invariant: see `PackedWeight`; on a CPU every weight is.

    :raises ValueError: for other shapes or dtypes.
    """
    experts, double, hidden = gate_up.shape if gate_up.ndim == 3 else (0, 0, 0)
    if not experts or double % 2 or down.shape != (experts, hidden, double // 2):
        raise ValueError(
            f"experts are [n, 2 * intermediate, hidden] and [n, hidden, intermediate], not {list(gate_up.shape)} and "
            f"{list(down.shape)}"
        )
    for bias, size in ((gate_up_bias, double), (down_bias, hidden)):
        if bias is not None and bias.shape != (experts, size):
            raise ValueError(f"a bias of experts is {[experts, size]}, not {list(bias.shape)}")
    if on_device(gate_up):
        return ExpertWeights.grouped(
            GroupedWeight(gate_up.contiguous(), bias=gate_up_bias),
            GroupedWeight(down.contiguous(), bias=down_bias),
            batch_invariant=batch_invariant,
        )
    gate_up_biases = [None] * experts if gate_up_bias is None else list(gate_up_bias)
    down_biases = [None] * experts if down_bias is None else list(down_bias)
    return ExpertWeights(
        tuple(pack_linear(weight, bias) for weight, bias in zip(gate_up, gate_up_biases, strict=True)),
        tuple(pack_linear(weight, bias) for weight, bias in zip(down, down_biases, strict=True)),
    )


def experts(
    x: torch.Tensor,
    routing: Routing,
    weights: ExpertWeights,
    activation: ExpertActivation,
    *,
    weigh_inputs: bool = False,
    split: bool = False,
) -> torch.Tensor:
    """x: [rows, hidden]. Returns [rows, hidden] in x's dtype: the answers of a token's experts, weighed and added in float32.

    weigh_inputs: the weights scale what experts are given, not what they answer (Llama 4).
    split: the result may be float32 partial sums [parts, rows, hidden] that the caller adds, first to last.

    On a GPU the ids must be below the number of experts; nothing checks them.

    :raises ValueError: if shapes don't fit, or the weights are packed for another kind of device.
    """
    ids = routing.ids
    if x.ndim != 2 or ids.ndim != 2 or len(ids) != len(x) or routing.weights.shape != ids.shape:
        raise ValueError(f"{list(x.shape)} tokens are not routed by {list(ids.shape)} ids and {list(routing.weights.shape)}")
    if on_device(x):
        if weights.on_gpu is None or not x.is_contiguous() or x.shape[1] != weights.on_gpu[0].k:
            raise ValueError(f"contiguous tokens and weights packed for a GPU are needed, not {list(x.shape)}")
        from common.ops.moe.device import choose
        from common.ops.moe.experts_triton import experts_triton

        chosen = choose(weights.on_gpu[0], activation, len(x), ids.shape[1], x.dtype)
        return experts_triton(x, routing, *weights.on_gpu, activation, chosen, weigh_inputs=weigh_inputs, split=split)
    if weights.on_gpu is not None:
        raise ValueError("weights packed for a GPU are not for tokens on a CPU")
    rows, top_k = ids.shape
    answers = torch.empty(rows * top_k, x.shape[1], dtype=torch.float32)
    places = torch.argsort(ids.flatten(), stable=True)
    counts = torch.bincount(ids.flatten(), minlength=weights.num_experts).tolist()
    if len(counts) > weights.num_experts:
        raise ValueError(f"a token was routed to expert {len(counts) - 1} of {weights.num_experts}")
    factors = routing.weights.flatten()[:, None]
    for expert, mine in enumerate(places.split(counts)):
        if not len(mine):
            continue
        given = x[mine // top_k]
        if weigh_inputs:
            given = (given.float() * factors[mine]).to(x.dtype)
        middle = activate_reference(linear(given, weights.gate_up[expert]), activation)
        answers[mine] = linear(middle, weights.down[expert]).float()
    if not weigh_inputs:
        answers *= factors
    return answers.view(rows, top_k, x.shape[1]).sum(1).to(x.dtype)
