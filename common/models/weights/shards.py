"""A tensor-parallel rank's part of a weight, as the files hold it: quantised weights are cut without another rounding.

Which rows and columns are a rank's is a rule of the block that has the weight (`blocks/shards.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from common.models.formats.detect import FP8_BLOCK
from common.models.formats.groups import Groups
from common.models.weights.expert_stack import Stored
from common.models.weights.fp8 import Fp8Weight


def cut_stored(part: Stored, rows: Sequence[range], columns: range) -> Stored:
    """Return the outputs in `rows`, below each other, and the inputs in `columns`.

    :raises ValueError: if a group or a block of 128 × 128 would be cut, or inputs that are sorted by group.
    """
    places = torch.cat([torch.arange(mine.start, mine.stop) for mine in rows])
    if isinstance(part, Groups):
        return part.cut(places.to(part.codes.device), columns)
    if isinstance(part, Fp8Weight):
        return _cut_fp8(part, rows, places.to(part.data.device), columns)
    return part[places.to(part.device), columns.start : columns.stop]


def _cut_fp8(part: Fp8Weight, rows: Sequence[range], places: torch.Tensor, columns: range) -> Fp8Weight:
    # torch indexes float8 tensors as bytes only
    data = part.data.view(torch.uint8)[places, columns.start : columns.stop].contiguous().view(part.data.dtype)
    if part.scale.ndim == 1:
        return replace(part, data=data, scale=part.scale[places])
    outputs, inputs = part.data.shape
    blocks = torch.cat([_blocks(mine, outputs) for mine in rows]).to(places.device)
    return replace(part, data=data, scale=part.scale[blocks][:, _blocks(columns, inputs).to(places.device)].contiguous())


def _blocks(places: range, size: int) -> torch.Tensor:
    """The blocks that `places` are. int64."""
    if places.start % FP8_BLOCK or (places.stop % FP8_BLOCK and places.stop < size):
        raise ValueError(f"{places.start} … {places.stop} of {size} are no whole blocks of {FP8_BLOCK}")
    return torch.arange(places.start // FP8_BLOCK, -(-places.stop // FP8_BLOCK))
