"""How workers of other hosts reach a worker's KV blocks: what it announces, and what it tells a reader that asks."""

from __future__ import annotations

import msgspec

from common.protocol.handles import WorkerRef


class KvEndpoint(msgspec.Struct, frozen=True, array_like=True):
    """A way in which workers of other hosts can read a worker's KV blocks, in its heartbeat.

    `transport`: nixl. `agent` names this life's memory there; a reader asks for the rest with DescribeMemory.
    `pull_us_per_token`: what a token of a prompt took to copy from another host, a moving average; 0: unknown. `unreachable`:
    agents of prefill workers of other hosts that this worker has tried to read and can't read now.
    """

    transport: str
    agent: str
    pull_us_per_token: float = 0.0
    unreachable: list[str] = []


class MemoryRegion(msgspec.Struct, frozen=True, array_like=True):
    """The blocks of one cache group in their owner's memory: block i is `block_bytes` long and begins at address
    `blocks + i * block_bytes`; its generation is the uint64 at `generations + 8 * i`."""

    segment: str
    fingerprint: str
    num_blocks: int
    block_bytes: int
    blocks: int
    generations: int


class DescribeMemory(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """reader → owner: where are your blocks? Answered by MemoryDescribed, or Rejected where other hosts can't read them."""

    holder: WorkerRef


class MemoryDescribed(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """owner → reader: `metadata` is what NIXL's agent `agent` says of itself and its registered memory.

    `pattern`: the address of `pattern_bytes` that both sides can work out, which a reader copies first to test the path.
    `staging`: the address of `staging_bytes` where a kvstore, or a worker whose blocks are in a GPU's memory, puts copies of
    blocks for readers of other hosts.
    """

    worker: WorkerRef
    agent: str
    metadata: bytes
    pattern: int
    pattern_bytes: int
    regions: list[MemoryRegion]
    staging: int = 0
    staging_bytes: int = 0


class StageBlocks(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """worker → kvstore of another host: copy blocks [start, end) of my lease to where I can read them. Answered by BlocksStaged
    once they are there, or Rejected where there is no room now.

    The holder names what it asks for, `stage`, so that it can give back an answer that it never got.
    """

    holder: WorkerRef
    lease: str
    stage: str
    start: int
    end: int


class StageLeased(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """reader → prefill worker of another host, whose blocks are in a GPU's memory: copy these blocks of a cache group, which a
    lease of mine covers, to where I can read them. Answered by BlocksStaged once they are there, or Rejected: `out_of_credits`
    where there is no room now.

    The holder names what it asks for, `stage`, as in StageBlocks. `generations[i]`: that of `blocks[i]` in the handle.
    """

    holder: WorkerRef
    lease: str
    stage: str
    group: int
    blocks: list[int]
    generations: list[int]


class BlocksStaged(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """owner → reader: the blocks are in my staging buffer until UnstageBlocks, or until the lease ends.

    `extents`: (address, blocks) of stretches that hold all of them in order, one behind the other. `checksums[i]`: the CRC-32
    of block i; fewer than blocks where one is damaged in a kvstore: those from it on must not be read.
    """

    owner: WorkerRef
    stage: str
    block_bytes: int
    extents: list[tuple[int, int]]
    checksums: list[int]


class UnstageBlocks(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """reader → owner: I have read these, or never will. Harmless twice."""

    stages: list[str]
