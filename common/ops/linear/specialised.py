"""Calls of the warp-specialised kernel for gate and up of many rows (`specialised_gluon.py`), for Hopper."""

from __future__ import annotations

from typing import Any

import torch

from common.ops import backend
from common.ops.linear.candidates import Candidate, Shape
from common.ops.linear.weight import GateActivation, LinearWeight
from common.ops.sizes import cdiv

PART = 64
"""Activation rows of a consumer."""
STAGES = {(192, 256): 3, (128, 256): 4}
"""By the activation rows and the weight rows of a tile: as many steps as fit into shared memory, of 128 bytes a row, beside
what turns results."""
GROUP = 16
"""Tiles of activations that go through all weights side by side."""
_STEP = 64
_FEWEST_ROWS = 1024
"""Fewer were not measured in a model."""


def takes_shape(shape: Shape) -> bool:
    """Can the kernel multiply bf16 activations by such a weight?"""
    aligned = shape.k % 8 == 0 and shape.n % 2 == 0  # what the bulk-copy engine can read
    return shape.op == "gated" and not shape.group and shape.item_bytes == 2 and aligned


def specialised_candidates(shape: Shape, rows: int) -> list[Candidate]:
    """Return what is worth a measurement for `rows`, a bucket."""
    if rows < _FEWEST_ROWS or not takes_shape(shape):
        return []
    return [Candidate("specialised", False, n, m, _STEP, 1, 4 * (m // PART + 1), stages) for (m, n), stages in STAGES.items()]


def gate_up_specialised(
    x: torch.Tensor, weight: LinearWeight, chosen: Candidate, activation: GateActivation = "silu"
) -> torch.Tensor:
    """activation(x Wgᵀ) · (x Wuᵀ) in the model's dtype, [rows, out_features / 2]. x: [rows, in_features], contiguous,
    bf16."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from common.ops.linear.specialised_gluon import specialised_kernel

    rows, depth = x.shape
    size = weight.out_features // 2
    row_tiles, n_tiles = cdiv(rows, chosen.block_m), cdiv(size, chosen.block_n // 2)
    pdl = backend.pdl(x)
    out = torch.empty(rows, size, dtype=weight.dtype, device=x.device)

    def boxes(tensor: torch.Tensor, height: int) -> TensorDescriptor:
        box = [height, chosen.block_k]
        layout: Any = gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16)
        return TensorDescriptor(tensor, list(tensor.shape), [depth, 1], box, layout)

    specialised_kernel[(min(backend.num_sms(x.get_device()), row_tiles * n_tiles),)](
        boxes(x, PART),
        boxes(weight.data, chosen.block_n // 2),
        weight.bias,
        out,
        rows,
        size,
        row_tiles * n_tiles,
        row_tiles,
        n_tiles,
        cdiv(depth, chosen.block_k),
        CONSUMERS=chosen.block_m // PART,
        WIDTH=chosen.block_n // 2,
        BK=chosen.block_k,
        STAGES=chosen.stages,
        GROUP=GROUP,
        ACTIVATION=activation,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out
