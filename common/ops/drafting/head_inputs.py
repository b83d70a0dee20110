"""What a head reads of a step that a GPU has run, and what its passes take; see `head_rows.py`.

Position p of a text and the token at p + 1 are a pair (`docs/heads.md`). A row's pairs go to a ring of `RING_TOKENS` entries
of the head's own KV, of which a pair sees the last `WINDOW`. Places are counted from the text position where the head's context
begins: rotary positions only matter by their distance.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from common.ops.sampling.sample_device import DrawBatch

WINDOW = 1024
"""Pairs of a text that a pair sees, its own included."""
RING_TOKENS = 2048
"""Pairs of a text whose KV is kept: a step may write as many as a pair sees before they are overwritten."""
ROW_HEADER = 7
"""Words of a row: first token, tokens, samples, first sample, context, base, the token behind it."""
NO_CONTEXT = -1
"""The context of a row that nothing is drafted for."""


class HeadRow(NamedTuple):
    """A row of a step. first, length: of its tokens; the last `num_samples` are sampled, from draw `sample` on. context: which
    of the head's it has; base: the text position where that begins. What is before it is passed over. following: the token
    behind a row without samples."""

    first: int
    length: int
    num_samples: int
    sample: int
    context: int
    base: int
    following: int = 0


class TargetStep(NamedTuple):
    """What a step has left. tokens, positions: int64 [tokens], as settled; sampled: int64 [samples]; draws: how these were
    drawn."""

    tokens: torch.Tensor
    positions: torch.Tensor
    sampled: torch.Tensor
    draws: DrawBatch


class FirstPass(NamedTuple):
    """Inputs of the first pass, written. nexts, places, slots: int64 [tokens]: the token of each pair, its place in the
    context, and the entry of the head's KV pool (-1: none). context_lens, block_starts: int32 [rows], as in `DeviceBatch`."""

    nexts: torch.Tensor
    places: torch.Tensor
    slots: torch.Tensor
    context_lens: torch.Tensor
    block_starts: torch.Tensor


class DraftRows(NamedTuple):
    """Inputs of later passes, a token of each row. selected: int64 [rows], which pair of the first pass each goes on from.
    tokens, places, slots: int64 [rows]. context_lens, block_starts: int32 [rows]. contexts: int32 [rows], `NO_CONTEXT` for
    rows that draft nothing. lengths: int32 [rows], tokens of the row's line on the board so far. draws: of as many rows."""

    selected: torch.Tensor
    tokens: torch.Tensor
    places: torch.Tensor
    slots: torch.Tensor
    context_lens: torch.Tensor
    block_starts: torch.Tensor
    contexts: torch.Tensor
    lengths: torch.Tensor
    draws: DrawBatch

    @classmethod
    def create(cls, rows: int, device: torch.device) -> DraftRows:
        def make(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(rows, dtype=dtype, device=device)

        wide, narrow = torch.int64, torch.int32
        return cls(
            selected=make(wide),
            tokens=make(wide),
            places=make(wide),
            slots=make(wide),
            context_lens=make(narrow),
            block_starts=make(narrow),
            contexts=make(narrow),
            lengths=make(narrow),
            draws=DrawBatch.create(rows, device),
        )
