"""Huge pages are a wish: memory keeps its contents, and a machine without them is no error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.ops.cpu_int8 import huge_pages_cpu
from common.ops.cpu_int8.huge_pages_cpu import use_huge_pages


def test_memory_keeps_its_contents() -> None:
    held = [torch.randn(3_000_001), torch.randn(700_000)]
    before = [each.clone() for each in held]
    assert use_huge_pages() >= 0
    assert all(torch.equal(a, b) for a, b in zip(held, before, strict=True))


def test_time_is_limited() -> None:
    held = torch.ones(30_000_000)
    assert use_huge_pages(limit_s=0.0) >= 0
    assert held.sum() == 30_000_000


def test_a_machine_without_a_map_of_memory_has_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huge_pages_cpu, "_MAPS", tmp_path / "missing")
    assert use_huge_pages() == 0
