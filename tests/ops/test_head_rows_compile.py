"""The kernels around a head's passes compile for Hopper and Blackwell without spills."""

from __future__ import annotations

import pytest

from common.ops.drafting.head_inputs import RING_TOKENS, ROW_HEADER
from common.ops.sampling.board_layout import BOARD_WORDS, LINE_TOKENS, LINES
from tests.ops.compiling import ARCHITECTURES, Builds, KernelCase, check, compile_cases

_MODULE = "common.ops.drafting.head_rows_triton"
_BOARD: dict[str, int | float | bool | str | None] = {
    "RING": RING_TOKENS,
    "LINES": LINES,
    "LINE_TOKENS": LINE_TOKENS,
    "BOARD_WORDS": BOARD_WORDS,
}
_WIDE = (
    "tokens",
    "positions",
    "sampled",
    "seed",
    "nexts",
    "places",
    "slots",
    "selected",
    "row_places",
    "row_slots",
    "row_seed",
)
_NARROW = (
    "words",
    "context_lens",
    "block_starts",
    "row_lens",
    "row_starts",
    "contexts",
    "lengths",
    "board",
    "top_k",
    "row_top_k",
)
_FLOATS = ("temperature", "log_min_p", "row_temperature", "row_min_p")

CASES = [
    KernelCase(
        "prepare",
        _MODULE,
        "prepare_rows_kernel",
        {
            **dict.fromkeys((*_WIDE, "row_position"), "*i64"),
            **dict.fromkeys(_NARROW, "*i32"),
            **dict.fromkeys(_FLOATS, "*fp32"),
            **dict.fromkeys(("top_p", "row_top_p"), "*fp64"),
            **dict.fromkeys(("num_lens", "table_blocks"), "i32"),
        },
        {"HEADER": ROW_HEADER, "BLOCK": 64, **_BOARD},
        forbids=("atom", "griddepcontrol.wait"),
        max_registers=96,
    ),
    KernelCase(
        "advance",
        _MODULE,
        "advance_drafts_kernel",
        {
            **dict.fromkeys(("drafted", "tokens", "places", "slots", "position"), "*i64"),
            **dict.fromkeys(("context_lens", "contexts", "lengths", "board"), "*i32"),
        },
        _BOARD,
        forbids=("atom", "griddepcontrol.wait"),
        max_registers=64,
    ),
]


@pytest.fixture(scope="module")
def builds() -> Builds:
    return compile_cases(CASES)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiles(case: KernelCase, arch: int, builds: Builds) -> None:
    check(case, arch, builds)
