"""The kernels of a mixture of experts compile for Hopper and Blackwell, without spills and in the shared memory there is."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from common.ops.moe.candidates import ExpertCandidate, ExpertShape, candidates, invariant_candidate
from tests.ops.compiling import ARCHITECTURES, Builds, KernelCase, check, compile_cases

_EPILOGUE_SPILLS = 192
"""Bytes that the second linear may spill: once, among the addresses of its stores, not in its loop."""
_ENTRY_SPILLS = 16
"""Bytes that the first may: some of its parameters, for Blackwell."""
_BLACKWELL_SPILLS = 400
"""Bytes that two accumulators may spill for Blackwell; for Hopper none of them does."""
_VALUES = {"plain": "*bf16", "fp8": "*fp8e4nv", "fp8_blocks": "*fp8e4nv", "mxfp4": "*u8", "int4": "*u8"}
_SCALES = {"fp8_blocks": "*fp32", "mxfp4": "*i32", "int4": "*i32"}
SHAPES = {
    "gpt-oss": ExpertShape(128, 2880, 2880, 4, "mxfp4", 32),
    "qwen3": ExpertShape(128, 2048, 768, 8, "plain"),
    "qwen3-fp8": ExpertShape(128, 2048, 768, 8, "fp8_blocks"),
    "qwen3-channels": ExpertShape(128, 2048, 768, 8, "fp8"),
    "qwen3-int4": ExpertShape(128, 2048, 768, 8, "int4", 128),
}


def product(name: str, shape: ExpertShape, chosen: ExpertCandidate, *, gated: bool) -> KernelCase:
    k = shape.hidden if gated else shape.intermediate
    columns = chosen.block_k or (128 if shape.values == "mxfp4" else 2 * shape.run)
    given: dict[str, str | None] = {"x": "*fp8e4nv" if chosen.quantised else "*bf16", "values": _VALUES[shape.values]}
    given |= {"x_scale": "*fp32" if chosen.quantised else None, "scale": _SCALES.get(shape.values), "offset": None}
    given |= {"channel": "*fp32" if shape.values in ("fp8", "mxfp4", "int4") else None}
    given |= {"bias": "*bf16" if shape.values == "mxfp4" else None, "ids": "*i32" if chosen.direct else None}
    given |= {"tiles": None if chosen.direct else "*i32", "order": None if chosen.direct else "*i32", "factors": "*fp32"}
    given |= {
        "out": "*bf16" if gated or chosen.rounded else "*fp32",
        "N": "i32:16",
        "K": "i32:16",
        "alpha": "fp32",
        "limit": "fp32",
    }
    given |= dict.fromkeys(("rows", "pairs", "slots", "steps", "words", "words_per_split"), "i32")
    signature = {name: value for name, value in given.items() if value is not None}
    constants: dict[str, Any] = {name: None for name, value in given.items() if value is None}
    constants |= {"TOP_K": shape.top_k, "PAIRS": 64 if chosen.direct else 0, "DIRECT": chosen.direct, "GATED": gated}
    constants |= {"WEIGH": not gated, "ACTIVATION": "clamped_swiglu" if shape.values == "mxfp4" else "silu"}
    constants |= {"FORMAT": "fp8" if shape.values == "fp8_blocks" else shape.values, "RUN": shape.run}
    constants |= {"BLOCK_N": chosen.block_n, "BLOCK_M": chosen.block_m, "BLOCK_K": chosen.block_k, "SCALED": chosen.scaled}
    constants |= {
        "EVEN_K": k % columns == 0,
        "NEIGHBOURS": chosen.neighbours,
        "HALVINGS": chosen.halvings,
        "STAGES": chosen.stages,
        "AHEAD": not gated,
    }
    constants |= {"FAST": True, "PDL": True}
    title = f"{name}-{chosen.block_n}x{chosen.block_m}x{chosen.block_k}-{chosen.stages}-{chosen.warps}-{chosen.neighbours}"
    title += f"-{chosen.halvings}{'-direct' * chosen.direct}{'-quantised' * chosen.quantised}{'-gated' if gated else '-down'}"
    return KernelCase(
        title,
        "common.ops.moe.grouped_triton",
        "experts_kernel",
        signature,
        constants,
        chosen.warps,
        3,
        expects=("griddepcontrol.wait", "griddepcontrol.launch_dependents"),
        forbids=("atom",),
        stack_bytes=_ENTRY_SPILLS if gated else _EPILOGUE_SPILLS,
    )


def _products(name: str, *buckets: int) -> list[KernelCase]:
    """Return the default and the last candidate of a shape for numbers of rows."""
    shape = SHAPES[name]
    found = [
        [one for one in candidates(shape, rows, sms) if not one.library and not one.halves]
        for rows in buckets
        for sms in (132, 148)
    ]
    chosen = [options[-(index % 2)] for index, options in enumerate(found)]
    cases = [product(name, shape, candidate, gated=gated) for candidate in chosen for gated in (True, False)]
    return list({str(case): case for case in cases}.values())


def _halves(shape: ExpertShape, chosen: ExpertCandidate, *, gated: bool) -> KernelCase:
    pointers = {"x": "*fp8e4nv", "x_scale": "*fp32", "values": "*fp8e4nv", "scale": "*fp32", "tiles": "*i32", "order": "*i32"}
    pointers |= {
        "factors": "*fp32",
        "out": "*bf16",
        "rows": "i32",
        "N": "i32:16",
        "K": "i32:16",
        "alpha": "fp32",
        "limit": "fp32",
    }
    constants: dict[str, Any] = {"bias": None, "TOP_K": shape.top_k, "GATED": gated, "WEIGH": not gated, "ACTIVATION": "silu"}
    constants |= {"BLOCK_N": chosen.block_n, "BLOCK_M": chosen.block_m, "HALVINGS": chosen.halvings}
    constants |= {"EVEN_K": True, "STAGES": chosen.stages, "PDL": True}
    title = f"{chosen.block_n}x{chosen.block_m}-{chosen.warps}-{chosen.halvings}{'-gated' if gated else '-down'}"
    module = "common.ops.moe.halves_triton"
    return KernelCase(
        title,
        module,
        "halves_kernel",
        pointers,
        constants,
        chosen.warps,
        expects_90=("wgmma",),
        forbids=("atom",),
        stack_bytes=_BLACKWELL_SPILLS,
    )


OTHERS = [
    KernelCase(
        "128",
        "common.ops.moe.sort_triton",
        "sort_kernel",
        {"ids": "*i32", "order": "*i32", "tiles": "*i32", "places": "*i32", "pairs": "i32"},
        {"EXPERTS": 128, "BLOCK": 8192, "BLOCK_M": 128, "PDL": True},
        num_warps=16,
        forbids=("atom",),
    ),
    KernelCase(
        "2048",
        "common.ops.moe.sorted_triton",
        "scatter_kernel",
        {"x": "*bf16", "places": "*i32", "out": "*bf16", "K": "i32:16"},
        {"TOP_K": 8, "BLOCK": 2048, "PDL": True},
    ),
    KernelCase(
        "768",
        "common.ops.moe.sorted_triton",
        "activate_kernel",
        {"products": "*bf16", "bias": "*bf16", "order": "*i32", "ids": "*i32", "factors": "*fp32", "out": "*bf16"}
        | {"N": "i32:16", "alpha": "fp32", "limit": "fp32"},
        {"WEIGH": False, "ACTIVATION": "silu", "BLOCK": 1024, "PDL": True},
    ),
    KernelCase(
        "2048",
        "common.ops.moe.sorted_triton",
        "return_kernel",
        {
            "answers": "*bf16",
            "bias": "*bf16",
            "places": "*i32",
            "ids": "*i32",
            "factors": "*fp32",
            "out": "*bf16",
            "N": "i32:16",
        },
        {"TOP_K": 8, "WEIGH": True, "BLOCK": 1024, "PDL": True},
        forbids=("atom",),
    ),
    KernelCase(
        "4",
        "common.ops.moe.combine_triton",
        "combine_kernel",
        {"answers": "*fp32", "out": "*bf16", "rows": "i32", "N": "i32:16"},
        {"PARTS": 8, "BLOCK": 1024, "PDL": True},
        forbids=("atom",),
    ),
    KernelCase(
        "2048",
        "common.ops.moe.quantise_triton",
        "quantise_blocks_kernel",
        {"x": "*bf16", "data": "*fp8e4nv", "scale": "*fp32", "K": "i32:16"},
        {"BLOCKS": 8, "PDL": True},
        num_warps=2,
    ),
    KernelCase(
        "softmax_selected",
        "common.ops.moe.route_triton",
        "route_kernel",
        {"logits": "*fp32", "ids": "*i32", "weights": "*fp32", "factor": "fp32", "split_size": "i32"},
        {
            "bias": None,
            "SPLITS": 4,
            "EXPERTS": 128,
            "BLOCK": 128,
            "TOP_K": 4,
            "TOP_K_BLOCK": 4,
            "SCORING": "softmax_selected",
            "RENORMALISE": False,
            "PDL": True,
        },
        num_warps=1,
    ),
]
QUICK = [case for case in _products("gpt-oss", 1) if case.num_warps == 2]
GROUPS = {name: [case for case in _products(name, 1, 64, 4096) if case not in QUICK] for name in SHAPES}
GROUPS["others"] = OTHERS
GROUPS["halves"] = [
    _halves(SHAPES["qwen3-fp8"], chosen, gated=gated)
    for chosen in candidates(SHAPES["qwen3-fp8"], 4096, 132)
    if chosen.halves
    for gated in (True, False)
]
GROUPS["halved"] = [
    product("gpt-oss", SHAPES["gpt-oss"], chosen, gated=gated)
    for chosen in candidates(SHAPES["gpt-oss"], 8192, 132)
    if chosen.halvings == 2 and chosen.neighbours == 1
    for gated in (True, False)
]
for gated in (True, False):
    GROUPS["others"].append(product("invariant", SHAPES["gpt-oss"], invariant_candidate(SHAPES["gpt-oss"]), gated=gated))
CASES = [*QUICK, *(case for cases in GROUPS.values() for case in cases)]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quick")


@pytest.fixture(scope="module")
def quick(kept: Path) -> Builds:
    return compile_cases(QUICK, kept)


@cache
def builds_of(group: str) -> Builds:
    return compile_cases(GROUPS[group])


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("case", QUICK, ids=str)
def test_kernels_for_one_token_compile(case: KernelCase, arch: int, quick: Builds) -> None:
    check(case, arch, quick)
    assert quick[str(case), arch].instructions["mma.sync"], "unpacked weights are an operand in registers"


@pytest.mark.parametrize("case", [case for case in QUICK if case.constants["GATED"]], ids=str)
def test_the_second_linear_starts_after_the_routing_is_complete(case: KernelCase, quick: Builds, kept: Path) -> None:
    """It reads the routing before its own wait, so the first linear lets it start only after having waited."""
    for arch in ARCHITECTURES:
        assert not quick[str(case), arch].error
        ptx = (kept / f"{case}-sm{arch}.ptx").read_text()
        assert ptx.count("griddepcontrol.wait") == 1
        assert ptx.index("griddepcontrol.wait") < ptx.index("griddepcontrol.launch_dependents")


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("group", "case"), [(group, case) for group, cases in GROUPS.items() for case in cases], ids=str)
def test_compiles(group: str, case: KernelCase, arch: int) -> None:
    check(case, arch, builds_of(group))
