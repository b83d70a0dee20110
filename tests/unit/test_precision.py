"""What `auto` means on which device, and which settings contradict each other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.engine.load import precision
from common.engine.load.precision import Precision, resolve_precision
from common.engine.load.runners import EngineConfig, resolve_device
from common.protocol.errors import ConfigError


def test_auto_on_a_gpu_is_bfloat16_and_the_files_own_weights() -> None:
    assert resolve_precision("auto", "auto", "auto", "cuda") == Precision("bfloat16", "none", "bfloat16")
    assert resolve_precision("auto", "auto", "auto", "cuda", checkpoint="fp8") == Precision("bfloat16", "fp8", "bfloat16")
    assert resolve_precision("auto", "none", "auto", "cuda", checkpoint="fp8").weights == "none"


def test_a_gpu_takes_fp8_for_weights_and_kv_apart() -> None:
    assert resolve_precision("float16", "fp8", "auto", "cuda") == Precision("float16", "fp8", "float16")
    assert resolve_precision("auto", "none", "fp8", "cuda") == Precision("bfloat16", "none", "fp8")
    assert resolve_precision("auto", "none", "fp8", "cuda").kv_bytes == 1
    assert resolve_precision("float32", "none", "float32", "cuda").kv_bytes == 4


def test_names_tell_fp8_keys_that_are_mixed_from_those_of_versions_that_did_not() -> None:
    assert Precision("bfloat16", "fp8", "fp8").name == "bfloat16/fp8/fp8-mixed"
    assert Precision("bfloat16", "fp8", "bfloat16").name == "bfloat16/fp8/bfloat16"


def test_fp8_files_are_dequantised_on_a_cpu() -> None:
    assert resolve_precision("float32", "none", "auto", "cpu", checkpoint="fp8") == Precision("float32", "none", "float32")


def test_auto_on_a_cpu_is_8_bit_weights() -> None:
    assert resolve_precision("auto", "auto", "auto", "cpu") == Precision("float32", "int8", "bfloat16")
    assert resolve_precision("float32", "int8", "auto", "cpu") == Precision("float32", "int8", "bfloat16")
    assert resolve_precision("float32", "auto", "auto", "cpu") == Precision("float32", "none", "float32")
    assert resolve_precision("bfloat16", "auto", "auto", "cpu") == Precision("bfloat16", "none", "bfloat16")


@pytest.mark.parametrize(("flag", "compute"), [("avx512_bf16", "bfloat16"), ("avx512f", "float32")])
def test_without_8_bit_kernels_auto_on_a_cpu_is_bfloat16_where_the_cpu_computes_with_it(
    flag: str, compute: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: fpu sse2 {flag}\nbugs\t\t:\n")
    monkeypatch.setattr(precision, "_CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(precision, "has_int8", lambda: False)
    precision.cpu_has_bfloat16.cache_clear()
    try:
        assert resolve_precision("auto", "auto", "auto", "cpu") == Precision(compute, "none", compute)
        assert resolve_precision("float32", "auto", "auto", "cpu") == Precision("float32", "none", "float32")
    finally:
        precision.cpu_has_bfloat16.cache_clear()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("float16", "auto", "auto", "cpu"), "float16 is not supported on a CPU"),
        (("auto", "fp8", "auto", "cpu"), "fp8 needs a GPU"),
        (("bfloat16", "int8", "auto", "cpu"), "int8 goes with dtype float32 or auto"),
        (("auto", "auto", "fp8", "cpu"), "kv_cache_dtype fp8 needs a GPU"),
        (("auto", "int8", "auto", "cuda"), "int8 is for CPUs"),
        (("auto", "none", "float16", "cuda"), "float16 does not go with bfloat16"),
        (("float32", "none", "bfloat16", "cpu"), "bfloat16 does not go with float32"),
    ],
)
def test_what_a_device_has_not_is_named(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_precision(*settings)


def test_every_precision_has_a_name_of_its_own() -> None:
    found = {
        resolve_precision("bfloat16", "none", "auto", "cuda").name,
        resolve_precision("bfloat16", "fp8", "auto", "cuda").name,
        resolve_precision("bfloat16", "none", "fp8", "cuda").name,
        resolve_precision("float32", "none", "auto", "cpu").name,
    }
    assert len(found) == 4


def test_a_simulated_engine_runs_on_the_cpu_whatever_the_device() -> None:
    assert resolve_device(EngineConfig(engine="simulated", device="cuda:3")) == "cpu"


def test_precision_is_known_without_torch() -> None:
    program = "import sys, common.engine.settings, common.engine.load.precision; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
