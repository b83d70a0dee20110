"""The kernel for few rows of weights in groups, compiled for Hopper and Blackwell."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.ops.compiling import ARCHITECTURES, Builds, KernelCase, check, compile_cases

SIZES = ("rows", "steps", "steps_each")


def case(
    name: str,
    *,
    run: int = 128,
    code: int = 0,
    offsets: bool = False,
    gated: bool = False,
    parts: int = 1,
    warps: int = 4,
    stages: int = 2,
    byte_rows: int = 0,
    tiles: int = 1,
) -> KernelCase:
    signature = {"x": "*bf16", "weight": "*u8", "scales": "*i32", "channel": "*fp32", "N": "i32:16", "K": "i32:16"}
    signature |= dict.fromkeys(SIZES, "i32") | {"out": "*bf16" if gated else "*fp32"}
    constants: dict[str, int | float | bool | str | None] = {
        "RUN": run,
        "CODE": code,
        "GATED": gated,
        "WARPS": warps,
        "PARTS": parts,
    }
    held = 16 if byte_rows else 0
    shared = f".shared .align 16 .b8 penstock_x[{max(16, byte_rows * held * (run * 4 + 16))}]; mov.u32 $0, penstock_x;"
    constants |= {"TILES": tiles, "ROWS": byte_rows, "HELD": held, "SHARED": shared}
    constants |= {"STAGES": stages, "EARLY": gated, "PDL": True, "bias": None}
    if offsets:
        signature["offsets"] = "*i32"
    else:
        constants["offsets"] = None
    return KernelCase(
        name,
        "common.ops.linear.streaming_gluon",
        "streaming_kernel",
        signature,
        constants,
        num_warps=warps,
        maxnreg=128,
        stack_bytes=16,  # addresses
        expects=("mma.sync", "ld.global.v4", "griddepcontrol.wait"),
        forbids=("wgmma", "cp.async", "cp.async.bulk"),
    )


CASES = [
    case("awq-gated", offsets=True, gated=True, stages=1),
    case("awq-split", offsets=True, stages=1),
    case("awq-parts", offsets=True, parts=4, stages=1),
    case("int4-128", parts=2, stages=1),
    case("int4-64", run=64, stages=3, parts=8, warps=8),
    case("awq-gated-bytes", offsets=True, gated=True, byte_rows=1),
    case("awq-parts-bytes-of-4-rows", offsets=True, parts=4, byte_rows=4),
    case("int4-64-bytes-of-2-rows", run=64, stages=3, parts=8, warps=8, byte_rows=2),
    case("awq-gated-16-rows", offsets=True, gated=True, stages=1, tiles=2),
    case("awq-parts-16-rows", offsets=True, parts=4, stages=1, tiles=2),
    case("int4-64-16-rows", run=64, stages=2, parts=8, warps=8, tiles=2),
    case("nf4-64-16-rows", run=64, code=2, stages=2, tiles=2),
    case("nf4-64", run=64, code=2, stages=3),
    case("fp4-64-gated", run=64, code=1, gated=True, stages=3),
]


@pytest.fixture(scope="module")
def builds() -> Builds:
    return compile_cases(CASES)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiles(case: KernelCase, arch: int, builds: Builds) -> None:
    check(case, arch, builds)
