"""Blocks arrive byte for byte, whatever their number and size, and what no id names is left alone."""

from __future__ import annotations

import pytest
import torch

from common.ops.kv.block_copy import copy_blocks, gather_blocks, scatter_blocks
from common.ops.kv.block_copy_reference import copy_blocks_reference
from common.ops.kv.block_copy_triton import copy_blocks_triton

pytestmark = pytest.mark.usefixtures("cpu_and_kernel")


def make_blocks(count: int, block_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (count, block_bytes), dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("count", "block_bytes"), [(1, 16), (3, 48), (5, 16400), (2, 49152), (0, 64)])
@pytest.mark.parametrize("max_programs", [None, 2])
def test_blocks_are_copied(count: int, block_bytes: int, dtype: torch.dtype, max_programs: int | None) -> None:
    source, target, staging = (make_blocks(number, block_bytes) for number in (7, 9, count))
    source_ids, target_ids = torch.randperm(7)[:count].to(dtype), torch.randperm(9)[:count].to(dtype)

    gather_blocks(source, source_ids, staging, max_programs=max_programs)
    assert torch.equal(staging, source[source_ids.long()])

    expected = target.clone()
    copy_blocks_reference(source, source_ids.tolist(), expected, target_ids.tolist())
    copied = target.clone()
    copy_blocks(source, source_ids, copied, target_ids, max_programs=max_programs)
    assert torch.equal(copied, expected)
    scatter_blocks(staging, target, target_ids, max_programs=max_programs)
    assert torch.equal(target, expected)


def test_one_pool_can_be_both_sides() -> None:
    pool = make_blocks(6, 4096)
    expected = pool.clone()
    copy_blocks_reference(pool, [1, 4], expected, [0, 5])
    copy_blocks(pool, torch.tensor([1, 4]), pool, torch.tensor([0, 5]))
    assert torch.equal(pool, expected)


@pytest.mark.parametrize(("chunk", "num_warps"), [(64, 4), (2048, 8), (8192, 4)])
def test_every_candidate_copies_the_same(chunk: int, num_warps: int) -> None:
    source, staging = make_blocks(5, 20000), make_blocks(2, 20000)
    copy_blocks_triton(source, torch.tensor([3, 1]), staging, None, 2, None, chunk=chunk, num_warps=num_warps)
    assert torch.equal(staging, source[[3, 1]])


def test_what_does_not_fit_is_refused() -> None:
    pool, ids = make_blocks(4, 64), torch.tensor([1, 2])
    with pytest.raises(ValueError, match="don't fit a staging"):
        gather_blocks(pool, ids, make_blocks(3, 64))
    with pytest.raises(ValueError, match="don't come from"):
        scatter_blocks(make_blocks(3, 64), pool, ids)
    with pytest.raises(ValueError, match="don't go to"):
        copy_blocks(pool, ids, pool, ids[:1])
    with pytest.raises(ValueError, match="one size"):
        gather_blocks(pool, ids, make_blocks(2, 32))
    with pytest.raises(ValueError, match="one size"):
        gather_blocks(pool, ids, make_blocks(2, 64).float())
    with pytest.raises(ValueError, match="multiples of 16"):
        gather_blocks(make_blocks(4, 40), ids, make_blocks(2, 40))
    with pytest.raises(ValueError, match="block ids"):
        gather_blocks(pool, ids.float(), make_blocks(2, 64))
