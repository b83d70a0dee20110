"""`experts` on a GPU: two grouped products and a sum, preceded by a sort where the routing is large.

Nothing is read by the host, and grids and buffers depend on the number of rows alone, so that all of it can be captured in a
CUDA graph. Only weights of experts that have tokens are read. There are no atomics: each pair of token and expert, and each
split of K, has its own place, and a token's answers are added in the order of its routing.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch

from common.ops import backend
from common.ops.moe.candidates import DIRECT_PAIRS, SCALE_COLUMNS, ExpertCandidate
from common.ops.moe.combine_triton import combined
from common.ops.moe.experts_library import experts_library
from common.ops.moe.experts_unpacking import experts_unpacking
from common.ops.moe.form import ExpertActivation, Routing
from common.ops.moe.grouped_triton import experts_kernel
from common.ops.moe.halves_triton import multiply_halves
from common.ops.moe.packed_weight import PackedWeight
from common.ops.moe.quantise_triton import quantise_blocks
from common.ops.moe.sort_triton import SortedPairs, sorted_pairs
from common.ops.sizes import cdiv

_PARTIAL_ROWS, _PARTS = 64, 8
"""Up to so many tokens and partial sums of each, a launch costs more than it saves whoever reads them: one program a row."""


def experts_triton(
    x: torch.Tensor,
    routing: Routing,
    gate_up: PackedWeight,
    down: PackedWeight,
    activation: ExpertActivation,
    chosen: ExpertCandidate,
    *,
    weigh_inputs: bool = False,
    split: bool = False,
) -> torch.Tensor:
    """See `experts`. x: [rows, hidden], contiguous. split: may return float32 partial sums [parts, rows, hidden].

    :raises ValueError: if `chosen` has programs look through more pairs than they can.
    """
    (rows, top_k), hidden, middle = routing.ids.shape, down.n, down.k
    pairs = rows * top_k
    if not rows:
        return torch.empty_like(x)
    routing = Routing(routing.ids.contiguous(), routing.weights.contiguous())
    if chosen.library:
        return experts_library(x, routing, gate_up, down, activation, weigh_inputs=weigh_inputs)
    if chosen.unpacking:
        return experts_unpacking(x, routing, gate_up, down, activation, chosen, weigh_inputs=weigh_inputs)
    if chosen.direct and pairs > DIRECT_PAIRS:
        raise ValueError(f"programs look through {DIRECT_PAIRS} pairs at the most, not {pairs}")
    found = None if chosen.direct else sorted_pairs(routing.ids, gate_up.experts, chosen.block_m)
    between = torch.empty(pairs, middle, dtype=x.dtype, device=x.device)
    kept = x.dtype if chosen.rounded else torch.float32
    answers = torch.empty(top_k * _splits(down, chosen), rows, hidden, dtype=kept, device=x.device)
    for weight, given, out in ((gate_up, x, between), (down, between, answers)):
        if chosen.halves:
            assert found is not None
            multiply_halves(given, weight, routing, found, activation, chosen, out, weigh_inputs=weigh_inputs)
        else:
            _multiply(given, weight, routing, found, activation, chosen, out, weigh_inputs=weigh_inputs)
    few = rows <= _PARTIAL_ROWS and len(answers) <= _PARTS
    if split and few and not chosen.rounded and not down.batch_invariant:
        return answers
    return combined(answers, x.dtype)


def _multiply(
    x: torch.Tensor,
    weight: PackedWeight,
    routing: Routing,
    found: SortedPairs | None,
    activation: ExpertActivation,
    chosen: ExpertCandidate,
    out: torch.Tensor,
    *,
    weigh_inputs: bool,
) -> None:
    rows, top_k = routing.ids.shape
    pairs, gated, pdl = rows * top_k, out.ndim == 2, backend.pdl(x)
    data, x_scale = quantise_blocks(x) if chosen.quantised else (x, None)
    slots = pairs if found is None else len(found.tiles)
    words, columns = _words(weight, chosen), _columns(weight, chosen)
    splits = 1 if gated else _splits(weight, chosen)
    row_bytes = weight.k * weight.values.element_size()
    experts_kernel[(cdiv(weight.n, chosen.block_n) * slots, splits)](
        x=data,
        x_scale=x_scale,
        values=weight.values,
        scale=weight.scale,
        offset=weight.offset,
        channel=weight.channel,
        bias=weight.bias,
        ids=routing.ids if found is None else None,
        tiles=None if found is None else found.tiles,
        order=None if found is None else found.order,
        factors=routing.weights,
        out=out,
        rows=rows,
        pairs=pairs,
        slots=slots,
        N=weight.n,
        K=weight.k,
        steps=weight.values.shape[1] if weight.run else 0,
        words=words,
        words_per_split=cdiv(words, splits),
        alpha=activation.alpha,
        limit=activation.limit,
        TOP_K=top_k,
        PAIRS=DIRECT_PAIRS if found is None else 0,
        DIRECT=found is None,
        GATED=gated,
        WEIGH=weigh_inputs == gated,
        ACTIVATION=activation.kind,
        FORMAT=weight.format,
        RUN=weight.run,
        BLOCK_N=chosen.block_n,
        BLOCK_M=chosen.block_m,
        BLOCK_K=chosen.block_k,
        SCALED=chosen.scaled,
        EVEN_K=weight.k % columns == 0,
        NEIGHBOURS=chosen.neighbours,
        HALVINGS=chosen.halvings,
        STAGES=chosen.stages,
        AHEAD=pdl and not gated and (weight.run > 0 or row_bytes % 16 == 0),
        FAST=pdl,
        PDL=pdl,
        num_warps=chosen.warps,
        launch_pdl=pdl,
        enable_fp_fusion=not weight.batch_invariant,
    )


def _columns(weight: PackedWeight, chosen: ExpertCandidate) -> int:
    """Columns of one turn of the loop."""
    return chosen.block_k or (SCALE_COLUMNS if weight.format == "mxfp4" else 2 * weight.run)


def _words(weight: PackedWeight, chosen: ExpertCandidate) -> int:
    """Turns of the loop for all columns."""
    return cdiv(weight.k, _columns(weight, chosen))


def _splits(weight: PackedWeight, chosen: ExpertCandidate) -> int:
    """As many splits as have turns of the loop."""
    words = _words(weight, chosen)
    return cdiv(words, cdiv(words, chosen.splits))
