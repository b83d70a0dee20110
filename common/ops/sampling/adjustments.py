"""What changes rows of logits on a GPU: penalties, biases, forbidden tokens and masks, packed for one copy there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

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
