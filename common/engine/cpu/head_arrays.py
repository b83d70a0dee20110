"""Builds the arrays that a head's compiled call (`ops.cpu_int8.drafting_numba`) reads and fills, from a step's rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from common.engine.plan import StepRow
from common.ops.cpu_int8.choice_numba import TOP_TOKENS, Draws
from common.ops.cpu_int8.drafting_numba import DraftResults, DraftRows
from common.ops.sampling.gumbel import GREEDY_BELOW
from common.ops.sampling.philox import MASK32
from common.protocol.messages import SamplingParams

MAX_DRAFTS = 63
"""Most tokens that are drafted for a row behind one step."""


def draws_of(params: Sequence[SamplingParams]) -> Draws:
    """Return the sampling parameters of rows as arrays."""
    keys = [(one.seed & MASK32, one.seed >> 32 & MASK32) for one in params]
    return Draws(
        temperatures=np.array([0 if one.temperature < GREEDY_BELOW else one.temperature for one in params], np.float32),
        top_k=np.array([min(one.top_k or TOP_TOKENS, TOP_TOKENS) for one in params], np.int64),
        top_p=np.array([one.top_p for one in params], np.float64),
        min_p=np.array([one.min_p for one in params], np.float64),
        keys=np.array(keys, np.uint32).reshape(-1, 2),
    )


def rows_of(
    rows: Sequence[StepRow], tables: NDArray[np.int64], places: NDArray[np.int64], positions: NDArray[np.int64]
) -> DraftRows:
    """Return the state of `rows` before the first token is drafted. The arrays are those of `DraftRows`."""
    return DraftRows(
        active=np.arange(len(rows)),
        tables=tables,
        places=places,
        positions=positions,
        limits=np.array([min(row.drafts, MAX_DRAFTS) for row in rows], np.int64),
        chances=np.ones(len(rows), np.float64),
        least=np.array([row.least_chance for row in rows], np.float64),
        draws=draws_of([row.sampling for row in rows]),
    )


def nothing_drafted(rows: int, most: int) -> DraftResults:
    """Return zeroed results for `rows` rows, with space for `most` tokens each, up to `MAX_DRAFTS`."""
    passes = min(most, MAX_DRAFTS)
    num_rows = np.zeros(passes + 1, np.int64)
    num_rows[0] = rows
    return DraftResults(
        counts=np.zeros(rows, np.int64),
        tokens=np.zeros((rows, passes), np.int64),
        chances=np.zeros((rows, passes), np.float64),
        num_rows=num_rows,
        ends=np.zeros((passes, 2), np.int64),
        found=np.zeros((passes, 2, rows), np.int64),
        sure=np.zeros((passes, 2, rows), np.float64),
    )
