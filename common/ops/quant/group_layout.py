"""How weights in groups lie in memory (`grouped.py`), as sizes alone. Torch-free."""

from __future__ import annotations

from typing import Literal, NamedTuple

Code = Literal["int4", "nf4", "fp4", "int8"]
"""How a code becomes a number."""

MAX_GROUP = 128
MIN_RUN = 32
GROUPS = (16, 32, 64, 128)

_SCALE_BYTES, _CHANNEL_BYTES, _ORDER_BYTES = 2, 4, 8


def can_group(group: int, in_features: int) -> bool:
    """Whether groups of `group` inputs can be packed: of 16, 32, 64, a multiple of 128, or all inputs at once."""
    return group in GROUPS or group % MAX_GROUP == 0 or group >= in_features


def can_pack(group: int, in_features: int, *, offsets: bool) -> bool:
    """Whether there are kernels for groups of `group` inputs that have offsets, or have none."""
    return can_group(group, in_features) and not (offsets and group < MIN_RUN)


def run_of(group: int) -> int:
    """Return the inputs of half a step, for groups of `group` as stored."""
    return max(MIN_RUN, group)


class GroupLayout(NamedTuple):
    """What weights below each other must have in common. group: inputs that share a scale, as stored. ordered: whether inputs
    are sorted by group."""

    code: Code
    group: int
    in_features: int
    ordered: bool = False

    @classmethod
    def of(cls, code: Code, group: int, in_features: int, *, ordered: bool = False) -> GroupLayout:
        """Return how groups of `group` inputs are stored: those larger than 128 as several of 128."""
        return cls(code, group if group in GROUPS else MAX_GROUP, in_features, ordered)

    @property
    def steps(self) -> int:
        return -(-self.in_features // (2 * run_of(self.group)))

    def nbytes(self, out_features: int, *, offsets: bool) -> int:
        """Return the bytes of a weight [out_features, in_features], the order of its inputs included."""
        inputs = 2 * run_of(self.group) * self.steps
        codes = inputs if self.code == "int8" else inputs // 2
        scales = inputs // self.group * _SCALE_BYTES * (2 if offsets else 1)
        return out_features * (codes + scales + _CHANNEL_BYTES) + (_ORDER_BYTES * self.in_features if self.ordered else 0)
