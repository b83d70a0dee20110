"""KV from GPU to GPU between processes, on GPUs: memory that another process has is read, and the GPU says when."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import pytest
import torch

from common.protocol.errors import Cancelled
from common.transfer import cuda_ipc
from common.transfer.awaited import Awaited
from common.transfer.base import LocalBlocks
from common.transfer.cuda_ipc import LocalTransport
from common.transfer.transfer import Transfer
from tests.unit.test_cuda_ipc import NOTHING, awaiting, remote

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

_OWNER = """
import sys, torch
from common.transfer.cuda_ipc import export_pool
from common.transfer.segment import Segment
torch.empty(3 << 20, device="cuda:0")  # not the first thing in memory
pool = torch.arange(6 * 1024, dtype=torch.float32, device="cuda:0").view(6, 1024).mul_(0.5)
segment = Segment.create(
    sys.argv[1], "theirs", num_blocks=6, block_bytes=4096, fingerprint="m", device_memory=export_pool(pool)
)
torch.cuda.synchronize()
print("ready", flush=True)
sys.stdin.read()
segment.close()
"""


@pytest.mark.parametrize("device", range(2))
def test_another_process_memory_is_read(tmp_path: Path, device: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_ipc, "_IDS", 2)  # more are needed than there is room for
    if device >= torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    command = [sys.executable, "-c", _OWNER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdin is not None and owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        mine = torch.zeros(4, 1024, device=f"cuda:{device}")
        transport = LocalTransport(str(tmp_path))
        transport.attach({"m": mine})
        assert transport.read(remote(transport, [5, 2, 3], [0, 0, 0]), NOTHING, [0, 3, 1]) == 3 * 4096
        expected = torch.arange(6 * 1024).view(6, 1024).mul(0.5)
        assert torch.equal(mine.cpu()[[0, 3, 1]], expected[[5, 2, 3]])
        assert not mine[2].any()
        ended = transport.begin(remote(transport, [1, 4], [0, 0]), NOTHING, [2, 1])
        assert ended is not None and ended() == 2 * 4096
        assert torch.equal(mine.cpu(), expected[[5, 4, 1, 2]])
        transport.close()
        owner.stdin.close()
    assert owner.returncode == 0


_PROMISING_OWNER = """
import sys, torch
from common.engine.gpu.progress import open_progress
from common.transfer.cuda_ipc import export_pool
from common.transfer.segment import Segment
pool = torch.zeros(6, 1024, dtype=torch.float32, device="cuda:0")
segment = Segment.create(
    sys.argv[1], "theirs", num_blocks=6, block_bytes=4096, fingerprint="m", device_memory=export_pool(pool)
)
progress = open_progress(segment.progress, pool.device)
work = torch.randn(8192, 8192, device="cuda:0")
torch.cuda.synchronize()
print("pinned" if progress is not None else "not pinned", flush=True)
for step, line in enumerate(sys.stdin, 1):
    if line == "die\\n":
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(10):
        work = torch.mm(work, work).clamp_(-1, 1)  # the step takes a while
    pool.fill_(step)
    progress.write(step)
    print("launched", flush=True)
progress.close()
segment.close()
"""


@pytest.mark.parametrize("device", range(2))
async def test_the_gpu_says_itself_that_its_step_has_run(device: int) -> None:
    if device >= torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    if not Path("/dev/shm").is_dir():
        pytest.skip("only pages of a tmpfs are pinned")
    with TemporaryDirectory(dir="/dev/shm", prefix="penstock-test-") as folder:
        await _see_steps(Path(folder), device)


async def _see_steps(tmp_path: Path, device: int) -> None:
    command = [sys.executable, "-c", _PROMISING_OWNER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdin is not None and owner.stdout is not None
        assert owner.stdout.readline() == "pinned\n"
        mine = torch.zeros(4, 1024, device=f"cuda:{device}")
        transport = LocalTransport(str(tmp_path))
        transport.attach({"m": mine})
        ran = transport.progress_of(transport.host, "theirs", "m")
        assert ran is not None and ran() == 0
        for step in range(1, 20):
            transfer = transport.pull(
                remote(transport, [5, 2, 3], [0, 0, 0]),
                LocalBlocks(NOTHING, [0, 3, 1]),
                Awaited(step, ran, time.perf_counter()),
            )
            async with anyio.create_task_group() as group:
                group.start_soon(awaiting, transfer)
                await anyio.sleep(0.002)
                print("go", file=owner.stdin, flush=True)
            assert ran() == step
            assert (mine.cpu()[[0, 3, 1]] == step).all(), "what the step wrote is there, and what it wrote last"
        waits = Awaited(20, ran, time.perf_counter())
        transfer = transport.pull(remote(transport, [1], [0]), LocalBlocks(NOTHING, [0]), waits)
        async with anyio.create_task_group() as group:
            group.start_soon(_given_up, transfer)
            print("die", file=owner.stdin, flush=True)
            await anyio.sleep(0.2)
            await transfer.cancel()
        transport.close()


async def _given_up(transfer: Transfer) -> None:
    with pytest.raises(Cancelled):
        await transfer
