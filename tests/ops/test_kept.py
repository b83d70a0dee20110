"""Compiled kernels and measurements are kept in a folder. Where there is none, or it can't be written, they are made again."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.ops.kept import CACHE_VARIABLE, cache_directory, not_kept, write_atomically
from common.ops.tuning import exclusive


def test_a_user_without_a_home_keeps_them_in_penstock_home(
    homeless: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "set PENSTOCK_KERNEL_CACHE to a folder of yours" in not_kept()
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "kernels" and not not_kept()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "other"))
    assert cache_directory() == tmp_path / "other"


def test_a_folder_that_cannot_be_written_is_said_and_costs_only_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file" / "kernels"))
    assert not_kept().startswith(f"{tmp_path}/file/kernels can't be written (not a directory)")
    entered = False
    with exclusive("test"):
        entered = True
    write_atomically(cache_directory() / "test.json", b"{}")
    assert entered and [path.name for path in tmp_path.iterdir()] == ["file"]
