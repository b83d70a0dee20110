"""Lengths of prompts and answers: `512`, or `~512` (ragged: a quarter to seven quarters of it), or `100-400`. Pure."""

from __future__ import annotations

import random
import re

import msgspec

_PATTERN = re.compile(r"(?P<ragged>~?)(?P<low>\d+)(-(?P<high>\d+))?")


class Lengths(msgspec.Struct, frozen=True):
    """Tokens; both ends can come up."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """:raises ValueError: for anything but the three forms."""
        found = _PATTERN.fullmatch(text)
        if found is None or (found["ragged"] and found["high"]):
            raise ValueError(f"no length {text!r}: write 512, ~512 or 100-400")
        length = int(found["low"])
        low, high = (max(1, length // 4), 7 * length // 4) if found["ragged"] else (length, int(found["high"] or length))
        if not 1 <= low <= high:
            raise ValueError(f"no length {text!r}: at least 1, the smaller one first")
        return cls(low, high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    def draw(self, generator: random.Random) -> int:
        return generator.randint(self.low, self.high)
