"""The order of a block's bytes and its generation does not depend on the processor."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from common.cache.pool import BlockPool
from common.protocol.errors import ConfigError
from common.transfer import shm
from common.transfer.base import RemoteBlocks
from common.transfer.fence import memory_fence
from common.transfer.segment import Segment
from common.transfer.shm import ShmTransport, StoreTransport


def test_x86_keeps_the_order_and_no_compiler_is_loaded_for_it() -> None:
    script = "import sys; from common.transfer.fence import memory_fence as f; f('x86_64')(); sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0


def test_arm_gets_a_fence_that_is_an_instruction_of_the_processor() -> None:
    binding = pytest.importorskip("llvmlite.binding")
    fence = memory_fence("aarch64")
    fence()
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    ((_, code),) = fence.inspect_llvm().items()  # pyright: ignore[reportFunctionMemberAccess]
    machine = binding.Target.from_triple("aarch64-unknown-linux-gnu").create_target_machine()
    code = re.sub(r'target triple = ".*"', 'target triple = "aarch64-unknown-linux-gnu"', code)
    code = re.sub(r'target datalayout = ".*"', f'target datalayout = "{machine.target_data}"', code)
    code = re.sub(r'"target-(cpu|features)"="[^"]*"', "", code)
    assert re.search(r"\bdmb\s+ish\b", machine.emit_assembly(binding.parse_assembly(code)))


def test_a_processor_without_one_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "common.transfer.fence_numba", None)
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(ConfigError, match="riscv64 processor reorders") as refused:
        ShmTransport(tmp_path)
    assert "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match="riscv64"):
        StoreTransport(tmp_path)


def test_an_owner_raises_the_generation_before_the_fence() -> None:
    """What is written to the block comes after it: nobody has been told of the block yet."""
    seen: list[list[int]] = []
    generations = np.zeros(4, np.uint64)
    pool = BlockPool(4, 16, generations, lambda: seen.append(generations.tolist()))
    pool.allocate(2)
    assert seen == [[1, 1, 0, 0]]


@pytest.mark.parametrize("transport", [ShmTransport, StoreTransport])
def test_a_reader_looks_at_the_generations_after_the_fence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: Callable[[Path], ShmTransport | StoreTransport]
) -> None:
    """A block that is reused between the copy and the fence is never believed."""
    segment = Segment.create(tmp_path, "one", num_blocks=1, block_bytes=4096, fingerprint="m")
    monkeypatch.setattr(shm, "memory_fence", lambda: lambda: segment.generations.fill(2))
    segment.generations[0] = 1
    reader = transport(tmp_path)
    with pytest.raises(shm.StaleHandle, match="reused"):
        reader.read(RemoteBlocks(reader.host, "one", "m", [0], [1]), np.zeros((1, 4096), np.uint8), [0])
    segment.close()
