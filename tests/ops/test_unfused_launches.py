"""Kernels that read partial sums are built in variants, for as many as there are: none may fuse a product and a sum.

A compiler fuses them as it likes, in one variant otherwise than in another; a batch-invariant row would then depend on how many
rows came with it. What the built code says is tested in `test_kernels_compile`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from common.ops.kv import qkv_rope_triton as rope_module
from common.ops.kv.forms import HeadForm, KvTarget
from common.ops.norm import add_rms_norm_triton as norm_module


class Launches:
    """Stands for a kernel, and keeps what it is launched with."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda **given: self.seen.append(given)


@pytest.mark.parametrize("splits", [0, 1, 4])
def test_norms(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches()
    monkeypatch.setattr(norm_module, "add_rms_norm_kernel", launches)
    delta = None if not splits else torch.zeros(3, 64) if splits == 1 else torch.zeros(splits, 3, 64)
    norm_module.add_rms_norm_triton(torch.zeros(3, 64), delta, torch.ones(64), 1e-5, quantise=False)
    assert [given["enable_fp_fusion"] for given in launches.seen] == [False]


@pytest.mark.parametrize("splits", [1, 2])
def test_rope(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches()
    monkeypatch.setattr(rope_module, "qkv_rope_kernel", launches)
    pool = torch.zeros(4, 1, 2, 16, 1, 64)
    rope_module.qkv_rope_triton(
        torch.zeros(splits, 3, 4 * 64),
        HeadForm(num_heads=2, eps=1e-5),
        KvTarget(pool=pool, slots=torch.zeros(3, dtype=torch.int64)),
        0,
        positions=torch.zeros(3, dtype=torch.int32),
        rope=torch.zeros(8, 64),
        bias=None,
        dtype=torch.float32,
        need_kv=False,
    )
    assert [given["enable_fp_fusion"] for given in launches.seen] == [False]
