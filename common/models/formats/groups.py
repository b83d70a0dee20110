"""A weight as every format with scales for groups gives it: codes, scales, offsets; and what each such format must say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from common.models.formats.scheme import ShardUnits, WeightScheme
from common.models.weights.errors import WeightsError
from common.ops.quant.group_layout import Code, can_pack
from common.ops.quant.grouped import GroupedWeight, pack_grouped, table_of


@dataclass(slots=True, frozen=True)
class Groups:
    """weight[n, k] = (number(codes[n, k]) · scales[n, k // group] + offsets[n, k // group]) · channel[n].

    codes: uint8 [out, in], or int8 for "int8". scales, offsets: float32 [out, ⌈in / group⌉]. channel: float32 [out] or None.
    order: int64 [in], or None: column i of `codes` is input order[i].
    """

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    code: Code
    group: int
    order: torch.Tensor | None = None
    channel: torch.Tensor | None = None

    def dequantise(self) -> torch.Tensor:
        """The reference: float32 [out, in], inputs in their order."""
        size = self.codes.shape[1]
        numbers = self.codes.float() if self.code == "int8" else table_of(self.code, self.codes.device)[self.codes.long()]
        values = numbers * self.scales.repeat_interleave(self.group, 1)[:, :size]
        if self.offsets is not None:
            values += self.offsets.repeat_interleave(self.group, 1)[:, :size]
        if self.channel is not None:
            values *= self.channel[:, None]
        if self.order is None:
            return values
        ordered = torch.empty_like(values)
        ordered[:, self.order] = values
        return ordered

    def pack(self) -> GroupedWeight | None:
        """For the kernels; None where there is none for this group."""
        if not can_pack(self.group, self.codes.shape[1], offsets=self.offsets is not None):
            return None
        return pack_grouped(
            self.codes,
            self.scales,
            self.offsets,
            code=self.code,
            group=self.group,
            order=self.order,
            channel=self.channel,
        )

    def cut(self, rows: torch.Tensor, columns: range) -> Groups:
        """Return some outputs and neighbouring inputs. rows: int64.

        :raises ValueError: if `columns` are no whole groups, or some of the inputs of a weight that has them sorted.
        """
        inputs = self.codes.shape[1]
        found = self.map_rows(lambda tensor: tensor[rows])
        if len(columns) == inputs:
            return found
        if self.order is not None:
            raise ValueError("inputs that are sorted by group can't be cut: each part would need all groups")
        codes = found.codes[:, columns.start : columns.stop].contiguous()
        if self.scales.shape[1] == 1:  # which all parts share
            return replace(found, codes=codes, group=min(self.group, len(columns)))
        if columns.start % self.group or (columns.stop % self.group and columns.stop < inputs):
            raise ValueError(f"inputs {columns.start} … {columns.stop} are no whole groups of {self.group}")
        groups = slice(columns.start // self.group, -(-columns.stop // self.group))
        offsets = None if found.offsets is None else found.offsets[:, groups]
        return replace(found, codes=codes, scales=found.scales[:, groups], offsets=offsets)

    def map_rows(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Groups:
        """`change` reorders the outputs of a tensor [out, …]."""
        offsets = None if self.offsets is None else change(self.offsets)
        channel = None if self.channel is None else change(self.channel)
        return replace(self, codes=change(self.codes), scales=change(self.scales), offsets=offsets, channel=channel)


class Tensors(Protocol):
    """A module's tensors in the files, on the device, as stored."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def __call__(self, name: str, *shape: int) -> torch.Tensor:
        """:raises WeightsError: if `name` is missing, can't be read, or has another shape (where one is given)."""
        ...


class GroupFormat(Protocol):
    """One format of weights with scales for groups of inputs."""

    def units(self, scheme: WeightScheme) -> ShardUnits:
        """Return how a weight can be cut for tensor parallelism."""
        ...

    def main(self, module: str) -> str:
        """The name of the tensor that a module in this format has and others have not, or not of that type."""
        ...

    def load(self, tensors: Tensors, module: str, outputs: int, inputs: int, scheme: WeightScheme) -> Groups:
        """:raises WeightsError: if tensors are missing or of another shape, or scales are NaN, infinite or negative."""
        ...


def checked_scales(name: str, scales: torch.Tensor) -> torch.Tensor:
    """float32. :raises WeightsError: if a scale is NaN, infinite or negative."""
    scales = scales.float()
    if not bool(torch.isfinite(scales).all()):
        raise WeightsError(f"{name} holds a scale that is NaN or infinite")
    if bool((scales < 0).any()):
        raise WeightsError(f"{name} holds a negative scale")
    return scales


def unpacked_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [a, b] → uint8 [a, b · 32 / bits]: the codes of each word, lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(1)


def unpacked_bytes(data: torch.Tensor) -> torch.Tensor:
    """uint8 [..., b] → uint8 [..., 2 · b]: the low half of each byte first."""
    return torch.stack([data & 15, data >> 4], -1).flatten(-2)


def integer_groups(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group: int, order: torch.Tensor | None, bits: int
) -> Groups:
    """codes: uint8 [out, in], of which `zeros`, as float32 [out, groups], are subtracted; None: half the range."""
    half = 1 << (bits - 1)
    offsets = None if zeros is None or bool((zeros == half).all()) else (half - zeros) * scales
    if bits == 4:
        return Groups(codes, scales, offsets, "int4", group, order)
    return Groups((codes.to(torch.int16) - half).to(torch.int8), scales, offsets, "int8", group, order)


def in_group_order(name: str, indices: torch.Tensor, group: int, groups: int) -> torch.Tensor | None:
    """The inputs sorted by their group, from each input's group; None if they are sorted already.

    :raises WeightsError: if groups are not of `group` inputs each.
    """
    inputs = len(indices)
    wanted = torch.arange(inputs, device=indices.device) // group
    if torch.equal(indices.long(), wanted):
        return None
    order = torch.argsort(indices.long(), stable=True)
    if len(wanted) and (int(indices.max()) >= groups or not torch.equal(indices.long()[order], wanted)):
        raise WeightsError(f"{name} does not divide {inputs} inputs into groups of {group}")
    return order
