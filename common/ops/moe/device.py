"""Choose how a GPU computes a mixture of experts.

A choice depends on the weights' format and shape and on a bucket of rows: measured when the model was loaded
(`experts_tuning.py`), else the default of `candidates.py`. Batch-invariant weights have one for every number of rows.
"""

from __future__ import annotations

from pathlib import Path

import torch

from common.ops import backend
from common.ops.moe.candidates import (
    ExpertCandidate,
    ExpertShape,
    bucket,
    candidates,
    invariant_candidate,
    unpacking_candidates,
)
from common.ops.moe.form import ExpertActivation
from common.ops.moe.packed_weight import PackedWeight
from common.ops.tuning import Table

_OPS = Path(__file__).parents[1]
_SOURCES = ("*.py", "linear/*_triton.py", "linear/unpack*.py", "linear/store_gluon.py", "moe/*.py")
TABLE = Table("experts", ExpertCandidate, sorted(path for pattern in _SOURCES for path in _OPS.glob(pattern)))
"""An edit of any source whose kernels are timed, or that they are made of, measures again."""

_chosen: dict[tuple[object, ...], ExpertCandidate] = {}


def choose(
    gate_up: PackedWeight, activation: ExpertActivation, rows: int, top_k: int, dtype: torch.dtype = torch.bfloat16
) -> ExpertCandidate:
    """Return the implementation for `rows` tokens in `dtype`."""
    size = 0 if gate_up.batch_invariant else bucket(rows)
    key = (gate_up.format, gate_up.values.dtype, gate_up.values.shape, gate_up.in_blocks, activation.kind, top_k, size, dtype)
    found = _chosen.get(key)
    if found is None:
        if gate_up.batch_invariant:
            found = invariant_candidate(shape_of(gate_up, top_k, dtype))
        else:
            options_ = options(gate_up, size, top_k, dtype)
            found = _table(gate_up.values.device).choose(choice_key(gate_up, activation, size, top_k, dtype), options_)
        _chosen[key] = found
    return found


def forget_choices() -> None:
    """Choose anew, after the table changed."""
    _chosen.clear()


def options(gate_up: PackedWeight, size: int, top_k: int, dtype: torch.dtype = torch.bfloat16) -> list[ExpertCandidate]:
    """Return what may be chosen from for a bucket of rows, the default first."""
    shape, device = shape_of(gate_up, top_k, dtype), gate_up.values.device
    found = candidates(shape, size, backend.num_sms(gate_up.values.get_device()))
    if dtype == torch.bfloat16 and backend.has_warpgroup_products(device):
        found += unpacking_candidates(shape, size)
    return found


def shape_of(gate_up: PackedWeight, top_k: int, dtype: torch.dtype) -> ExpertShape:
    """dtype: of activations."""
    values = "fp8_blocks" if gate_up.in_blocks else gate_up.format
    return ExpertShape(gate_up.experts, gate_up.k, gate_up.n // 2, top_k, values, gate_up.run, dtype.itemsize)


def choice_key(gate_up: PackedWeight, activation: ExpertActivation, size: int, top_k: int, dtype: torch.dtype) -> str:
    """Return the key of the table."""
    shape = shape_of(gate_up, top_k, dtype)
    run = f"/{shape.run}{'+offsets' if gate_up.offset is not None else ''}" if shape.run else ""
    extent = f"{shape.experts}x{shape.intermediate}x{shape.hidden}"
    return f"{shape.values}{run} {shape.item_bytes} {activation.kind} {extent} top{top_k} {size}"


def _table(device: torch.device) -> Table[ExpertCandidate]:
    if not TABLE.is_open:
        TABLE.open(device)
    return TABLE
