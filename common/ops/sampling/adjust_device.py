"""Penalties, biases, forbidden tokens and masks on a GPU: what `apply_penalties` and numpy give, bit by bit, in copies of rows.

host = pack_adjustments([Adjustment(row=3, …), …])                 numpy → one pinned buffer
adjustments = Adjustments.on(device, host)                         one asynchronous copy
adjusted = apply_adjustments(logits, adjustments, previous, masks) float32 [n, vocab]
sample_filtered(adjusted, adjustments.rows, batch, out, compact=True)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from common.ops.backend import on_device
from common.ops.sampling.packing import pack_columns, unpack_columns

PENDING = -1
"""In a history: the token that the step before draws for this row, which the host does not know yet."""

ANEW = -1
NOTHING = -2
"""In place of a slot: the row's history is counted anew; it has none."""

_FLOATS = {"presence", "frequency", "repetition", "bias_values"}


class Adjustment(NamedTuple):
    """What changes one row of logits: penalties, then biases; tokens in `forbidden` or outside the mask get -inf.

    prompt and output: token ids, both empty without penalties; output may end with `PENDING`, which stands for
    `previous_tokens[feed]`. With a `slot`, that row of the table of counts holds both up to `output`, which is then the few
    tokens behind them. mask: which of the step's masks holds for the row, -1 none.
    """

    row: int
    prompt: Sequence[int] | NDArray[np.int32] = ()
    output: Sequence[int] | NDArray[np.int32] = ()
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    biases: Mapping[int, float] = {}
    forbidden: Sequence[int] = ()
    feed: int = 0
    mask: int = -1
    slot: int = ANEW


class HostAdjustments(NamedTuple):
    """buffer: int32, pinned if there is a CUDA device; floats are in it bit by bit. sizes: of its parts, in order."""

    buffer: torch.Tensor
    sizes: dict[str, int]
    longest: int


@dataclass(frozen=True)
class Adjustments:
    """Of n rows, on a device. `ids`: int32 histories, one after the other: row i's is [starts[i], starts[i + 1]), and its
    output begins at outputs[i]. `slots`: rows of the table of counts, `ANEW` or `NOTHING`. targets: i for rows that are `ANEW`,
    else -1; longest: of the histories of those. Biases and forbidden tokens name their row by its index among the n. `masks`:
    int32, of each.
    """

    rows: torch.Tensor
    outputs: torch.Tensor
    feeds: torch.Tensor
    masks: torch.Tensor
    slots: torch.Tensor
    targets: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    repetition: torch.Tensor
    starts: torch.Tensor
    ids: torch.Tensor
    bias_rows: torch.Tensor
    bias_tokens: torch.Tensor
    bias_values: torch.Tensor
    forbidden_rows: torch.Tensor
    forbidden_tokens: torch.Tensor
    longest: int

    @classmethod
    def on(cls, device: torch.device | str, host: HostAdjustments) -> Adjustments:
        """Starts the copy; `host.buffer` must stay as it is until that has happened."""
        parts = unpack_columns(host.buffer.to(device, non_blocking=True), host.sizes)
        for name in _FLOATS:
            parts[name] = parts[name].view(torch.float32)
        return cls(**parts, longest=host.longest)


def pack_adjustments(adjustments: Sequence[Adjustment]) -> HostAdjustments:
    """Tokens outside the vocabulary are passed over later."""
    columns: dict[str, NDArray[np.int32]] = {}
    histories = [np.asarray(part, np.int32) for one in adjustments for part in (one.prompt, one.output)]
    ends = np.cumsum([0, *(len(part) for part in histories)], dtype=np.int32)
    starts, outputs = ends[::2], ends[1::2]
    counts_anew = np.array([one.slot == ANEW and len(one.prompt) + len(one.output) > 0 for one in adjustments], bool)
    values: dict[str, list[int] | list[float]] = {
        "rows": [one.row for one in adjustments],
        "feeds": [one.feed for one in adjustments],
        "masks": [one.mask for one in adjustments],
        "slots": [
            one.slot if one.slot >= 0 else (ANEW if anew else NOTHING)
            for one, anew in zip(adjustments, counts_anew, strict=True)
        ],
        "targets": [index if anew else -1 for index, anew in enumerate(counts_anew)],
        "presence": [one.presence for one in adjustments],
        "frequency": [one.frequency for one in adjustments],
        "repetition": [one.repetition for one in adjustments],
        "bias_rows": [index for index, one in enumerate(adjustments) for _ in one.biases],
        "bias_tokens": [token for one in adjustments for token in one.biases],
        "bias_values": [bias for one in adjustments for bias in one.biases.values()],
        "forbidden_rows": [index for index, one in enumerate(adjustments) for _ in one.forbidden],
        "forbidden_tokens": [token for one in adjustments for token in one.forbidden],
    }
    for name, column in values.items():
        columns[name] = np.array(column, np.float32 if name in _FLOATS else np.int32).view(np.int32)
    columns["outputs"], columns["starts"] = outputs, starts
    columns["ids"] = np.concatenate(histories) if histories else np.empty(0, np.int32)
    longest = int(np.diff(starts)[counts_anew].max()) if counts_anew.any() else 0
    return HostAdjustments(*pack_columns(columns), longest)


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
    out = penalise_triton(
        logits,
        adjustments.rows,
        table=counts,
        slots=adjustments.slots,
        targets=adjustments.targets,
        ids=adjustments.ids,
        starts=adjustments.starts,
        outputs=adjustments.outputs,
        feeds=adjustments.feeds,
        previous=previous_tokens,
        presence=adjustments.presence,
        frequency=adjustments.frequency,
        repetition=adjustments.repetition,
        longest=adjustments.longest,
        masks=masks,
        mask_of=adjustments.masks,
    )
    edit_triton(out, adjustments.bias_rows, adjustments.bias_tokens, adjustments.bias_values)
    edit_triton(out, adjustments.forbidden_rows, adjustments.forbidden_tokens, None)
    return out
