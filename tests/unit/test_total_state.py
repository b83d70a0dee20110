"""Hidden states are added up exactly, in memory that does not grow with the prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.engine.plan import FIXED_POINT
from common.engine.reading import LARGEST_STATE, total_state


class LargestResult(TorchDispatchMode):
    """Notes the elements of the largest tensor that an operation allocates."""

    def __init__(self, given: torch.Tensor) -> None:
        super().__init__()
        self.largest = 0
        self._given = given.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() != self._given:
            self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize("positions", [1, 255, 256, 257, 4096])
def test_a_sum_is_exact_and_takes_little_memory(positions: int) -> None:
    states = torch.randn(positions, 8, generator=torch.Generator().manual_seed(positions)).to(torch.bfloat16)
    with LargestResult(states) as seen:
        total = total_state(states)
    assert total.tolist() == [sum(round(value / FIXED_POINT) for value in column) for column in states.double().T.tolist()]
    assert seen.largest <= 256 * 8


def test_numbers_that_are_none_count_as_zero_and_large_ones_are_bounded() -> None:
    states = torch.tensor([[float("nan"), float("inf"), -1e30], [1.0, 0.0, 0.0]])
    assert (total_state(states) * FIXED_POINT).tolist() == [1.0, LARGEST_STATE, -LARGEST_STATE]
