"""Kernels on tensors that end, or begin, where memory that nobody may touch begins: `python -m tests.ops.bounds`.

What compute-sanitizer says on a card, said by the interpreter on any machine: a kernel that reads or writes outside its tensors
ends the process. Outputs are guarded as well as inputs. With `outside`, it touches the guard, to show that it guards.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch

from common.ops import backend
from common.ops.attention_parts import merge_pair, merge_pair_reference
from common.ops.qkv_rope_triton import qkv_rope_triton

FP8 = torch.float8_e4m3fn
_empty = torch.empty
_libc = ctypes.CDLL(None, use_errno=True)
_kept: list[mmap.mmap] = []


def guarded(tensor: torch.Tensor, *, at_end: bool) -> torch.Tensor:
    """The same numbers, right before a page that may not be touched, or right behind one."""
    size = tensor.numel() * tensor.element_size()
    pages = -(-size // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 2) * mmap.PAGESIZE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (0, pages + 1):
        if _libc.mprotect(ctypes.c_void_p(base + page * mmap.PAGESIZE), mmap.PAGESIZE, 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    _kept.append(memory)
    begin = mmap.PAGESIZE + (pages * mmap.PAGESIZE - size if at_end else 0)
    held = torch.frombuffer((ctypes.c_char * size).from_address(base + begin), dtype=torch.uint8)
    return held.view(tensor.dtype).view(tensor.shape).copy_(tensor)


@contextmanager
def outputs_guarded(at_end: bool) -> Iterator[None]:
    def empty(*shape: int, dtype: torch.dtype, **_: Any) -> torch.Tensor:
        return guarded(_empty(*shape, dtype=dtype), at_end=at_end)

    with patch("torch.empty", empty):
        yield


def merges(at_end: bool) -> None:
    for tokens, heads, dim in ((1, 3, 32), (7, 6, 80), (37, 9, 64), (16, 4, 128)):
        for first, output in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
            parts = [
                (
                    guarded(torch.randn(tokens, heads, dim).to(dtype), at_end=at_end),
                    guarded(torch.randn(heads, tokens), at_end=at_end),
                )
                for dtype in (first, torch.bfloat16)
            ]
            with outputs_guarded(at_end):
                merged, _ = merge_pair(parts[0], parts[1], output)
            expected, _ = merge_pair_reference(parts[0], parts[1], output)
            torch.testing.assert_close(merged.float(), expected.float(), atol=2e-2, rtol=2e-2)


def projections(at_end: bool) -> None:
    """Mixed and centred, at the first and the last slot of a pool, and at none."""

    def given(tensor: torch.Tensor) -> torch.Tensor:
        return guarded(tensor, at_end=at_end)

    layers, blocks, block_tokens = 2, 2, 16
    for rows, heads, kv_heads, dim, splits in ((1, 4, 2, 64, 4), (5, 9, 3, 64, 0), (3, 6, 2, 80, 2), (4, 32, 8, 128, 0)):
        for warps, need_kv in ((1, False), (2, True), (4, True)):
            qkv = torch.randn(max(1, splits), rows, (heads + 2 * kv_heads) * dim)
            with outputs_guarded(at_end):
                qkv_rope_triton(
                    given(qkv if splits else qkv[0].bfloat16()),
                    num_heads=heads,
                    positions=given(torch.tensor([31, 0, 7, 30, 2][:rows])),
                    rope=given(torch.randn(32, dim)),
                    q_norm=given(torch.randn(dim).bfloat16()),
                    k_norm=given(torch.randn(dim).bfloat16()),
                    eps=1e-6,
                    bias=None,
                    pool=given(torch.zeros(blocks, layers, 2, block_tokens, kv_heads, dim).to(FP8)),
                    layer=1,
                    slots=given(torch.tensor([blocks * block_tokens - 1, 0, -1, 17, 5][:rows])),
                    dtype=torch.bfloat16,
                    kv_scale=given(torch.rand(layers, 2, kv_heads) + 0.5),
                    k_center=given(torch.randn(layers, kv_heads, dim)),
                    mix=True,
                    need_kv=need_kv,
                    num_warps=warps,
                )


if __name__ == "__main__":
    torch.manual_seed(0)
    if sys.argv[1:] == ["outside"]:
        ctypes.string_at(guarded(torch.zeros(8), at_end=True).data_ptr() + 32, 4)
    with backend.interpreted():
        for end in (True, False):
            merges(end)
            projections(end)
