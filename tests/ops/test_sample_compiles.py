"""The kernels of sampling compile for Hopper and Blackwell: no spills, 16-byte loads of logits."""

from __future__ import annotations

import pytest

from common.ops.lookup.device_texts import MAX_PROPOSAL
from common.ops.sampling.board_layout import BOARD_WORDS, LINE_TOKENS, LINES, TAKEN_HEADER, TAKEN_WORDS
from common.ops.sampling.given_row_layout import CONSTANTS
from common.ops.sampling.open_row_inputs import HEADER, MAX_VERIFIED
from tests.ops.compiling import ARCHITECTURES, Builds, KernelCase, check, compile_cases

_PDL = ("griddepcontrol.wait", "griddepcontrol.launch_dependents")
_DRAW = {"temperature": "*fp32", "log_min_p": "*fp32", "seed": "*i64", "position": "*i64"}
_PARTS = {"peaks": "*fp32", "ids": "*i32", "chunks": "i32"}
_SHAPE = {"row_stride": "i32:16", "words": "i32", "vocab": "i32:16"}
_MASKED = {"rows": "*i32", "masks": "*i32"}
_FOUND = {"keys": "*i64", "tops": "*fp32", "totals": "*fp32"}
_UNMASKED = {"rows": None, "masks": None}


def _chunks(block: int, dtype: str, *, masked: bool = False) -> KernelCase:
    return KernelCase(
        f"{block}-{dtype}{'-masked' * masked}",
        "common.ops.sampling.sample_triton",
        "chunks_kernel",
        {"logits": f"*{dtype}", **_DRAW, **_PARTS, **_SHAPE, **(_MASKED if masked else {})},
        {"BLOCK": block, "COMPACT": False, "CHECKED": not masked, "PDL": not masked, **({} if masked else _UNMASKED)},
        num_warps=8 if block > 2048 else 4,
        expects=("ld.global.v4",) if masked else (*_PDL, "ld.global.v4"),
        max_registers=80,
    )


def _rows(block: int, chunks: int, dtype: str, *, masked: bool = False) -> KernelCase:
    return KernelCase(
        f"{block}-{chunks}-{dtype}{'-masked' * masked}",
        "common.ops.sampling.sample_triton",
        "rows_kernel",
        {
            "logits": f"*{dtype}",
            **_DRAW,
            **_PARTS,
            "out": "*i32",
            "results": "*i64",
            **_SHAPE,
            **(_MASKED if masked else {}),
        },
        {
            "BLOCK": block,
            "CHUNKS": chunks,
            "TOKENS": 512,
            "COMPACT": False,
            "CHECKED": not masked,
            "PDL": not masked,
            **({} if masked else _UNMASKED),
        },
        expects=() if masked else _PDL,
        max_registers=128,
    )


def _logprob_pieces(num_top: int, dtype: str) -> KernelCase:
    return KernelCase(
        f"{num_top}-{dtype}",
        "common.ops.sampling.logprobs_triton",
        "logprob_pieces_kernel",
        {"logits": f"*{dtype}", "asking": "*i32", **_FOUND, "row_stride": "i32:16", "vocab_size": "i32:16", "pieces": "i32"},
        {"PIECE": 4096, "NUM_TOP": num_top},
        num_warps=8,
        expects=("ld.global.v4",),
        max_registers=128,
    )


def _logprob_rows(num_top: int, keys: int, dtype: str) -> KernelCase:
    return KernelCase(
        f"{num_top}-{keys}-{dtype}",
        "common.ops.sampling.logprobs_triton",
        "logprob_rows_kernel",
        {
            "logits": f"*{dtype}",
            "tokens": "*i32",
            "asking": "*i32",
            **_FOUND,
            "chosen": "*fp32",
            "ids": "*i64",
            "found": "*fp32",
            "row_stride": "i32:16",
            "vocab_size": "i32:16",
            "pieces": "i32",
        },
        {"PIECES": 64, "KEYS": keys, "NUM_TOP": num_top},
        expects=(),
        max_registers=128,
    )


def _filtered(tile: int, warps: int, dtype: str, stride: str = "i32:16") -> KernelCase:
    return KernelCase(
        f"{tile}-{warps}-{dtype}-{stride}",
        "common.ops.sampling.filters_triton",
        "sample_rows_kernel",
        {
            "logits": f"*{dtype}",
            "rows": "*i32",
            "maxima": "*fp32",
            "lists": "*i32",
            "parts": "*i64",
            "groups": "i32",
            "tiles": "i32",
            **_DRAW,
            "top_k": "*i32",
            "top_p": "*fp64",
            "out": "*i64",
            "results": "*i64",
            "row_stride": stride,
            "vocab": stride,
        },
        {"COMPACT": False, "GROUPS": 512, "TILES": 64, "TILE": tile},
        num_warps=warps,
        enable_fp_fusion=False,
        expects=("ld.global.v4",) if stride == "i32:16" else (),
        max_registers=128,
    )


def _maxima(dtype: str) -> KernelCase:
    pointers = {"logits": f"*{dtype}", "rows": "*i32", "temperature": "*fp32", "maxima": "*fp32"}
    return KernelCase(
        dtype,
        "common.ops.sampling.groups_triton",
        "group_maxima_kernel",
        {**pointers, "row_stride": "i32:16", "vocab": "i32:16", "groups": "i32"},
        {"COMPACT": True, "TILE": 2048},
        expects=("ld.global.v4",),
        max_registers=64,
    )


def _masses(dtype: str) -> KernelCase:
    pointers = {"logits": f"*{dtype}", "rows": "*i32", "maxima": "*fp32", "parts": "*i64", "temperature": "*fp32"}
    filters = {"top_k": "*i32", "top_p": "*fp64", "log_min_p": "*fp32"}
    return KernelCase(
        dtype,
        "common.ops.sampling.nucleus_triton",
        "mass_parts_kernel",
        {**pointers, **filters, "row_stride": "i32:16", "vocab": "i32:16", "groups": "i32"},
        {"COMPACT": False, "GROUPS": 512, "TILE": 2048},
        enable_fp_fusion=False,
        expects=("ld.global.v4",),
        max_registers=128,
    )


_ADJUST = "common.ops.sampling.penalties_triton"


def _penalise(dtype: str, counted: bool) -> KernelCase:
    pointers = {"logits": f"*{dtype}", "rows": "*i32", "presence": "*fp32", "frequency": "*fp32", "repetition": "*fp32"}
    signature = {**pointers, "masks": "*i32", "mask_of": "*i32", "out": "*fp32"}
    signature |= {"row_stride": "i32:16", "words": "i32", "vocab": "i32:16"}
    return KernelCase(
        f"{dtype}-{counted}",
        _ADJUST,
        "penalise_kernel",
        signature | dict.fromkeys(("ids", "starts", "slots", *(("counts", "table") if counted else ())), "*i32"),
        {"COUNTED": counted, "BLOCK": 1024, **({} if counted else {"counts": None, "table": None})},
        enable_fp_fusion=False,
        expects=("ld.global.v4", "st.global.v4"),
        max_registers=96 if counted else 64,
    )


_COUNT = {
    "counts": "*i32",
    "targets": "*i32",
    "ids": "*i32",
    "starts": "*i32",
    "outputs": "*i32",
    "feeds": "*i32",
    "previous": "*i64",
}
_OPEN_ROWS = dict.fromkeys(("sampled", "tokens", "feeds", "positions", "draws", "slots"), "*i64")
_OPEN_ROWS |= dict.fromkeys(("words", "context_lens", "block_ids", "block_starts", "proposals", "num_proposed"), "*i32")
_OPEN_ROWS |= {"board": "*i32", "taken": "*i32", "slot_stride": "i32", "start_stride": "i32"}
_OPEN_ROW_SIZES = {"BLOCK_TOKENS": 16, "HEADER": HEADER, "BLOCK": MAX_VERIFIED, "PROPOSAL": MAX_PROPOSAL}
_OPEN_ROW_SIZES |= {"LINES": LINES, "LINE_TOKENS": LINE_TOKENS, "BOARD_WORDS": BOARD_WORDS}
_OPEN_ROW_SIZES |= {"TAKEN_HEADER": TAKEN_HEADER, "TAKEN_WORDS": TAKEN_WORDS}
_ADVANCE: dict[str, str] = dict.fromkeys(("feeds", "positions", "draws", "slots"), "*i64")
_ADVANCE |= dict.fromkeys(("context_lens", "block_ids", "block_starts"), "*i32")
_ADVANCE |= dict.fromkeys(("num_rows", "slot_stride", "start_stride"), "i32")
_WITH_GIVEN = {**_ADVANCE, "given": "*i64", "tokens": "*i64", "query_starts": "*i32", "capacity": "i32"}
del _WITH_GIVEN["num_rows"]
_EDIT = {"out": "*fp32", "edit_rows": "*i32", "edit_tokens": "*i32", "count": "i32", "vocab": "i32:16"}

CASES = [
    *(_penalise(dtype, counted) for dtype, counted in (("bf16", True), ("fp32", True), ("bf16", False))),
    KernelCase("", _ADJUST, "count_kernel", {**_COUNT, "vocab": "i32:16"}, {"BLOCK": 1024}, expects=("atom",)),
    *(
        KernelCase(
            f"{groups} groups",
            "common.ops.sampling.open_rows_triton",
            "settle_open_rows_kernel",
            _OPEN_ROWS,
            {"NUM_GROUPS": groups, **_OPEN_ROW_SIZES},
            num_warps=1,
            forbids=("atom", "griddepcontrol.wait"),
            max_registers=96,
        )
        for groups in (1, 2)
    ),
    KernelCase("add", _ADJUST, "edit_kernel", {**_EDIT, "edit_values": "*fp32"}, {"BLOCK": 256}, num_warps=2),
    KernelCase("set", _ADJUST, "edit_kernel", _EDIT, {"edit_values": None, "BLOCK": 256}, num_warps=2),
    *(_chunks(block, "bf16") for block in (1024, 2048, 4096)),
    _chunks(4096, "fp32"),
    *(_chunks(block, "bf16", masked=True) for block in (1024, 2048, 4096)),
    _rows(2048, 64, "bf16", masked=True),
    _rows(1024, 128, "bf16"),
    _rows(4096, 32, "bf16"),
    _rows(4096, 32, "fp32"),
    *(
        KernelCase(
            f"{groups} groups",
            "common.ops.sampling.advance_rows_triton",
            "advance_rows_kernel",
            _ADVANCE,
            {"NUM_GROUPS": groups, "BLOCK_TOKENS": 16, "BLOCK": 64},
            num_warps=1,
            forbids=("atom", "griddepcontrol.wait"),
            max_registers=64,
        )
        for groups in (1, 2)
    ),
    *(
        KernelCase(
            f"{groups} groups",
            "common.ops.sampling.given_rows_triton",
            "advance_with_given_kernel",
            _WITH_GIVEN,
            {"NUM_GROUPS": groups, "BLOCK_TOKENS": 16, **CONSTANTS},
            num_warps=4,
            expects=("bar",),
            forbids=("atom", "griddepcontrol.wait"),
            max_registers=128,
        )
        for groups in (1, 2)
    ),
    *(_logprob_pieces(num_top, dtype) for num_top in (0, 8, 20) for dtype in ("bf16", "fp32")),
    *(_logprob_rows(num_top, keys, "fp32") for num_top, keys in ((0, 1), (8, 256), (20, 1024))),
    _maxima("bf16"),
    _maxima("fp32"),
    _masses("bf16"),
    _masses("fp32"),
    _filtered(2048, 8, "bf16"),
    _filtered(2048, 8, "fp32"),
    _filtered(2048, 8, "bf16", "i32"),
    _filtered(4096, 16, "bf16"),
]


@pytest.fixture(scope="module")
def builds() -> Builds:
    return compile_cases(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiles(case: KernelCase, arch: int, builds: Builds) -> None:
    check(case, arch, builds)
