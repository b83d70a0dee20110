"""How workers of other hosts reach a worker's KV blocks: what it announces, and what it tells a reader that asks."""

from __future__ import annotations

import msgspec

from common.protocol.handles import WorkerRef


class KvEndpoint(msgspec.Struct, frozen=True, array_like=True):
    """A way in which workers of other hosts can read a worker's KV blocks, in its heartbeat.

    `transport`: nixl. `agent` names this life's memory there; a reader asks for the rest with DescribeMemory.
    `pull_us_per_token`: what a token of a prompt took to copy from another host, a moving average; 0: unknown.
    """

    transport: str
    agent: str
    pull_us_per_token: float = 0.0


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
    """

    worker: WorkerRef
    agent: str
    metadata: bytes
    pattern: int
    pattern_bytes: int
    regions: list[MemoryRegion]
