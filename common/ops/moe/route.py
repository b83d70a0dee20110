"""Which experts a token visits, and what each one's answer weighs."""

from __future__ import annotations

import torch

from common.ops.backend import on_device
from common.ops.moe.form import RouterForm, Routing
from common.ops.moe.route_reference import route_reference


def route(logits: torch.Tensor, form: RouterForm, bias: torch.Tensor | None = None) -> Routing:
    """logits: floating [rows, experts], computed with in float32, or float32 partial sums [splits, rows, experts], added first
    to last. bias: [experts], added for the choice alone, not to weights.

    :raises ValueError: if shapes don't fit each other or the form.
    """
    if logits.ndim not in (2, 3) or (bias is not None and bias.shape != logits.shape[-1:]):
        raise ValueError(f"router logits are [rows, experts] with a bias of [experts], not {list(logits.shape)}")
    experts = logits.shape[-1]
    if form.groups < 1 or experts % form.groups:
        raise ValueError(f"{experts} experts don't divide into {form.groups} groups")
    if not 1 <= form.top_groups <= form.groups or not 1 <= form.top_k <= form.top_groups * (experts // form.groups):
        raise ValueError(f"{form.top_k} of {experts} experts, in {form.top_groups} of {form.groups} groups, can't be chosen")
    if on_device(logits) and form.groups == 1:
        from common.ops.moe.route_triton import route_triton

        return route_triton(logits, form, bias)
    return route_reference(logits if logits.ndim == 2 else logits.sum(0), form, bias)
