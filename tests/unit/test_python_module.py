"""Processes that others start run this code, whatever is in the working directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from common.runtime.python_module import CODE, python_module


def test_files_of_the_working_directory_are_not_taken_for_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("common", "services", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)
    assert subprocess.run(python_module("common.runtime.python_module", []), timeout=30, check=False).returncode == 0


def test_a_checkout_that_is_not_installed_runs_from_its_own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(CODE)
    assert "-P" not in python_module("services.decode", [])
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert "-P" in python_module("services.decode", [])


def test_a_working_directory_that_is_gone_is_a_line(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    program = 'import os; os.rmdir(os.getcwd()); import sys; sys.argv = ["penstock", "pull", "x"]; import common.cli.__main__'
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path / "gone", capture_output=True, text=True, timeout=60, check=False
    )
    assert (
        ended.returncode == 1 and ended.stderr == "error config_error: the working directory is gone: change to another one\n"
    )
