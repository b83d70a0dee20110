"""Checksums of blocks are zlib's, whatever the blocks' size, on a CPU, by the kernel, and on a GPU."""

from __future__ import annotations

import zlib

import pytest
import torch

from common.ops import backend
from common.ops.kv.block_crc import block_crc
from common.ops.kv.block_crc_triton import CANDIDATES, block_crc_triton

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def make_blocks(count: int, block_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (count, block_bytes), dtype=torch.uint8)


def by_zlib(pool: torch.Tensor, blocks: list[int]) -> list[int]:
    return [zlib.crc32(bytes(pool[block].tolist())) for block in blocks]


def unsigned(sums: torch.Tensor) -> list[int]:
    return [value & 0xFFFFFFFF for value in sums.tolist()]


@pytest.mark.usefixtures("cpu_and_kernel")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("block_bytes", [4, 64, 1000, 16384, 16388, 40000])
@pytest.mark.parametrize("max_programs", [None, 2])
def test_they_are_those_of_zlib(block_bytes: int, dtype: torch.dtype, max_programs: int | None) -> None:
    pool, ids, out = make_blocks(5, block_bytes), torch.tensor([4, 0, 2], dtype=dtype), torch.zeros(3, dtype=torch.int32)
    pool[2] = 0
    block_crc(pool, ids, out, max_programs=max_programs)
    assert unsigned(out) == by_zlib(pool, [4, 0, 2])


@pytest.mark.usefixtures("cpu_and_kernel")
def test_one_bit_changes_them() -> None:
    pool, out = make_blocks(2, 8192), torch.zeros(2, dtype=torch.int32)
    pool[1] = pool[0]
    pool[1, 5000] ^= 4
    block_crc(pool, torch.tensor([0, 1]), out)
    assert out[0] != out[1]


@pytest.mark.usefixtures("cpu_and_kernel")
def test_no_blocks() -> None:
    block_crc(make_blocks(2, 64), torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32))


@pytest.mark.parametrize(("lanes", "num_warps"), CANDIDATES)
def test_every_candidate_gives_the_same(lanes: int, num_warps: int) -> None:
    pool, out = make_blocks(3, 70000), torch.zeros(2, dtype=torch.int32)
    with backend.interpreted():
        block_crc_triton(pool, torch.tensor([2, 0]), out, None, lanes=lanes, num_warps=num_warps)
    assert unsigned(out) == by_zlib(pool, [2, 0])


@pytest.mark.parametrize(
    ("pool", "ids", "out"),
    [
        (torch.zeros(2, 8), torch.tensor([0]), torch.zeros(1, dtype=torch.int32)),
        (torch.zeros(2, 8, dtype=torch.uint8)[:, :4], torch.tensor([0]), torch.zeros(1, dtype=torch.int32)),
        (torch.zeros(2, 8, dtype=torch.uint8), torch.tensor([0.0]), torch.zeros(1, dtype=torch.int32)),
        (torch.zeros(2, 8, dtype=torch.uint8), torch.tensor([0]), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2, 8, dtype=torch.uint8), torch.tensor([0]), torch.zeros(1, dtype=torch.int64)),
    ],
    ids=["no bytes", "not contiguous", "ids of floats", "too many sums", "wide sums"],
)
def test_what_does_not_fit_is_refused(pool: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="are"):
        block_crc(pool, ids, out)


def test_a_gpu_takes_whole_words_only() -> None:
    with backend.interpreted(), pytest.raises(ValueError, match="multiples of 4"):
        block_crc(make_blocks(2, 10), torch.tensor([0]), torch.zeros(1, dtype=torch.int32))


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("block_bytes", [4, 1000, 262144, 2 << 20, (2 << 20) + 4])
def test_on_a_gpu(block_bytes: int) -> None:
    pool, blocks = make_blocks(40, block_bytes).cuda(), list(range(39, 0, -1))
    out = torch.zeros(len(blocks), dtype=torch.int32, device="cuda")
    block_crc(pool, torch.tensor(blocks, device="cuda"), out, max_programs=32)
    assert unsigned(out) == by_zlib(pool, blocks)
