"""The kernel of prompts compiled for Hopper, and what its machine code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.ops.compiling import Builds, KernelCase, check, compile_cases, disassembled

SIGNATURE = {
    "output": "*bf16",
    "tiles": "*i32",
    "sinks": "*fp32",
    "num_items": "i32",
    "window": "i32",
    "scale": "fp32",
    "stride": "i32:16",
}


def case(name: str, head_dim: int, *, windowed: bool = False, sinks: bool = False) -> KernelCase:
    blocks = {"query": f"block<bf16[64, {head_dim}]>"} | dict.fromkeys(("key", "value"), f"block<bf16[128, {head_dim}]>")
    constants = {"HEADS": 32, "GROUP": 4, "WINDOWED": windowed, "SINKS": sinks, "N": 128, "D": head_dim, "STAGES": 2}
    return KernelCase(
        name,
        "common.ops.attention.prompt_gluon",
        "prompt_kernel",
        {**blocks, **SIGNATURE},
        constants,
        architectures=(90,),
        max_registers=168,  # of a thread as it starts; the warp groups share them out anew
        expects_90=("wgmma",),
        forbids=("mma.sync",),
    )


CASES = [case("128", 128), case("64-sinks", 64, sinks=True), case("64-window-sinks", 64, windowed=True, sinks=True)]


@pytest.fixture(scope="module")
def machine_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cubins")


@pytest.fixture(scope="module")
def builds(machine_code: Path) -> Builds:
    return compile_cases(CASES, machine_code)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiles(case: KernelCase, builds: Builds) -> None:
    check(case, 90, builds)


def test_softmax_runs_while_weights_are_multiplied(builds: Builds, machine_code: Path) -> None:
    """Between the wait for a tile's scores and the wait for the product before stand the tile's exponentials. The assembler
    moves them behind the second wait, if nothing ends the block of instructions there."""
    assert builds
    text = disassembled(machine_code / "prompt_kernel-128-sm90.cubin")
    between = re.findall(r"DEPBAR\.LE gsb0, 0x1(.*?)DEPBAR\.LE gsb0, 0x0", text, re.DOTALL)
    # the masked and the unmasked loop of either warp group
    assert len(between) == 4
    assert all(part.count("MUFU.EX2") >= 64 for part in between)
