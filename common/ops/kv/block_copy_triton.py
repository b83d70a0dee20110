"""Blocks copied by one grid over all their chunks, in 16-byte words.

Not a part of the decode path, which is a chain of dependent launches: it is launched plainly, after all that came before it in
its stream.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false
from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl

from common.ops.sizes import cdiv, next_power_of_2

CHUNK, NUM_WARPS = 4096, 4
"""Words of 4 bytes that a program copies at a time, and its warps."""
CANDIDATES = ((2048, 4), (4096, 4), (4096, 8), (8192, 8))


@triton.jit(do_not_specialize=["num_chunks"])
def copy_blocks_kernel(
    source,  # int32 [blocks, WORDS]
    source_ids,  # [count], or None: 0, 1, …
    target,  # int32 [blocks, WORDS]
    target_ids,  # [count], or None: 0, 1, …
    num_chunks,  # of all blocks
    WORDS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    CHUNKS: tl.constexpr = (WORDS + CHUNK - 1) // CHUNK
    chunk = tl.program_id(0)
    while chunk < num_chunks:
        index = (chunk // CHUNKS).to(tl.int64)
        words = chunk % CHUNKS * CHUNK + tl.arange(0, CHUNK)
        begin, into = index, index
        if source_ids is not None:
            begin = tl.load(source_ids + index).to(tl.int64)
        if target_ids is not None:
            into = tl.load(target_ids + index).to(tl.int64)
        data = tl.load(source + begin * WORDS + words, mask=words < WORDS)
        tl.store(target + into * WORDS + words, data, mask=words < WORDS)
        chunk += tl.num_programs(0)


def copy_blocks_triton(
    source: torch.Tensor,
    source_ids: torch.Tensor | None,
    target: torch.Tensor,
    target_ids: torch.Tensor | None,
    count: int,
    max_programs: int | None,
    *,
    chunk: int = CHUNK,
    num_warps: int = NUM_WARPS,
) -> None:
    """As `copy_blocks`, shapes checked by it; ids None: blocks in order."""
    words = source.shape[1] // 4
    chunk = min(chunk, next_power_of_2(words))
    num_chunks = count * cdiv(words, chunk)
    runner = target if target.is_cuda else source  # who reads from another GPU opened that memory
    with torch.cuda.device(runner.device) if runner.is_cuda else nullcontext():
        copy_blocks_kernel[(min(num_chunks, max_programs or num_chunks),)](
            source=source.view(torch.int32),
            source_ids=source_ids,
            target=target.view(torch.int32),
            target_ids=target_ids,
            num_chunks=num_chunks,
            WORDS=words,
            CHUNK=chunk,
            num_warps=num_warps,
        )
