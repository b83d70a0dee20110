"""How the linears of experts lie in memory (`packed_weight.py`), as sizes alone. Torch-free."""

from __future__ import annotations

from typing import Literal

GroupedFormat = Literal["plain", "fp8", "mxfp4", "int4"]

MIN_RUN = 32
SCALE_BLOCK = 128
_RUNS = (128, 64, MIN_RUN)
_WORD_BYTES = 4
"""Of a word of scales, and of an output's factor."""


def int4_run(group: int, k: int) -> int:
    """Return the columns of one half of a byte, for `k` columns in groups of `group`."""
    return next((run for run in _RUNS if group % run == 0 and k % (2 * run) == 0), MIN_RUN)


def fp8_bytes(n: int, k: int, *, in_blocks: bool) -> int:
    """Return the bytes of an FP8 weight [n, k] and its scales. in_blocks: whether these are of 128 × 128 blocks."""
    return n * k + _WORD_BYTES * (-(-n // SCALE_BLOCK) * -(-k // SCALE_BLOCK) if in_blocks else n)


def mxfp4_bytes(n: int, k: int) -> int:
    """Return the bytes of one expert's linear [n, k] in MXFP4."""
    return n * (-(-k // (2 * MIN_RUN)) * MIN_RUN + _WORD_BYTES * (-(-k // (4 * MIN_RUN)) + 1))


def int4_bytes(n: int, k: int, group: int, *, offsets: bool) -> int:
    """Return the bytes of one expert's linear [n, k] in INT4, in groups of `group` columns, with offsets or none."""
    run = int4_run(group, k)
    steps = -(-k // (2 * run))
    return n * (steps * run + _WORD_BYTES * (steps * (2 if offsets else 1) + 1))
