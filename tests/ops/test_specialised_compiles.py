"""The warp-specialised kernel for gate and up, compiled for Hopper."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from common.ops.linear.specialised import GROUP, STAGES
from tests.ops.compiling import Builds, KernelCase, check, compile_cases

SPILLED_BYTES = 256
"""Where there is a bias, once a tile."""
SIZES = ("rows", "size", "num_items", "row_tiles", "n_tiles", "steps")


def case(name: str, m: int, n: int, *, bias: bool = False, activation: str = "silu") -> KernelCase:
    signature = {"x": "block<bf16[64, 64]>", "weight": f"block<bf16[{n // 2}, 64]>", "out": "*bf16"}
    signature |= dict.fromkeys(SIZES, "i32") | {"size": "i32:16"}
    constants: dict[str, int | float | bool | str | None] = {"CONSUMERS": m // 64, "WIDTH": n // 2, "BK": 64}
    constants |= {"STAGES": STAGES[m, n], "GROUP": GROUP, "ACTIVATION": activation, "PDL": True}
    if bias:
        signature["bias"] = "*bf16"
    else:
        constants["bias"] = None
    return KernelCase(
        name,
        "common.ops.linear.specialised_gluon",
        "specialised_kernel",
        signature,
        constants,
        architectures=(90,),
        max_registers=128 if m == 192 else 168,  # of a thread as it starts; the warps share them out anew
        stack_bytes=SPILLED_BYTES if bias else 0,
        expects=("wgmma", "cp.async.bulk", "st.global.v4", "griddepcontrol.wait", "griddepcontrol.launch_dependents"),
        forbids=("mma.sync", "atom"),
    )


CASES = [
    case("bf16", 192, 256),
    case("bf16-bias", 192, 256, bias=True),
    case("bf16-gelu", 192, 256, activation="gelu_tanh"),
    case("bf16-lower", 128, 256),
]


@pytest.fixture(scope="module")
def builds() -> Builds:
    return compile_cases(CASES)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiles(case: KernelCase, builds: Builds) -> None:
    check(case, 90, builds)
    assert not builds[str(case), 90].early_writes
