"""Penalties, biases, forbidden tokens and masks on a GPU: what `apply_penalties` and numpy give, bit by bit, in copies of rows.

host = pack_adjustments([Adjustment(row=3, …), …])                 numpy → one pinned buffer
adjustments = Adjustments.on(device, host)                         one asynchronous copy
adjusted = apply_adjustments(logits, adjustments, previous, masks) float32 [n, vocab]
sample_filtered(adjusted, adjustments.rows, batch, out, compact=True)
"""

from __future__ import annotations

import torch

from common.ops.backend import on_device
from common.ops.sampling.adjustments import Adjustments


def apply_adjustments(
    logits: torch.Tensor,
    adjustments: Adjustments,
    previous_tokens: torch.Tensor,
    masks: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """logits: float32, bfloat16 or float16 [rows, vocab], left as they are. previous_tokens: int32 or int64, at least one.
    masks: int32 [masks, ceil(vocab / 32)], bit t % 32 of word t // 32 allows token t; None where no row has one.
    counts: int32 [slots, vocab] (`counts_device.add_counts`); None where no row has a slot.
    Returns float32 [n, vocab], the adjusted logits of `adjustments.rows`.

    Repetition divides positive logits of tokens in prompt or output and multiplies others; then frequency is subtracted once
    per occurrence in the output, then presence once per token there; then biases are added.

    :raises ValueError: if shapes or dtypes don't fit, or on a CPU (see `apply_penalties`).
    """
    if logits.ndim != 2 or not logits.dtype.is_floating_point or logits.stride(1) != 1 or not on_device(logits):
        raise ValueError(f"adjusted are logits [rows, vocab] on a GPU, not {logits.dtype} {list(logits.shape)}")
    if previous_tokens.ndim != 1 or not len(previous_tokens):
        raise ValueError(f"previous tokens are [tokens], not {list(previous_tokens.shape)}")
    if masks is not None and (masks.dtype != torch.int32 or masks.ndim != 2 or masks.shape[1] * 32 < logits.shape[1]):
        raise ValueError(f"masks are int32 [masks, vocab / 32], not {masks.dtype} {list(masks.shape)}")
    from common.ops.sampling.penalties_triton import edit_triton, penalise_triton

    if not len(adjustments.rows):
        return torch.empty(0, logits.shape[1], dtype=torch.float32, device=logits.device)
    out = penalise_triton(logits, adjustments, previous_tokens, table=counts, masks=masks)
    edit_triton(out, adjustments.bias_rows, adjustments.bias_tokens, adjustments.bias_values)
    edit_triton(out, adjustments.forbidden_rows, adjustments.forbidden_tokens, None)
    return out
