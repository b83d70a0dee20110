"""Scores and sums of hidden states on a GPU: what `reading.py` computes, launched behind a step and not waited for.

Steps with such rows have no graph: the logits of a prompt are computed a slice at a time, each in the memory of the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from common.engine.gpu.pinned import to_device, to_host
from common.engine.gpu.step_buffers import PackedStep
from common.engine.plan import RowSamples, StepRow
from common.engine.reading import SLICE_POSITIONS, order_of_reading, total_state
from common.models.decoder import Decoder
from common.ops.sampling.logprobs import token_logprobs, token_ranks
from common.protocol.messages import TokenLogprobs


class Reading(NamedTuple):
    """Of row `row`, in pinned memory once the step has run: slices of (logprobs, ids, logprobs of those, ranks), or a sum."""

    row: int
    slices: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]
    total: torch.Tensor | None


def places_read(rows: Sequence[StepRow], packed: PackedStep, device: torch.device) -> torch.Tensor:
    """Return which of a step's tokens are read: int64 [read], in the order of `order_of_reading`."""
    ends = (packed.firsts + packed.lengths).tolist()
    spans = [np.arange(ends[index] - rows[index].num_read, ends[index]) for index in order_of_reading(rows)]
    return to_device(np.concatenate(spans), device)


def read_rows(decoder: Decoder, rows: Sequence[StepRow], states: torch.Tensor) -> list[Reading]:
    """Launch what the rows are read for. states: [read, hidden_size], of the tokens in `places_read`."""
    readings: list[Reading] = []
    first = 0
    for index in order_of_reading(rows):
        row = rows[index]
        mine = states[first : first + row.num_read]
        first += row.num_read
        if not row.targets:
            readings.append(Reading(index, [], to_host(total_state(mine))))
            continue
        targets = to_device(np.array(row.targets, np.int64), states.device)
        slices = [
            _scores(decoder, part, wanted, max(row.sampling.logprobs, 0))
            for part, wanted in zip(mine.split(SLICE_POSITIONS), targets.split(SLICE_POSITIONS), strict=True)
        ]
        readings.append(Reading(index, slices, None))
    return readings


def put_readings(readings: Sequence[Reading], results: Sequence[RowSamples]) -> None:
    """Put the readings of a step that has run into the results of its rows."""
    for row, slices, total in readings:
        if total is not None:
            results[row].total = total.numpy()
            continue
        results[row].scores = [
            TokenLogprobs(chosen, tuple(ids), tuple(logprobs), rank)
            for columns in slices
            for chosen, ids, logprobs, rank in zip(*(column.tolist() for column in columns), strict=True)
        ]


def _scores(
    decoder: Decoder, states: torch.Tensor, targets: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = decoder.logits(states)
    every = torch.arange(len(targets), dtype=torch.int32, device=targets.device)  # as samples name theirs: no other build
    chosen, ids, logprobs = token_logprobs(logits, targets, every, num_top)
    ranks = token_ranks(logits, targets)
    return to_host(chosen), to_host(ids), to_host(logprobs), to_host(ranks)
