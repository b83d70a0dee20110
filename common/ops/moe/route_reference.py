"""`route` in plain torch."""

from __future__ import annotations

import torch

from common.ops.moe.form import RouterForm, Routing


def route_reference(logits: torch.Tensor, form: RouterForm, bias: torch.Tensor | None = None) -> Routing:
    """See `route`."""
    scores = {"softmax": _softmax, "sigmoid": _sigmoid, "softmax_selected": _as_they_are}[form.scoring](logits.float())
    choice = scores if bias is None else scores + bias.float()
    if form.groups > 1:
        rows, experts = choice.shape
        grouped = choice.view(rows, form.groups, experts // form.groups)
        best = grouped.topk(min(2, grouped.shape[2]), dim=2).values.sum(2)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(form.top_groups, dim=1).indices, value=True)
        choice = grouped.masked_fill(~kept[:, :, None], float("-inf")).view(rows, experts)
    ids = choice.topk(form.top_k, dim=1).indices
    weights = scores.gather(1, ids)
    if form.scoring == "softmax_selected":
        weights = _softmax(weights)
    if form.renormalise:
        weights = weights / weights.sum(1, keepdim=True)
    return Routing(ids.int(), weights * form.scale)


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    return torch.softmax(logits, dim=-1)


def _sigmoid(logits: torch.Tensor) -> torch.Tensor:
    """Rounded from float64: in float32 torch's result depends on a number's place in the tensor."""
    return torch.sigmoid(logits.double()).float()


def _as_they_are(logits: torch.Tensor) -> torch.Tensor:
    return logits
