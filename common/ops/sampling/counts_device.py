"""Counts of tokens in rows of a table on a GPU: what each step adds to them.

host = pack_additions([Addition(slot=3, …), …])    numpy → one pinned buffer
add_counts(table, CountUpdate.on(device, host), previous_tokens)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from common.ops.backend import on_device
from common.ops.sampling.packing import pack_columns, unpack_columns


class Addition(NamedTuple):
    """Tokens for one row of the table: the first `prompt` are of a prompt, the others of an output; -1 stands for
    `previous_tokens[feed]`. clears: whether the row held another sequence's before."""

    slot: int
    tokens: Sequence[int]
    prompt: int
    feed: int = 0
    clears: bool = False


class HostCountUpdate(NamedTuple):
    """buffer: int32, pinned if there is a CUDA device; sizes: of its parts, in order."""

    buffer: torch.Tensor
    sizes: dict[str, int]
    longest: int


@dataclass(frozen=True)
class CountUpdate:
    """On a device, int32: `targets` are rows of the table; `ids` as in `adjust_device.Adjustments`; cleared: rows."""

    targets: torch.Tensor
    feeds: torch.Tensor
    outputs: torch.Tensor
    starts: torch.Tensor
    ids: torch.Tensor
    cleared: torch.Tensor
    longest: int

    @classmethod
    def on(cls, device: torch.device | str, host: HostCountUpdate) -> CountUpdate:
        """Starts the copy; `host.buffer` must stay as it is until that has happened."""
        return cls(**unpack_columns(host.buffer.to(device, non_blocking=True), host.sizes), longest=host.longest)


def pack_additions(additions: Sequence[Addition]) -> HostCountUpdate:
    """No two of one slot."""
    lengths = [len(one.tokens) for one in additions]
    starts = np.cumsum([0, *lengths], dtype=np.int32)
    columns: dict[str, NDArray[np.int32]] = {
        "targets": np.array([one.slot for one in additions], np.int32),
        "feeds": np.array([one.feed for one in additions], np.int32),
        "outputs": starts[:-1] + np.array([one.prompt for one in additions], np.int32),
        "starts": starts,
        "ids": np.array([token for one in additions for token in one.tokens], np.int32),
        "cleared": np.array([one.slot for one in additions if one.clears], np.int32),
    }
    buffer, sizes = pack_columns(columns)
    return HostCountUpdate(buffer, sizes, max(lengths, default=0))


def add_counts(table: torch.Tensor, update: CountUpdate, previous_tokens: torch.Tensor) -> None:
    """table: int32 [slots, vocab], contiguous: 2 · occurrences in the output, + 1 if in the prompt. previous_tokens: int32 or
    int64, at least one. Tokens outside the vocabulary are passed over.

    :raises ValueError: for another table, or on a CPU.
    """
    if table.dtype != torch.int32 or table.ndim != 2 or not table.is_contiguous() or not on_device(table):
        raise ValueError(f"counts are int32 [slots, vocab] on a GPU, not {table.dtype} {list(table.shape)}")
    from common.ops.sampling.penalties_triton import count_triton

    if len(update.cleared):
        table.index_fill_(0, update.cleared.long(), 0)
    if update.longest:
        count_triton(
            table,
            update.targets,
            ids=update.ids,
            starts=update.starts,
            outputs=update.outputs,
            feeds=update.feeds,
            previous=previous_tokens,
            longest=update.longest,
        )
