"""The kernel that unpacks in warps of its own, compiled for Hopper, with the constants that its calls give it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from common.ops.linear.unpacking import Codes, Gate, kernel_constants
from tests.ops.compiling import Builds, KernelCase, check, compile_cases, disassembled

SIZES = ("rows", "num_items", "code_steps", "words", "splits", "steps", "chunks_per_split")
SPILLED_BYTES = 64
"""Where results are float32, once a tile."""


def codes(run: int, *, code: int = 0, offsets: bool = False, exponents: bool = False) -> Codes:
    nothing = torch.empty(1, dtype=torch.int32)
    return Codes(nothing, nothing, nothing if offsets else None, None, None, code, exponents, run, 128)


def case(
    name: str,
    weight: Codes,
    rows: int,
    *,
    gate: Gate | None = None,
    experts: bool = False,
    weighed: bool = False,
    wide: bool = False,
) -> KernelCase:
    signature = {"x": f"block<bf16[{rows}, 64]>", "codes": "*i32", "scales": "*i32", "channel": "*fp32", "N": "i32:16"}
    signature |= dict.fromkeys(SIZES, "i32") | {"alpha": "fp32", "limit": "fp32", "out": "*fp32" if wide else "*bf16"}
    dtype = torch.float32 if wide else torch.bfloat16
    constants = kernel_constants(weight, dtype, rows, gate) | {"PDL": True}
    optional = {
        "offsets": ("*i32", weight.offsets is not None),
        "bias": ("*bf16", experts),
        "tiles": ("*i32", experts),
        "order": ("*i32", weighed),
        "factors": ("*fp32", weighed),
    }
    for parameter, (kind, is_given) in optional.items():
        if is_given:
            signature[parameter] = kind
        else:
            constants[parameter] = None
    return KernelCase(
        name,
        "common.ops.linear.unpacking_gluon",
        "unpacking_kernel",
        signature,
        constants,
        architectures=(90,),
        max_registers=168 if rows == 256 else 128,  # of a thread as it starts; the warp groups share them out anew
        stack_bytes=SPILLED_BYTES if wide else 0,
        expects_90=("wgmma", "cp.async", "cp.async.bulk", "griddepcontrol.wait"),
        forbids=("mma.sync",),
    )


MXFP4 = codes(32, code=1, exponents=True)
CLAMPED = Gate("clamped_swiglu", 1.702, 7.0)
CASES = [
    case("mxfp4-experts-256", MXFP4, 256, gate=CLAMPED, experts=True),
    case("mxfp4-experts-128-down", MXFP4, 128, experts=True),
    case("int4-experts-64-weighed", codes(64), 64, gate=Gate("gelu_tanh"), experts=True, weighed=True),
    case("awq-256-gated", codes(128, offsets=True), 256, gate=Gate()),
    case("awq-256-splits", codes(128, offsets=True), 256, wide=True),
    case("awq-128-splits", codes(128, offsets=True), 128, wide=True),
    case("int4-32-64-splits", codes(32, offsets=True), 64, wide=True),
    case("nf4-128", codes(64, code=2), 128),
    case("fp4-32-256", codes(32, code=1), 256),
]


@pytest.fixture(scope="module")
def machine_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cubins")


@pytest.fixture(scope="module")
def builds(machine_code: Path) -> Builds:
    return compile_cases(CASES, machine_code)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiles(case: KernelCase, builds: Builds) -> None:
    check(case, 90, builds)


def test_weights_go_to_shared_memory_sixteen_bytes_at_a_time(builds: Builds, machine_code: Path) -> None:
    """Numbers of 8 and 16 bits would be taken apart and joined again, byte by byte, which takes longer than to unpack them."""
    assert builds
    text = disassembled(machine_code / "unpacking_kernel-mxfp4-experts-256-sm90.cubin")
    unpacked = [part for part in text.split("UTMALDG") if "HMUL2.BF16" in part or "STS.128" in part]
    assert sum(part.count("STS.128") for part in unpacked) >= 16  # of two steps, eight each
    assert not re.findall(r"\bSTS\.(?:U8|U16|S8|S16)\b", text)
    assert text.count("PRMT") < 150  # 64 unpack two steps
