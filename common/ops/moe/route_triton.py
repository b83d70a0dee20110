"""`route` on a GPU, without groups, in one kernel: one program per row, its experts in registers."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from common.ops import backend
from common.ops.moe.form import RouterForm, Routing
from common.ops.sizes import next_power_of_2


@triton.jit
def route_kernel(
    logits,  # [SPLITS, rows, EXPERTS]
    bias,  # [EXPERTS] or None
    ids,  # int32 [rows, TOP_K], written
    weights,  # float32 [rows, TOP_K], written
    factor,
    split_size,  # rows * EXPERTS
    SPLITS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALISE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    present = expert < EXPERTS
    x = tl.load(logits + row * EXPERTS + expert, mask=present, other=float("-inf")).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        x += tl.load(logits + split * split_size.to(tl.int64) + row * EXPERTS + expert, mask=present, other=0.0)
    if SCORING == "softmax":
        e = tl.exp(x - tl.max(x, 0))
        scores = e / tl.sum(e, 0)
    elif SCORING == "sigmoid":
        scores = tl.sigmoid(x)
    else:
        scores = x
    choice = scores
    if bias is not None:
        choice = choice + tl.load(bias + expert, mask=present, other=0.0).to(tl.float32)
    # NaN counts as the lowest, so that ids stay below EXPERTS whatever the logits are
    choice = tl.where(choice == choice, choice, float("-inf"))
    rank_of = tl.full((BLOCK,), TOP_K, tl.int32)
    place = tl.arange(0, TOP_K_BLOCK)
    chosen_ids = tl.zeros((TOP_K_BLOCK,), tl.int32)
    chosen = tl.full((TOP_K_BLOCK,), float("-inf"), tl.float32)
    for rank in tl.static_range(TOP_K):
        left = present & (rank_of == TOP_K)
        best = tl.max(tl.where(left, choice, float("-inf")), 0)
        first = tl.min(tl.where(left & (choice == best), expert, BLOCK), 0)
        rank_of = tl.where(expert == first, rank, rank_of)
        value = tl.sum(tl.where(expert == first, scores, 0.0), 0)
        chosen_ids = tl.where(place == rank, first, chosen_ids)
        chosen = tl.where(place == rank, value, chosen)
    used = place < TOP_K
    if SCORING == "softmax_selected":
        e = tl.exp(chosen - tl.max(chosen, 0))
        chosen = e / tl.sum(e, 0)
    if RENORMALISE:
        chosen = chosen / tl.sum(tl.where(used, chosen, 0.0), 0)
    tl.store(ids + row * TOP_K + place, chosen_ids, mask=used)
    tl.store(weights + row * TOP_K + place, chosen * factor, mask=used)


def route_triton(logits: torch.Tensor, form: RouterForm, bias: torch.Tensor | None) -> Routing:
    """See `route`. Of equal experts the lower one comes first."""
    rows, experts = logits.shape[-2:]
    ids = torch.empty(rows, form.top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(rows, form.top_k, dtype=torch.float32, device=logits.device)
    if rows:
        pdl = backend.pdl(logits)
        route_kernel[(rows,)](
            logits=logits.contiguous(),
            bias=bias,
            ids=ids,
            weights=weights,
            factor=form.scale,
            split_size=rows * experts,
            SPLITS=1 if logits.ndim == 2 else len(logits),
            EXPERTS=experts,
            BLOCK=next_power_of_2(experts),
            TOP_K=form.top_k,
            TOP_K_BLOCK=next_power_of_2(form.top_k),
            SCORING=form.scoring,
            RENORMALISE=form.renormalise,
            PDL=pdl,
            num_warps=1,
            launch_pdl=pdl,
        )
    return Routing(ids, weights)
