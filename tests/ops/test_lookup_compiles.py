"""The kernel of lookup on a device compiles for Hopper and Blackwell without spills."""

from __future__ import annotations

import pytest

from common.ops.lookup.device_texts import (
    BLOCK,
    CANDIDATES,
    MAX_MATCH,
    MAX_PROPOSAL,
    MIN_MATCH,
    REPORT_HEADER,
    REPORT_WORDS,
    ROW_HEADER,
)
from tests.ops.compiling import ARCHITECTURES, Builds, KernelCase, check, compile_cases

_MODULE = "common.ops.lookup.follow_triton"
_TEXTS: dict[str, str] = dict.fromkeys(("words", "tokens", "links", "heads", "lengths", "lags"), "*i32")
_STEP: dict[str, str] = dict.fromkeys(("sampled", "step_tokens", "positions"), "*i64")
_SEARCH: dict[str, int | float | bool | str | None] = {
    "CANDIDATES": CANDIDATES,
    "MIN_MATCH": MIN_MATCH,
    "MAX_MATCH": MAX_MATCH,
    "PROPOSAL": MAX_PROPOSAL,
    "REPORT": REPORT_HEADER,
    "WORDS": REPORT_WORDS,
}

CASES = [
    KernelCase(
        str(capacity),
        _MODULE,
        "follow_rows_kernel",
        {**_TEXTS, **_STEP, "proposals": "*i32", "num_proposed": "*i32", "report": "*i32"},
        {"CAPACITY": capacity, "HEADER": ROW_HEADER, "BLOCK": BLOCK, "CLEAR": 1024, **_SEARCH},
        forbids=("atom", "griddepcontrol.wait"),
        max_registers=96,
    )
    for capacity in (1024, 32768)
]


@pytest.fixture(scope="module")
def builds() -> Builds:
    return compile_cases(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiles(case: KernelCase, arch: int, builds: Builds) -> None:
    check(case, arch, builds)
