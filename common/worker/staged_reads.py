"""Reading what an owner of another host has staged: a kvstore's blocks, or those of a worker with a GPU.

    StageBlocks, StageLeased ─► BlocksStaged ─► read over NIXL ─► checksums ─► the pool ─► UnstageBlocks

Bytes count only if they have the checksums that came over NATS: an answer that is damaged, of another life of the owner or of
another question, and an owner that gave the staged bytes to somebody else meanwhile, are noticed by that.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio.to_thread
import numpy as np

from common.protocol.errors import ProtocolError, from_wire
from common.protocol.handles import WorkerRef
from common.protocol.messages import Message, Rejected
from common.protocol.transfer_messages import BlocksStaged, StageBlocks, StageLeased, UnstageBlocks
from common.runtime.actor import Actor
from common.transfer.block_memory import BlockMemory
from common.transfer.measured import TransferCounts
from common.transfer.nixl import NixlTransport
from common.transfer.paths import KvPath

NUM_READERS = 4
"""Parts of one lease that are staged, read or checked at once (docs/decisions/0104)."""


Question = StageBlocks | StageLeased


class StagedReads:
    """`path`: under which copies are counted."""

    def __init__(self, actor: Actor, transport: NixlTransport, counts: TransferCounts, path: KvPath) -> None:
        self._actor = actor
        self._transport = transport
        self._counts = counts
        self._path: KvPath = path

    async def read(
        self,
        owner: WorkerRef,
        agent: str,
        question: Question,
        memory: BlockMemory,
        into_blocks: list[int],
        expected: Sequence[int] | None,
        *,
        timeout_s: float,
    ) -> int:
        """Copy blocks to `into_blocks` of `memory`. Returns how many of them, from the first on, have their content.

        `agent`: the owner's. `expected`: the blocks' checksums, if they are known before: the owner may then stage fewer blocks
        than were asked for. `timeout_s`: for its answer. When this ends, however it does, nothing writes there any more.

        :raises OutOfCredits: the owner has no room now. :raises PenstockError: they can't be read; the blocks hold anything.
        """
        try:
            answer = await self._actor.ask(owner, question, timeout_s)
            staged = checked(answer, owner, question, memory.block_bytes, len(into_blocks), expected)
            return await anyio.to_thread.run_sync(self._copy, agent, staged, memory, into_blocks)
        finally:
            self._actor.send(owner, UnstageBlocks(stages=[question.stage]))

    def _copy(self, agent: str, staged: BlocksStaged, memory: BlockMemory, into_blocks: list[int]) -> int:
        """In a thread. :raises StaleHandle, TransportUnavailable: the blocks hold anything."""
        size, checksums = staged.block_bytes, staged.checksums
        addresses = [address + row * size for address, num_blocks in staged.extents for row in range(num_blocks)]

        def fill(rows: np.ndarray, indices: Sequence[int], part: range) -> int:
            mine = slice(part.start, part.stop)
            with self._counts.measure(self._path, "read") as copy:
                copy.num_bytes = self._transport.read_staged(agent, addresses[mine], checksums[mine], rows, indices)
            return len(part)

        return memory.write(into_blocks[: len(checksums)], fill)


def checked(
    answer: Message, owner: WorkerRef, question: Question, block_bytes: int, num_blocks: int, expected: Sequence[int] | None
) -> BlocksStaged:
    """Return an answer if it is one to the question. :raises PenstockError: the owner has not staged what was asked for."""
    if isinstance(answer, Rejected):
        raise from_wire(answer.code, answer.message)
    if not isinstance(answer, BlocksStaged):
        raise ProtocolError(f"{type(answer).__name__} in answer to {type(question).__name__}")
    num_good = len(answer.checksums)
    if (
        answer.owner != owner
        or answer.stage != question.stage
        or answer.block_bytes != block_bytes
        or any(count <= 0 for _, count in answer.extents)
        or sum(count for _, count in answer.extents) != num_blocks
        or not num_good
        or (num_good != num_blocks if expected is None else answer.checksums != expected[:num_good])
    ):
        raise ProtocolError("staged blocks that are not those of the lease")
    return answer
