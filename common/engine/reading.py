"""What rows are read for: log-probabilities of tokens that are known already, and sums of hidden states.

Logits of a whole prompt would be gigabytes, so they are computed for SLICE_POSITIONS positions at a time. Hidden states are
added up in fixed point: whole numbers have one sum, whatever order they are added in, so neither chunks nor batches change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from common.engine.plan import FIXED_POINT, RowSamples, StepRow
from common.ops.sampling.logprobs import top_logprobs
from common.protocol.messages import TokenLogprobs

SLICE_POSITIONS = 64
"""Positions whose logits are in memory at once."""
SUMMED_POSITIONS = 256
"""Positions whose hidden states are in memory in double precision at once."""
LARGEST_STATE = 2.0**15
"""Larger numbers count as this: the sum of 2^20 of them still fits 64 bits."""


class Reader(Protocol):
    """A runner on a CPU that has just computed a step; see `CpuRunner`."""

    def read_states(self) -> torch.Tensor: ...

    def read_logits(self, start: int, end: int) -> torch.Tensor: ...


def total_state(states: torch.Tensor) -> torch.Tensor:
    """states: floats [positions, hidden_size]. Returns their sum in units of `FIXED_POINT`, int64 [hidden_size].

    A whole step's states in double precision would be gigabytes, which a GPU full of weights and KV has not left.
    """
    total = torch.zeros(states.shape[1], dtype=torch.int64, device=states.device)
    for part in states.split(SUMMED_POSITIONS):
        total += _sum_of(part)
    return total


def _sum_of(states: torch.Tensor) -> torch.Tensor:
    exact = states.double().nan_to_num().clamp(-LARGEST_STATE, LARGEST_STATE)
    return (exact / FIXED_POINT).round().long().sum(0)


def order_of_reading(rows: Sequence[StepRow]) -> list[int]:
    """Indices of the rows that are read, those with targets first: the order of a runner's states."""
    read = [index for index, row in enumerate(rows) if row.num_read]
    return sorted(read, key=lambda index: not rows[index].targets)


def read_rows(runner: Reader, rows: Sequence[StepRow], results: Sequence[RowSamples]) -> None:
    """Put into `results` what the rows of the step that `runner` has computed are read for."""
    states = runner.read_states()
    first = 0
    for index in order_of_reading(rows):
        row, end = rows[index], first + rows[index].num_read
        if row.targets:
            results[index].scores = _scores(runner, row, first)
        else:
            results[index].total = total_state(states[first:end]).numpy()
        first = end


def _scores(runner: Reader, row: StepRow, first: int) -> list[TokenLogprobs]:
    scores: list[TokenLogprobs] = []
    for start in range(0, row.num_read, SLICE_POSITIONS):
        targets = row.targets[start : start + SLICE_POSITIONS]
        logits = runner.read_logits(first + start, first + start + len(targets))
        for position, target in zip(logits, targets, strict=True):
            logprob, ids, logprobs = top_logprobs(position, target, max(row.sampling.logprobs, 0))
            values = position.numpy()
            rank = 1 + int(np.count_nonzero(values > values[target]))
            scores.append(TokenLogprobs(logprob, tuple(ids), tuple(logprobs), rank))
    return scores
