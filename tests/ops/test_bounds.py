"""Kernels keep to their tensors: see `bounds`."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")


def ended(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "tests.ops.bounds", *arguments], capture_output=True, text=True, timeout=120)


def test_kernels_touch_nothing_outside_their_tensors() -> None:
    done = ended()
    assert done.returncode == 0, done.stderr


def test_what_is_outside_is_guarded() -> None:
    assert ended("outside").returncode == -signal.SIGSEGV
