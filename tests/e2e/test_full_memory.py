"""A full tmpfs, on real processes: who has no room is refused in a line, and who runs goes on, with every answer right."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
import pytest_asyncio

from common.models.source import ModelFiles
from common.protocol.handles import Role
from tests.chaos.site import simulated_jobs
from tests.e2e.stack import Reply, Stack
from tests.fixtures.tmpfs import small_tmpfs

MIB = 1 << 20
PAGE = os.sysconf("SC_PAGESIZE")


@pytest_asyncio.fixture
async def stack(nats_server: str, tmp_path: Path, smollm2: ModelFiles) -> AsyncIterator[Stack]:
    """24 MiB of shared memory; workers of 8 MiB."""
    flags = ("--engine", "simulated", "--kv-cache-mb", "8")
    stack = Stack(nats_server, tmp_path, flags=("--model", smollm2.name), engine_flags=flags)
    async with stack:
        stack.shm_dir.rmdir()
        with small_tmpfs(stack.shm_dir, size=24 * MIB):
            yield stack
            await stack.stop()


@pytest.mark.slow
async def test_two_workers_and_a_store_fill_it_and_nobody_dies(stack: Stack, smollm2: ModelFiles) -> None:
    await stack.start("gateway", "--direct-max-tokens", "-1")
    for role in ("prefill", "decode"):
        await stack.start(role)
    await stack.start("kvstore", "--capacity-mb", "4")
    await stack.ready()

    too_many: list[tuple[Role, str, str]] = [("decode", "kv_cache_mb", "8"), ("kvstore", "capacity_mb", "16")]
    for role, wanted, refused in too_many:
        flags = ("--capacity-mb", refused) if role == "kvstore" else ()
        name = await stack.start(role, *flags, name=f"{role}-too-many")
        assert await stack.ended(name) == 2
        (line,) = [line for line in stack.log(name).splitlines() if line.startswith(f"penstock {role}: ")]
        assert f"has room for {_room(stack.shm_dir) // MIB} MiB more" in line and wanted in line
        assert "Traceback" not in stack.log(name)

    with (stack.shm_dir / "greedy").open("wb") as greedy:
        os.posix_fallocate(greedy.fileno(), 0, _room(stack.shm_dir) - 40 * PAGE)
    await ask(stack, smollm2, seed=1)
    assert _room(stack.shm_dir) == 0, "the store took what there was"
    log = stack.log("kvstore-0")
    assert log.count("no_memory_for_blocks") == 1 and "No space left on device" in log
    with anyio.fail_after(10):  # copies go on behind the answers
        while stack.presence("kvstore-0").kv.cached <= 20:
            await anyio.sleep(0.05)
    assert stack.presence("kvstore-0").kv.total >= stack.presence("kvstore-0").kv.cached

    (stack.shm_dir / "greedy").unlink()
    await ask(stack, smollm2, seed=2)
    assert all(process.poll() is None for process in stack.processes.values())
    await stack.clean()


async def ask(stack: Stack, files: ModelFiles, *, seed: int) -> None:
    """Sixteen requests at once, each with the text that it must get."""
    jobs, replies = simulated_jobs(files, seed), [Reply() for _ in range(16)]
    asked = [next(jobs) for _ in replies]
    random.Random(seed).shuffle(asked)
    async with anyio.create_task_group() as group:
        for job, reply in zip(asked, replies, strict=True):
            group.start_soon(lambda job=job, reply=reply: stack.complete(reply=reply, **job.body))
    for job, reply in zip(asked, replies, strict=True):
        assert (reply.error, reply.text) == (None, job.expected())


def _room(directory: Path) -> int:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize
