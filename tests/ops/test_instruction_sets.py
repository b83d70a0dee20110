"""Bits that must not depend on the batch do not on older CPUs either: libraries are held to those CPUs' instruction sets."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = [
    *(f"tests/ops/test_{name}.py" for name in ("dense", "paged_attention", "int8")),
    "tests/models/test_runner.py",
]

# What oneDNN, torch and Numba call the same: a CPU that has the flag can act as one that has nothing beyond it.
SETS = {
    "AVX-512 without bfloat16": ("avx512f", "AVX512_CORE", "avx512", "skylake-avx512", "+avx512f,+fma"),
    "AVX2": ("avx2", "AVX2", "avx2", "haswell", "+avx2,+fma"),
    "SSE4.1": ("sse4_1", "SSE41", "default", "nehalem", "+sse4.1"),
}
SUMS = """
import hashlib
import torch
from common.ops.linear.linear import linear
from common.ops.linear.weight import pack_linear

torch.manual_seed(0)
digest = hashlib.sha256()
for dtype in (torch.float32, torch.bfloat16):
    weight = pack_linear(torch.randn(300, 700).to(dtype), torch.randn(300).to(dtype))
    digest.update(linear(torch.randn(37, 700).to(dtype), weight).float().numpy().tobytes())
print(digest.hexdigest())
"""


def run(name: str, command: list[str], cache: Path) -> subprocess.CompletedProcess[str]:
    """Run Python as on a CPU with the instruction set `name`; "" is this CPU."""
    environment = os.environ | {"PENSTOCK_KERNEL_CACHE": str(cache)}
    if name:
        flag, onednn, aten, numba, features = SETS[name]
        info = Path("/proc/cpuinfo")
        if not info.exists() or flag not in info.read_text().split():
            pytest.skip(f"this CPU has no {flag}")
        environment |= {
            "ONEDNN_MAX_CPU_ISA": onednn,
            "ATEN_CPU_CAPABILITY": aten,
            "NUMBA_CPU_NAME": numba,
            "NUMBA_CPU_FEATURES": features,
        }
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=170)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SETS))
def test_a_row_has_the_same_bits_in_every_batch(name: str, tmp_path: Path) -> None:
    ran = run(name, ["-m", "pytest", "-p", "no:cacheprovider", "-k", "same_bits", *TESTS], tmp_path)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]
    assert " passed" in ran.stdout and "failed" not in ran.stdout


def test_sums_of_linears_are_the_same_on_every_cpu_that_fuses_multiply_and_add(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as threads:
        here, there = threads.map(lambda name: run(name, ["-c", SUMS], tmp_path / (name or "here")), ("", "AVX2"))
    assert here.returncode == there.returncode == 0, here.stderr + there.stderr
    assert here.stdout == there.stdout
