"""Where a demo keeps its KV blocks."""

from __future__ import annotations

import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest

from common.cli import demo


def test_a_container_with_little_shared_memory_has_the_demo_in_its_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = Mock(free=8 << 30)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: free)
        assert demo._shared_memory(tmp_path) == tmp_path
        free.free = 64 << 20
        assert demo._shared_memory(tmp_path) is None
    assert demo._shared_memory(tmp_path / "missing") is None
