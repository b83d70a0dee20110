"""The linears' kernels compile for Hopper and Blackwell as they are chosen: wgmma or tcgen05, 16-byte copies, no spills."""

from __future__ import annotations

import re

import pytest

from common.ops.linear.candidates import (
    MIN_RUN,
    ROW_BUCKETS,
    Candidate,
    Op,
    Scaling,
    Shape,
    candidates,
    grouped_shared_bytes,
    invariant_candidate,
)
from tests.ops.compiling import ARCHITECTURES, SHARED_LIMIT_BYTES, Builds, KernelCase, check, compile_cases

_PDL = ("griddepcontrol.wait", "griddepcontrol.launch_dependents")
_NUM_SMS = 132
_INTEGERS = ("rows", "N", "K", "scale_columns", "tiles_per_split", "splits", "n_tiles")
_FORMATS: tuple[tuple[int, Scaling], ...] = ((2, "none"), (1, "channel"), (1, "blocks"))
_SCALES: dict[Scaling, int] = {"none": 0, "channel": 1, "blocks": 2}


def kernel_case(shape: Shape, chosen: Candidate, *, whole: bool = False) -> KernelCase:
    """The kernel that `chosen` launches for a weight of this shape, with bf16 activations or quantised ones."""
    item = {4: "fp32", 2: "bf16", 1: "fp8e4nv"}[shape.item_bytes]
    model = "fp32" if item == "fp32" else "bf16"
    gated = shape.op == "gated"
    data = "fp8e4nv" if chosen.quantised else model
    out = "fp32" if (chosen.splits > 1 and not whole) or shape.op == "wide" else model
    aligned = shape.k * shape.item_bytes % 16 == 0
    signature = dict.fromkeys(_INTEGERS, "i32") | {"out": f"*{out}"}
    signature |= {"N": "i32:16" if shape.n % 16 == 0 else "i32", "K": "i32:16" if shape.k % 16 == 0 else "i32"}
    constants: dict[str, int | float | bool | str | None] = {
        "bias": None,
        "BLOCK_N": chosen.block_n,
        "BLOCK_M": chosen.block_m,
        "BLOCK_K": chosen.block_k,
        "GATED": gated,
        "W_SCALE": _SCALES[shape.scaling],
        "PDL": True,
    }
    scales = {"w_scale": shape.scaling != "none", "x_scale": chosen.quantised}
    signature |= {name: "*fp32" for name, used in scales.items() if used}
    constants |= {name: None for name, used in scales.items() if not used}
    ahead = {"EVEN_K": shape.k % chosen.block_k == 0, "LINES": chosen.ahead == "lines"}
    prefetched = aligned and chosen.ahead != "none"
    expects: tuple[str, ...] = ("cp.async",) if aligned else ()
    converts = item == "fp8e4nv" and not chosen.quantised
    tall = chosen.kind == "persistent" or (chosen.kind == "dot" and chosen.block_m >= 16 and chosen.block_n >= 64)
    stages, dots = chosen.stages, tall and item != "fp32" and not converts
    if chosen.kind == "dot" and converts:
        expects = (*expects, "mma.sync")
    if chosen.kind == "dot":
        module, kernel, unused = "linear.dot_triton", "dot_kernel", ("n_tiles",)
        signature |= {"x": f"*{data}", "weight": f"*{item}"}
        constants |= ahead | {"PREFETCH": stages - 1 if prefetched else 0, "WHOLE": whole}
        constants |= {"EXACT": chosen.quantised and chosen.block_m <= 64}
    elif chosen.kind == "gemv":
        module, kernel, unused = "linear.gemv_triton", "gemv_kernel", ("scale_columns", "tiles_per_split", "splits")
        signature |= {"x": f"*{data}", "weight": f"*{item}"}
        constants |= ahead | {"PREFETCH": 2 if prefetched else 0, "STAGES": stages}
        constants.pop("x_scale")
        stages = 3
    else:
        module, kernel, unused = "linear.gemm_triton", "gemm_kernel", ("n_tiles", "tiles_per_split", "splits")
        width = chosen.block_n // (2 if gated else 1)
        signature |= {"x_box": f"tensordesc<{data}[{chosen.block_m},{chosen.block_k}]>"}
        signature |= {"w_box": f"tensordesc<{item}[{width},{chosen.block_k}]>"}
        constants |= {"GROUP": 8, "FLAT": chosen.flat}
        expects = ("cp.async.bulk",)
    for name in unused:
        signature.pop(name)
    said = (
        shape.op,
        shape.n,
        shape.k,
        item,
        shape.scaling,
        data,
        chosen.block_n,
        chosen.block_m,
        chosen.block_k,
        chosen.stages,
    )
    flags = [
        name
        for name, used in (
            ("whole", whole),
            ("partial", out != model and shape.op != "wide"),
            ("flat", chosen.flat),
            (chosen.ahead, chosen.ahead != "bulk"),
        )
        if used
    ]
    return KernelCase(
        "-".join(map(str, (*said, f"w{chosen.warps}", *flags))),
        f"common.ops.{module}",
        kernel,
        signature,
        constants,
        num_warps=chosen.warps,
        num_stages=stages,
        expects=(*_PDL, *expects),
        expects_90=("wgmma",) if dots else (),
        expects_100=("tcgen05",) if dots else (),
    )


def all_cases(shapes: list[tuple[Op, int, int]], rows: tuple[int, ...]) -> list[KernelCase]:
    """Every distinct kernel that may be chosen for these weights."""
    found: dict[tuple[object, ...], KernelCase] = {}
    for op, n, k in shapes:
        for item_bytes, scaling in _FORMATS:
            shape = Shape(op, n, k, item_bytes, scaling)
            for size in rows:
                for quantised in (False, True) if item_bytes == 1 else (False,):
                    for candidate in candidates(shape, size, quantised, _NUM_SMS):
                        if candidate.kind != "library":
                            case = kernel_case(shape, candidate)
                            code = (
                                case.kernel,
                                *case.signature.items(),
                                *case.constants.items(),
                                case.num_warps,
                                case.num_stages,
                            )
                            found.setdefault(code, case)
    return list(found.values())


def _first(op: Op, n: int, k: int, item_bytes: int, scaling: Scaling, rows: int, kind: str, quantised: bool) -> KernelCase:
    shape = Shape(op, n, k, item_bytes, scaling)
    found = [candidate for candidate in candidates(shape, rows, quantised, _NUM_SMS) if candidate.kind == kind]
    return kernel_case(shape, found[0])


CASES = [
    _first("split", 4096, 4096, 2, "none", 1, "dot", False),
    _first("split", 6144, 4096, 2, "none", 1, "gemv", False),
    _first("gated", 28672, 4096, 2, "none", 16, "dot", False),
    _first("gated", 3072, 576, 2, "none", 16, "dot", False),
    _first("split", 4096, 14336, 2, "none", 64, "dot", False),
    _first("gated", 28672, 4096, 2, "none", 256, "dot", False),
    _first("gated", 28672, 4096, 2, "none", 256, "persistent", False),
    _first("split", 4096, 14336, 1, "channel", 1, "gemv", False),
    _first("split", 4096, 14336, 1, "channel", 16, "dot", False),
    _first("gated", 28672, 4096, 1, "channel", 16, "dot", True),
    _first("gated", 28672, 4096, 1, "blocks", 64, "dot", True),
    _first("linear", 6144, 4096, 1, "blocks", 256, "persistent", True),
    _first("linear", 6144, 4096, 1, "channel", 1024, "persistent", True),
    _first("wide", 128256, 4096, 2, "none", 1, "gemv", False),
    _first("wide", 128256, 4096, 2, "none", 32, "dot", False),
    _first("wide", 128256, 4096, 2, "none", 256, "dot", False),
    _first("wide", 128256, 4096, 1, "channel", 16, "dot", False),
    _first("wide", 128256, 4096, 1, "channel", 256, "dot", True),
    _first("wide", 128256, 4096, 1, "channel", 256, "persistent", True),
    *(
        kernel_case(shape, invariant_candidate(shape, _NUM_SMS), whole=True)
        for shape in (
            Shape("split", 4096, 14336, 2, "none"),
            Shape("split", 4096, 14336, 1, "channel"),
            Shape("split", 4096, 4096, 4, "none"),
        )
    ),
]


def _grouped(n: int, k: int, code: int, group: int, rows: int, index: int, *, gated: bool, offsets: bool) -> KernelCase:
    """A candidate for a weight in groups; code: see `grouped_triton.CODES`."""
    shape = _shape_in_groups(n, k, code, group, gated=gated, offsets=offsets)
    return _grouped_case(shape, code, candidates(shape, rows, False, _NUM_SMS)[index], f"{rows}-{index}")


def _shape_in_groups(
    n: int, k: int, code: int, group: int, *, gated: bool = False, offsets: bool, activation_bytes: int = 2
) -> Shape:
    return Shape("gated" if gated else "split", n, k, 1, "channel", group, 8 if code == 3 else 4, offsets, activation_bytes)


def _grouped_case(shape: Shape, code: int, chosen: Candidate, name: str) -> KernelCase:
    group, gated, model = shape.group, shape.op == "gated", "fp32" if shape.activation_bytes == 4 else "bf16"
    signature = dict.fromkeys(("rows", "steps", "steps_per_split"), "i32") | {"N": "i32:16", "K": "i32:16", "x": f"*{model}"}
    signature |= {"weight": "*i8" if code == 3 else "*u8", "scales": "*i32", "channel": "*fp32"}
    signature["out"] = "*fp32" if chosen.splits > 1 else f"*{model}"
    constants: dict[str, int | float | bool | str | None] = {"bias": None, "table": None, "GROUP": group}
    constants |= {"RUN": max(32, group), "BLOCK_N": chosen.block_n, "BLOCK_M": chosen.block_m, "CODE": code, "GATED": gated}
    constants |= {
        "LANES": min(chosen.lanes or max(32, group), max(32, group)),
        "EVEN_K": True,
        "SCALED": chosen.scaled or group < 32,
        "STAGES": chosen.stages,
        "FAST": True,
        "AHEAD": 0 if chosen.block_m > 32 else 16 if group <= 32 else 4,
        "PDL": True,
    }
    if shape.offsets:
        signature["offsets"] = "*i32"
    else:
        constants["offsets"] = None
    tall = chosen.block_m > 32
    return KernelCase(
        f"{shape.op}-{shape.n}-{shape.k}-{code}-{group}{'+' if shape.offsets else ''}-{model}-{name}",
        "common.ops.linear.grouped_triton",
        "grouped_kernel",
        signature,
        constants,
        num_warps=chosen.warps,
        expects=(*_PDL, "cp.async") if tall else (*_PDL, "cp.async", "cp.async.bulk"),
        expects_90=("wgmma",) if tall else ("mma.sync",),
        expects_100=() if tall else ("mma.sync",),
    )


CASES += [
    _grouped(4096, 4096, 0, 128, 1, 0, gated=False, offsets=True),
    _grouped(28672, 4096, 0, 128, 1, 0, gated=True, offsets=False),
    _grouped(28672, 4096, 1, 16, 8, 0, gated=True, offsets=False),
    _grouped(4096, 14336, 2, 64, 16, 0, gated=False, offsets=False),
    _grouped(28672, 4096, 3, 128, 1, 0, gated=True, offsets=False),
    _grouped(28672, 4096, 0, 128, 128, 0, gated=True, offsets=False),
    _grouped(28672, 4096, 0, 128, 16, 0, gated=True, offsets=True),
    _grouped(28672, 4096, 0, 128, 128, 0, gated=True, offsets=True),
    _grouped(28672, 4096, 0, 128, 4096, 0, gated=True, offsets=True),
    _grouped(4096, 14336, 0, 32, 4096, 0, gated=False, offsets=False),
]


SHARED: dict[str, tuple[Shape, int, int]] = {
    # code, rows; "one group a row" is stored as groups of 128
    "GPTQ with one group a row": (_shape_in_groups(4096, 4096, 0, 128, offsets=True), 0, 256),
    "GPTQ with one group a row, float32": (_shape_in_groups(4096, 4096, 0, 128, offsets=True, activation_bytes=4), 0, 64),
    "INT8": (_shape_in_groups(4096, 4096, 3, 128, offsets=False), 3, 256),
    "INT8, float32": (_shape_in_groups(4096, 4096, 3, 128, offsets=False, activation_bytes=4), 3, 64),
    "INT8, float32, a row": (_shape_in_groups(4096, 4096, 3, 128, offsets=False, activation_bytes=4), 3, 1),
    "NVFP4": (_shape_in_groups(4096, 4096, 1, 16, offsets=False), 1, 16),
}
"""Weights in groups whose tiles are the largest, and rows."""


def _largest(shape: Shape, rows: int) -> Candidate:
    """The candidate that asks for most shared memory."""
    found = [candidate for candidate in candidates(shape, rows, False, _NUM_SMS) if candidate.kind == "grouped"]
    return max(found, key=lambda candidate: grouped_shared_bytes(shape, candidate))


SHARED_CASES = {
    name: _grouped_case(shape, code, _largest(shape, rows), f"shared-{rows}") for name, (shape, code, rows) in SHARED.items()
}


def _small(
    kernel: str,
    module: str,
    signature: dict[str, str],
    constants: dict[str, int | float | bool | str | None],
    num_warps: int = 8,
) -> KernelCase:
    name = "-".join(f"{value}" for value in (*signature.values(), *constants.values()) if value is not None)
    return KernelCase(
        re.sub(r"[*:]", "", name),
        f"common.ops.{module}",
        kernel,
        signature,
        {**constants, "PDL": True},
        num_warps=num_warps,
        expects=(*_PDL, "ld.global.v4"),
        max_registers=128,
    )


_GATE = {"gate_up": "*bf16", "size": "i32:16"}
_SCALED = {"x_scale": "*fp32", "w_scale": "*fp32", "bias": "*bf16"}
CASES += [
    _small(
        "quantise_rows_kernel",
        "quant.quantise_triton",
        {"x": "*bf16", "data": "*fp8e4nv", "scale": "*fp32", "size": "i32:16"},
        {"BLOCK": block, "WHOLE": whole},
        num_warps,
    )
    for block, whole, num_warps in ((4096, True, 8), (16384, True, 32), (16384, False, 32))
]
CASES += [
    _small(
        "silu_mul_kernel",
        "linear.gate_up_triton",
        {**_GATE, **_SCALED, "out": "*fp8e4nv", "out_scale": "*fp32"},
        {"BLOCK": block, "QUANTISE": True, "WHOLE": block == 16384, "GELU": False},
        num_warps,
    )
    for block, num_warps in ((2048, 8), (16384, 32))
]
CASES += [
    _small(
        "silu_mul_kernel",
        "linear.gate_up_triton",
        {**_GATE, "out": "*bf16"},
        {**dict.fromkeys((*_SCALED, "out_scale")), "BLOCK": 2048, "QUANTISE": False, "WHOLE": False, "GELU": False},
    ),
    _small(
        "rescale_kernel", "linear.gate_up_triton", {"y": "*bf16", **_SCALED, "out": "*bf16", "N": "i32:16"}, {"BLOCK": 2048}
    ),
    _small(
        "sum_kernel",
        "linear.parts_triton",
        {"partials": "*fp32", "out": "*bf16", "rows": "i32", "N": "i32:16", "splits": "i32"},
        {"BLOCK": 1024},
    ),
]


@pytest.fixture(scope="module")
def builds() -> Builds:
    return compile_cases(CASES)


@pytest.fixture(scope="module")
def shared_builds() -> Builds:
    return compile_cases(list(SHARED_CASES.values()))


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARED_CASES)
def test_shared_memory_of_weights_in_groups_is_foreseen(name: str, shared_builds: Builds) -> None:
    shape, _, rows = SHARED[name]
    foreseen = grouped_shared_bytes(shape, _largest(shape, rows))
    hopper, blackwell = (shared_builds[str(SHARED_CASES[name]), arch] for arch in ARCHITECTURES)
    assert not (hopper.error or blackwell.error)
    assert foreseen - 5120 <= hopper.shared_bytes <= foreseen <= SHARED_LIMIT_BYTES
    assert blackwell.shared_bytes <= foreseen


@pytest.mark.parametrize("activation_bytes", [2, 4])
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize(("code", "group"), [(0, 128), (3, 128), (2, 64), (0, 32), (3, 32), (1, 16), (3, 16)])
def test_no_candidate_for_weights_in_groups_asks_for_more_than_there_is(
    code: int, group: int, offsets: bool, activation_bytes: int
) -> None:
    if offsets and group < MIN_RUN:
        pytest.skip("which is never packed")
    shape = _shape_in_groups(4096, 14336, code, group, offsets=offsets, activation_bytes=activation_bytes)
    for rows in ROW_BUCKETS:
        found = candidates(shape, rows, False, _NUM_SMS)
        assert len(set(found)) == len(found) > 0
        assert (rows > 128) == (found[-1].kind == "library")
        for candidate in found:
            if candidate.kind == "grouped":
                assert candidate.stages >= 2
                assert grouped_shared_bytes(shape, candidate) <= SHARED_LIMIT_BYTES, candidate
    assert grouped_shared_bytes(shape, invariant_candidate(shape, _NUM_SMS)) <= SHARED_LIMIT_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiles(case: KernelCase, arch: int, builds: Builds) -> None:
    check(case, arch, builds)
