"""What the compiled call of a head takes and gives, as arrays, of the rows that ask for drafts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from common.engine.plan import StepRow
from common.ops.cpu_int8.choice_numba import Draws
from common.ops.cpu_int8.choice_reference import TOP_TOKENS
from common.ops.cpu_int8.drafting_numba import Drafted, Rows
from common.ops.sampling.gumbel import GREEDY_BELOW
from common.ops.sampling.philox import MASK32
from common.protocol.messages import SamplingParams

MAX_DRAFTS = 63


def draws_of(wishes: Sequence[SamplingParams]) -> Draws:
    """Return how the tokens of rows with these wishes are drawn."""
    keys = [(wish.seed & MASK32, wish.seed >> 32 & MASK32) for wish in wishes]
    return Draws(
        temperatures=np.array([0 if wish.temperature < GREEDY_BELOW else wish.temperature for wish in wishes], np.float32),
        top_k=np.array([min(wish.top_k or TOP_TOKENS, TOP_TOKENS) for wish in wishes], np.int64),
        top_p=np.array([wish.top_p for wish in wishes], np.float64),
        min_p=np.array([wish.min_p for wish in wishes], np.float64),
        keys=np.array(keys, np.uint32).reshape(-1, 2),
    )


def rows_of(
    rows: Sequence[StepRow], tables: NDArray[np.int64], places: NDArray[np.int64], positions: NDArray[np.int64]
) -> Rows:
    """Return how and how much is drafted for each of `rows`, of which nothing is yet; the arrays are as `Rows` says."""
    return Rows(
        active=np.arange(len(rows)),
        tables=tables,
        places=places,
        positions=positions,
        limits=np.array([min(row.drafts, MAX_DRAFTS) for row in rows], np.int64),
        chances=np.ones(len(rows), np.float64),
        least=np.array([row.least_chance for row in rows], np.float64),
        draws=draws_of([row.sampling for row in rows]),
    )


def nothing_drafted(rows: int, most: int) -> Drafted:
    """Return room for the drafts of so many rows, `most` tokens each."""
    passes = min(most, MAX_DRAFTS)
    num_rows = np.zeros(passes + 1, np.int64)
    num_rows[0] = rows
    return Drafted(
        counts=np.zeros(rows, np.int64),
        tokens=np.zeros((rows, passes), np.int64),
        chances=np.zeros((rows, passes), np.float64),
        num_rows=num_rows,
        ends=np.zeros((passes, 2), np.int64),
        found=np.zeros((passes, 2, rows), np.int64),
        sure=np.zeros((passes, 2, rows), np.float64),
    )
