"""What a checkpoint's configuration says of its weights: a plain value, known before any tensor is read. Torch-free."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

import msgspec

FormatName = Literal["plain", "fp8", "fp8_blocks", "int8", "awq", "gptq", "packed", "nf4", "mxfp4", "nvfp4", "gguf"]
WeightFormat = Literal["plain", "fp8", "fp8_blocks", "groups"]
"""How linears are multiplied where nothing else is asked for; "groups": `common/ops/quant/grouped.py`."""


class ShardUnits(NamedTuple):
    """How a weight can be cut for tensor parallelism: outputs in multiples of `outputs`, inputs of `inputs`; 0: not at all."""

    outputs: int = 1
    inputs: int = 1


class WeightScheme(msgspec.Struct, frozen=True, kw_only=True):
    """name: of the format. bits: of a code. group: inputs that share a scale; 0: all of an output's.

    zero_offset: what is added to the zero points that the files hold. act_order: whether inputs may be sorted by group. ignore:
    modules whose weights are as they were: names or parts of names, in which * stands for anything, or regular expressions
    that begin with "re:".
    """

    name: FormatName = "plain"
    bits: int = 16
    group: int = 0
    zero_offset: int = 0
    act_order: bool = False
    ignore: tuple[str, ...] = ()

    @property
    def kind(self) -> WeightFormat:
        return self.name if self.name in ("plain", "fp8", "fp8_blocks") else "groups"

    def leaves_alone(self, module: str) -> bool:
        """Whether the configuration says that `module` (a name without `.weight`) is not quantised."""
        # as a model that wraps one of text calls it, too
        names = (module, f"language_model.{module}", f"model.language_model.{module.removeprefix('model.')}")
        return any(_matches(pattern, name) for pattern in self.ignore for name in names)


def _matches(pattern: str, module: str) -> bool:
    """Whether it fits from the beginning (a regular expression), or any whole parts of the name, between dots."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    name, begin = f".{module}.", 0
    for piece in f".{pattern}.".split("*"):
        found = name.find(piece, begin)
        if found < 0:
            return False
        begin = found + len(piece)
    return True
