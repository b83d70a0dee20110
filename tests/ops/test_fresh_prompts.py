"""A prompt with nothing before it, through torch's attention, is padded to one of few lengths: with its neighbours or zeros."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from common.ops.attention.configs import planned_length
from common.ops.attention.parts import attend_part_reference
from common.ops.attention.prefill import attend_run
from common.ops.attention.settings import AttentionSettings
from common.ops.attention.work import FreshRun

LENGTH = 37
SETTINGS = AttentionSettings(long_prompt_min=32)


@pytest.mark.parametrize("behind", [0, 1, 2, 3, 40])
def test_a_padded_prompt_is_attended_as_alone(behind: int) -> None:
    assert planned_length(LENGTH) - LENGTH == 3
    torch.manual_seed(behind)
    query, key, value = (torch.randn(5 + LENGTH + behind, heads, 16) for heads in (4, 2, 2))
    own = slice(5, 5 + LENGTH)
    expected = attend_part_reference(query[own], key[own], value[own], 0.25, causal=True)[0]
    found = attend_run(query, key, value, FreshRun(5, 1, LENGTH), SETTINGS, 0.25)
    torch.testing.assert_close(found, expected)
