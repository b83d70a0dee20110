"""The kernels of a mixture of experts compile for Hopper and Blackwell, without spills and in the shared memory there is."""

from __future__ import annotations

import pytest

from common.ops.moe.experts_triton import Tiles, default_tiles
from tests.ops.compiling import ARCHITECTURES, Builds, KernelCase, check, compile_cases

pytestmark = pytest.mark.slow
_MODULE = "common.ops.moe.experts_triton"
_EXPERTS = 128
_VALUES = {"plain": "*bf16", "fp8": "*fp8e4nv", "mxfp4": "*u8", "int4": "*u8"}
_SCALES = {"plain": None, "fp8": "*fp32", "mxfp4": "*u8", "int4": "*bf16"}


def grouped(kind: str, tiles: Tiles, *, gated: bool) -> KernelCase:
    given = {"x": "*bf16", "values": _VALUES[kind], "scale": _SCALES[kind], "offsets": "*i32", "order": "*i32"}
    given |= {"factors": "*fp32", "out": "*bf16" if gated else "*fp32", "K": "i32:16", "WIDTH": "i32:16"}
    given |= {"alpha": "fp32", "limit": "fp32", "bias": "*bf16" if kind == "mxfp4" else None}
    signature = {name: value for name, value in given.items() if value is not None}
    constants: dict[str, int | float | bool | str | None] = {name: None for name, value in given.items() if value is None}
    constants |= {"zeros": None, "EXPERTS": _EXPERTS, "EXPERTS_BLOCK": 128, "TOP_K": 4, "GATED": gated, "WEIGH": not gated}
    constants |= {"ACTIVATION": "clamped_swiglu" if kind == "mxfp4" else "silu", "FORMAT": kind}
    constants |= {"GROUP": 128 if kind == "int4" else 32}
    constants |= {"BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k}
    name = f"{kind}-{tiles.block_m}-{'gated' if gated else 'down'}"
    return KernelCase(name, _MODULE, "grouped_kernel", signature, constants, tiles.num_warps, tiles.num_stages)


CASES = [
    *(
        grouped(kind, default_tiles(rows * 4, _EXPERTS), gated=gated)
        for kind in _VALUES
        for rows in (1, 1024, 8192)
        for gated in (True, False)
    ),
    KernelCase(
        "128",
        _MODULE,
        "sort_kernel",
        {"ids": "*i32", "offsets": "*i32", "order": "*i32", "pairs": "i32"},
        {"EXPERTS": _EXPERTS, "BLOCK": 4096},
        forbids=("atom",),
    ),
    KernelCase(
        "4",
        _MODULE,
        "combine_kernel",
        {"answers": "*fp32", "out": "*bf16", "WIDTH": "i32:16"},
        {"TOP_K": 4, "BLOCK": 1024},
        forbids=("atom",),
    ),
    KernelCase(
        "softmax_selected",
        "common.ops.moe.route_triton",
        "route_kernel",
        {"logits": "*fp32", "ids": "*i32", "weights": "*fp32", "factor": "fp32"},
        {
            "bias": None,
            "EXPERTS": _EXPERTS,
            "BLOCK": 128,
            "TOP_K": 4,
            "TOP_K_BLOCK": 4,
            "SCORING": "softmax_selected",
            "RENORMALISE": False,
        },
        num_warps=1,
    ),
]


@pytest.fixture(scope="module")
def builds() -> Builds:
    return compile_cases(CASES)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiles(case: KernelCase, arch: int, builds: Builds) -> None:
    check(case, arch, builds)
