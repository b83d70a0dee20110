"""Work shared among threads inside compiled code."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from common.ops.cpu_int8.compiled_numba import compiled
from common.ops.cpu_int8.team_numba import new_counters, shared

PHASES = 400


@compiled()
def _add_all(part, before, after):  # pyright: ignore[reportMissingParameterType]
    """Wrong if a part of the phase before is not complete."""
    after[part] = before.sum() + np.uint64(part)


_share = shared(_add_all)


@compiled()
def _run(counters, a, b):  # pyright: ignore[reportMissingParameterType]
    phase = 0
    while phase < PHASES:
        phase = _share(counters, phase, len(a), (a, b))
        phase = _share(counters, phase, len(a), (b, a))


def expected(size: int) -> np.ndarray[Any, Any]:
    numbers = np.arange(size, dtype=np.uint64)
    values = numbers
    for _ in range(PHASES):
        values = values.sum() + numbers
    return values


@pytest.mark.parametrize("size", [1, 5, 64])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_phase_begins_when_every_part_of_the_one_before_is_complete(size: int, threads: int) -> None:
    values, others = np.arange(size, dtype=np.uint64), np.zeros(size, np.uint64)
    counters = new_counters(PHASES)
    helpers = [threading.Thread(target=_run, args=(counters, values, others)) for _ in range(threads - 1)]
    for helper in helpers:
        helper.start()
    _run(counters, values, others)
    assert np.array_equal(values, expected(size))
    for helper in helpers:
        helper.join()
    assert np.array_equal(values, expected(size))


def test_who_comes_when_all_is_done_changes_nothing() -> None:
    values, others = np.arange(7, dtype=np.uint64), np.zeros(7, np.uint64)
    counters = new_counters(PHASES)
    _run(counters, values, others)
    _run(counters, values, others)
    assert np.array_equal(values, expected(7))


def test_a_phase_without_parts_is_passed() -> None:
    nothing = np.zeros(1, np.uint64)
    assert _share(new_counters(1), 0, 0, (nothing, nothing)) == 1
