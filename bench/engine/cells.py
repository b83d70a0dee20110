"""What is measured, and what comes out: cells of rows × prompt length × output length, one JSON line per result. Pure.

    256x512x256     256 requests of 512 prompt tokens, 256 tokens out: decode tok/s = 256 · 255 / (b - a), where b is the time
                    of the whole run and a that of the same run with one token out
    16x4096         16 prompts of 4,096 tokens, one token out: prefill tok/s = 16 · 4096 / a
    64x~1024x128    prompts between 1/4 and 7/4 of 1,024 tokens: a ragged batch

The same method as for the peer (`bench/peer/vllm_cells.py`): requests are given all at once, token ids in and out, greedy,
prompts of random tokens; each time is the least of a few.
"""

from __future__ import annotations

import random
import re
from typing import Any

import msgspec

from bench.common.lengths import Lengths
from bench.common.stats import Percentiles

_CELL = re.compile(r"(?P<rows>\d+)x(?P<ragged>~?)(?P<prompt>\d+)(x(?P<out>\d+))?")

PRESETS = {
    "decode": "1x128x256 8x512x256 32x512x256 128x512x256 256x512x256 512x512x128",
    "prefill": "1x2048 1x8192 16x4096",
    "long": "1x8192x64 1x32768x64 1x65536x64 8x32768x64 32x8192x64 1x65536",
    "ragged": "16x~2048x128 64x~1024x128 256x~512x128 32x~2048",
    "quick": "1x128x128 8x512x128 64x512x128 256x512x64 1x2048 1x8192",
    "cpu": "1x32x16 4x48x16 4x~32x8 1x128",
}


class Cell(msgspec.Struct, frozen=True):
    """`out` 1: a prefill cell."""

    rows: int
    prompt: int
    out: int = 1
    ragged: bool = False

    @classmethod
    def parse(cls, text: str) -> Cell:
        """:raises ValueError: for anything but ROWSxPROMPT or ROWSxPROMPTxOUT, the prompt with or without ~."""
        found = _CELL.fullmatch(text)
        if found is None:
            raise ValueError(f"no cell {text!r}: write 256x512x256, 16x4096 or 64x~1024x128")
        cell = cls(int(found["rows"]), int(found["prompt"]), int(found["out"] or 1), bool(found["ragged"]))
        if min(cell.rows, cell.prompt, cell.out) < 1:
            raise ValueError(f"no cell {text!r}: every number is at least 1")
        return cell

    def __str__(self) -> str:
        return f"{self.rows}x{'~' * self.ragged}{self.prompt}" + (f"x{self.out}" if self.out > 1 else "")

    def lengths(self) -> list[int]:
        """Prompt lengths; the same for each call."""
        lengths, generator = Lengths.parse(f"{'~' * self.ragged}{self.prompt}"), random.Random(self.prompt)
        return [lengths.draw(generator) for _ in range(self.rows)]


def parse_cells(text: str) -> list[Cell]:
    """Cells and names of `PRESETS`, between commas or spaces. :raises ValueError: see `Cell.parse`."""
    words = text.replace(",", " ").split()
    names = [name for word in words for name in PRESETS.get(word, word).split()]
    return [Cell.parse(name) for name in dict.fromkeys(names)]


class Opened(msgspec.Struct, tag=True, kw_only=True):
    """The engine is up. Seconds from the start of its process: imports, weights and caches, first token.

    `ahead`: steps are submitted before the one before them has been read.
    """

    name: str
    device: str
    version: str = ""
    import_s: float = 0.0
    load_s: float = 0.0
    first_token_s: float = 0.0
    kv_tokens: int = 0
    ahead: bool = False


class Measured(msgspec.Struct, tag=True, kw_only=True):
    """One cell. `first_s`: all prompts with one token out; `total_s`: all of it; `tok_s`: see the module.

    `step_ms`: between the results of steps that only decoded. `limit_*`: see `limits.py`; 0 for a peer.
    """

    cell: str
    first_s: float
    total_s: float
    tok_s: float
    step_ms: Percentiles = Percentiles()
    limit_tok_s: float = 0.0
    limit_by: str = ""
    bytes: float = 0.0
    flops: float = 0.0


class FirstToken(msgspec.Struct, tag=True, kw_only=True):
    """A prompt alone on an idle engine: time until its first token has been read."""

    prompt: int
    ms: Percentiles
    count: int


class Steady(msgspec.Struct, tag=True, kw_only=True):
    """A closed loop in the engine's process: `rows` requests always in work, others at once in the place of those that ended.

    `tok_s`: tokens generated per second while all rows were taken, prefilling included.
    """

    rows: int
    prompt: str
    output: str
    seconds: float
    tok_s: float


class Failed(msgspec.Struct, tag=True, kw_only=True):
    """A cell that could not be measured, or (no cell) all that came after."""

    cell: str
    error: str


class CeilingsLine(msgspec.Struct, tag=True, kw_only=True):
    """See `limits.Ceilings`."""

    ceilings: dict[str, Any]
    text: str


Line = Opened | Measured | FirstToken | Steady | Failed | CeilingsLine
_decoder = msgspec.json.Decoder(Line)


def decode_line(line: str | bytes) -> Line | None:
    """None for what is no line of ours: libraries print, too."""
    try:
        return _decoder.decode(line)
    except msgspec.MsgspecError:
        return None


def encode_line(line: Line) -> str:
    return msgspec.json.encode(line).decode()
