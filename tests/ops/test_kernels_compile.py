"""The small kernels compile for Hopper and Blackwell: 16-byte accesses, no spills, programmatic dependent launch."""

from __future__ import annotations

import pytest

from tests.ops.compiling import ARCHITECTURES, Builds, KernelCase, check, compile_cases

_PDL = ("griddepcontrol.wait", "griddepcontrol.launch_dependents")
_WIDE = ("ld.global.v4", "st.global.v4")


def _add_rms_norm(size: int, splits: int, dtype: str = "bf16", quantise: bool = False) -> KernelCase:
    block = 1 << (size - 1).bit_length()
    partial = dtype if splits <= 1 else "fp32"
    signature = {
        "residual": f"*{dtype}",
        "weight": f"*{dtype}",
        "output": "*fp8e4nv" if quantise else f"*{dtype}",
        "eps": "fp32",
    }
    if splits:
        signature |= {"delta": f"*{partial}", "split_stride": "i32:16", "row_stride": "i32:16"}
    if quantise:
        signature |= {"scale": "*fp32"}
    absent = {name: None for name in ("delta", "scale") if name not in signature}
    absent |= {} if splits else {"split_stride": 0, "row_stride": 0}
    return KernelCase(
        f"{size}-{splits}-{dtype}{'-fp8' if quantise else ''}",
        "common.ops.add_rms_norm_triton",
        "add_rms_norm_kernel",
        signature,
        {**absent, "SIZE": size, "BLOCK": block, "SPLITS": splits, "QUANTISE": quantise, "PDL": True},
        num_warps=min(16, max(1, block // 256)),
        expects=(*_PDL, "ld.global.v4") if quantise else (*_PDL, *_WIDE),
        max_registers=128,
    )


CASES = [
    *(_add_rms_norm(size, 4) for size in (576, 2048, 4096, 5120, 8192)),
    _add_rms_norm(4096, 0),
    _add_rms_norm(4096, 1),
    _add_rms_norm(4096, 16),
    _add_rms_norm(4096, 4, "fp16"),
    _add_rms_norm(4096, 4, quantise=True),
    _add_rms_norm(5120, 1, quantise=True),
]


@pytest.fixture(scope="module")
def builds() -> Builds:
    return compile_cases(CASES)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiles(case: KernelCase, arch: int, builds: Builds) -> None:
    check(case, arch, builds)
