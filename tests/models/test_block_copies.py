"""A step begins with copies of blocks: what goes on in a copy is what goes on in the block itself."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from common.cache.block_table import BlockTable
from common.engine.plan import BlockCopy, Runner, StepPlan, StepRow
from common.models.source import ModelFiles
from common.protocol.errors import InvalidParameter
from tests.models.driver import GREEDY, open_runner
from tests.models.oracles import oracle_prompt
from tests.models.test_device_runner import device_runner

OPENED = {
    "torch": open_runner,
    "int8": partial(open_runner, quantization="int8"),
    "device": device_runner,
}
PROMPT = oracle_prompt(seed=5, length=21)
"""Its last five tokens are in the second block."""


def row(tokens: list[int], start: int, blocks: list[int]) -> StepRow:
    return StepRow(tokens, start, BlockTable(blocks), 1, GREEDY, len(PROMPT))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", OPENED)
def test_a_copied_block_is_gone_on_with_in_the_same_step(kind: str, llama: tuple[Any, ModelFiles]) -> None:
    runner: Runner = OPENED[kind](llama[1])
    runner.execute(StepPlan(1, [row(PROMPT, 0, [3, 4])]))
    (plain,) = runner.execute(StepPlan(2, [row([7], len(PROMPT), [3, 4])])).rows
    (whole,) = runner.execute(StepPlan(3, [row([*PROMPT, 9], 0, [10, 11])])).rows
    rows = [row([7], len(PROMPT), [3, 4]), row([9], len(PROMPT), [3, 6])]
    beside = runner.execute(StepPlan(4, rows, [BlockCopy(0, 4, 6)])).rows
    assert [one.tokens for one in beside] == [plain.tokens, whole.tokens]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "copy", [*(pytest.param(copy, marks=pytest.mark.slow) for copy in [(1, 4, 6), (-1, 4, 6), (0, -1, 6)]), (0, 4, 1 << 20)]
)
@pytest.mark.parametrize("kind", OPENED)
def test_a_copy_of_what_is_not_there_is_refused_before_anything_is_written(
    kind: str, copy: tuple[int, int, int], llama: tuple[Any, ModelFiles]
) -> None:
    runner: Any = OPENED[kind](llama[1])
    runner.execute(StepPlan(1, [row(PROMPT, 0, [3, 4])]))
    before = runner.groups[0].pool[[3, 4, 6]].view(-1).tolist()
    with pytest.raises(InvalidParameter, match="no block can be copied"):
        runner.execute(StepPlan(2, [row([9], len(PROMPT), [3, 6])], [BlockCopy(*copy)]))
    assert str(runner.groups[0].pool[[3, 4, 6]].view(-1).tolist()) == str(before)  # NaN among them
