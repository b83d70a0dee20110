"""Bits that must not depend on the batch do not on older CPUs either: libraries are held to those CPUs' instruction sets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = [
    *(f"tests/ops/test_{name}.py" for name in ("dense", "linear_bfloat16", "paged_attention", "int8")),
    "tests/models/test_runner.py",
]

# What oneDNN, torch and Numba call the same: a CPU that has the flag can act as one that has nothing beyond it.
SETS = {
    "AVX-512 without bfloat16": ("avx512f", "AVX512_CORE", "avx512", "skylake-avx512", "+avx512f"),
    "AVX2": ("avx2", "AVX2", "avx2", "haswell", "+avx2"),
    "SSE4.1": ("sse4_1", "SSE41", "default", "nehalem", "+sse4.1"),
}


@pytest.mark.parametrize("name", ["AVX2", *(pytest.param(name, marks=pytest.mark.slow) for name in SETS if name != "AVX2")])
def test_a_row_has_the_same_bits_in_every_batch(name: str, tmp_path: Path) -> None:
    flag, onednn, aten, numba, features = SETS[name]
    info = Path("/proc/cpuinfo")
    if not info.exists() or flag not in info.read_text().split():
        pytest.skip(f"this CPU has no {flag}")
    environment = {
        "ONEDNN_MAX_CPU_ISA": onednn,
        "ATEN_CPU_CAPABILITY": aten,
        "NUMBA_CPU_NAME": numba,
        "NUMBA_CPU_FEATURES": features,
        "PENSTOCK_KERNEL_CACHE": str(tmp_path),
    }
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", "same_bits", *TESTS]
    ran = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=170)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]
    assert " passed" in ran.stdout and "failed" not in ran.stdout
