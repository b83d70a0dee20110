"""Log-probabilities of the chosen and of the likeliest tokens."""

from __future__ import annotations

import math

import numpy as np
import torch

from common.ops.backend import on_device

_ROWS_AT_ONCE = 16
"""Bounds `token_logprobs`' scratch memory: about 30 bytes a token of the vocabulary each."""


def top_logprobs(logits: torch.Tensor, token: int, num_top: int) -> tuple[float, list[int], list[float]]:
    """logits: float32 [vocab]. Returns the natural-log probability of `token`, the `num_top` likeliest tokens (equal ones
    by id) and theirs.

    :raises ValueError: for logits of another rank, or a token outside the vocabulary.
    """
    if logits.ndim != 1 or not 0 <= token < len(logits):
        raise ValueError(f"token {token} has no logit in {list(logits.shape)}")
    values = logits.numpy()
    found = values - values.max()
    found -= np.float32(math.log(np.exp(found).sum(dtype=np.float64)))  # in float32, 128k terms cost four digits
    if num_top <= 0:
        return float(found[token]), [], []
    num_top = min(num_top, len(found))
    # of logits, since rounded log-probabilities have ties that these don't
    likely = np.flatnonzero(values >= np.partition(values, -num_top)[-num_top])
    likely = likely[np.argsort(-values[likely], kind="stable")][:num_top]
    return float(found[token]), likely.tolist(), found[likely].tolist()


def token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """logits: floats [rows, vocab]; tokens: int32 or int64 [rows], the chosen ones; rows: int32 or int64 [n], those that ask.
    All on one device, which is not waited for.

    Returns the log-probabilities of the rows' tokens, float32 [n], and ids (int64) and log-probabilities (float32) of their
    `num_top` likeliest tokens, equal ones by id, [n, min(num_top, vocab)] each.

    :raises ValueError: if shapes don't fit.
    """
    if logits.ndim != 2 or rows.ndim != 1 or tokens.ndim != 1:
        raise ValueError(f"no tokens {list(tokens.shape)} of rows {list(rows.shape)} in logits {list(logits.shape)}")
    num_top = max(0, min(num_top, logits.shape[1]))
    if on_device(logits) and len(rows) and logits.stride(1) == 1:
        from common.ops.sampling.logprobs_triton import MAX_TOP, token_logprobs_triton

        if num_top <= MAX_TOP:
            return token_logprobs_triton(logits, tokens, rows, num_top)
    return token_logprobs_torch(logits, tokens, rows, num_top)


def token_logprobs_torch(
    logits: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `token_logprobs`, in torch, on any device."""
    pieces = [_token_logprobs(logits, tokens, part, num_top) for part in rows.split(_ROWS_AT_ONCE)]
    chosen, ids, found = zip(*pieces, strict=True)
    return torch.cat(chosen), torch.cat(ids), torch.cat(found)


def token_ranks(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """logits: floats [rows, vocab]; tokens: int64 [rows]. Returns how many tokens of each row are likelier than its own, plus
    1: int64 [rows].

    :raises ValueError: if shapes don't fit.
    """
    if logits.ndim != 2 or tokens.shape != logits.shape[:1]:
        raise ValueError(f"no tokens {list(tokens.shape)} in logits {list(logits.shape)}")
    return (logits > logits.gather(1, tokens[:, None])).sum(1) + 1


def _token_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values = logits.index_select(0, rows).float()
    top = values.amax(1, keepdim=True)
    rest = (values - top).exp_().sum(1, keepdim=True).log_()

    def logprobs(ids: torch.Tensor) -> torch.Tensor:
        return values.gather(1, ids) - top - rest

    vocab = values.shape[1]
    chosen = logprobs(tokens.index_select(0, rows).long()[:, None])[:, 0]
    if num_top <= 0:
        return chosen, rows.new_empty(len(rows), 0, dtype=torch.int64), chosen.new_empty(len(rows), 0)
    # one integer orders by value, then by id; adding 0 makes the zeros equal
    keys = (values + 0.0).view(torch.int32)
    keys = torch.where(keys < 0, keys ^ 0x7FFFFFFF, keys).long() << 32
    keys |= torch.arange(vocab - 1, -1, -1, device=keys.device)
    ids = vocab - 1 - (keys.topk(num_top, dim=1).values & 0xFFFFFFFF)
    return chosen, ids, logprobs(ids)
