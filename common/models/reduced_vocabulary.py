"""The head of a draft model that can only write some of the target's tokens (EAGLE-3's convention).

config.json says `draft_vocab_size`, the head has as many rows, and the tensor `d2t`, int64 [draft_vocab_size], holds for each
of them the target's token id less the row's index. Rows have any order; the recipe's have the likeliest tokens first. Logits
are spread over the target's vocabulary before anything is drawn, so that the noise of a token is that of its id in the target.
"""

from __future__ import annotations

import torch

from common.models.weights.errors import WeightsError
from common.models.weights.expected import TARGET_OFFSETS

ABSENT_LOGIT = -1e30
"""Of tokens that the head does not have: finite, as every logit must be, and never drawn."""


def target_ids(offsets: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return the target's id of each row of the head, int64 [draft_vocab_size].

    offsets: the tensor `d2t`.

    :raises WeightsError: if ids are outside the target's vocabulary, or one is named twice.
    """
    if offsets.dtype != torch.int64:
        raise WeightsError(f"{TARGET_OFFSETS} is {str(offsets.dtype).removeprefix('torch.')}, and int64 is what it must be")
    ids = offsets + torch.arange(len(offsets), device=offsets.device)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise WeightsError(f"{TARGET_OFFSETS} names tokens outside the vocabulary of {vocab_size}")
    if len(ids.unique()) < len(ids):
        raise WeightsError(f"{TARGET_OFFSETS} does not name tokens of the target, each once at most")
    return ids


def are_all(ids: torch.Tensor, vocab_size: int) -> bool:
    """Return whether `ids` are the whole vocabulary in order, so that a row's index is its token."""
    return len(ids) == vocab_size and bool((ids == torch.arange(vocab_size, device=ids.device)).all())


def spread(logits: torch.Tensor, ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """logits: float32 [rows, draft_vocab_size]. ids: of `target_ids`. Returns float32 [rows, vocab_size]."""
    whole = torch.full((len(logits), vocab_size), ABSENT_LOGIT, dtype=logits.dtype, device=logits.device)
    return whole.index_copy_(1, ids, logits)
