"""The benchmark of prompts' attention computes what it times."""

from __future__ import annotations

import pytest
import torch

from bench.engine import prompt_attention
from common.ops import backend
from tests.fixtures.slow import some_slow


@pytest.fixture(autouse=True)
def few_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the benchmark, whose kernels the interpreter runs head by head."""
    monkeypatch.setattr(prompt_attention, "HEADS", 8)
    monkeypatch.setattr(prompt_attention, "KV_HEADS", 2)


@pytest.mark.parametrize("lengths", some_slow([[48, 48], [20], [5, 70, 33]], quick=[[20], [5, 70, 33]]))
def test_our_ways_agree_with_the_reference_and_what_is_not_there_says_so(lengths: list[int]) -> None:
    torch.manual_seed(3)
    with backend.interpreted():
        prompts = prompt_attention.Prompts.of(lengths, torch.device("cpu"))
        found = prompt_attention.compare(prompts, ["reference", "hopper", "libraries", "kernel", "cudnn"], turns=1, hold_s=0.0)
    assert all("(" in found[way] for way in ("reference", "hopper", "libraries", "kernel"))
    assert "Error" in found["cudnn"]


def test_a_way_that_gives_something_else_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(prompt_attention.WAYS, "wrong", lambda prompts: lambda: prompts.query * 0.5)
    with backend.interpreted():
        prompts = prompt_attention.Prompts.of([9], torch.device("cpu"))
        assert prompt_attention.compare(prompts, ["reference", "wrong"], 1, 0.0)["wrong"].startswith("off by")
