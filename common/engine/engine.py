"""What `open_engine` gives a worker: a runner, and the segment that holds its KV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from common.cache.grouped_pool import GroupedPool, PoolGroup
from common.cache.pool import BlockPool
from common.cache.retention import KEEP_ALL, Retention
from common.engine.board import HeadSlots, ProposalBoard
from common.engine.plan import Runner
from common.models.source import ModelFiles
from common.protocol.errors import ConfigError
from common.transfer.block_memory import BlockMemory, HostBlocks
from common.transfer.host_stage import HostStage
from common.transfer.measured import TransferCounts
from common.transfer.segment import Segment


@dataclass(slots=True)
class GroupMemory:
    """The segment that holds the KV blocks of one cache group, and what the group keeps of a sequence. `staged`: blocks in a
    GPU's memory, if a kvstore may have them."""

    segment: Segment
    retention: Retention = KEEP_ALL
    staged: BlockMemory | None = None

    @property
    def blocks(self) -> BlockMemory:
        """The blocks as a kvstore's client copies them; of 0 bytes where it can't."""
        return self.staged or HostBlocks(self.segment.blocks)


@dataclass(slots=True)
class Engine:
    """A runner and the memory of its KV blocks: of the first cache group, and of the others in `more`.
    `identity`: what its weights are, see `Presence`. `files`: the model's; None where nothing is known of its tokenizer.
    `head`: the name of what drafts in its steps; empty where nothing does. `looks_up`: whether its steps look up what they
    verify. `board`: where what they verify is posted until they begin; None: they can't read it. `head_slots`: of that board,
    where the head posts by itself; None: what it drafts comes with a step's result. `stage`: through which blocks in a GPU's
    memory pass to and from a kvstore. `tell`: see `DeviceRunner.tell_progress`."""

    runner: Runner
    memory: GroupMemory
    more: list[GroupMemory] = field(default_factory=list)
    on_gpu: bool = False
    identity: str = ""
    files: ModelFiles | None = None
    head: str = ""
    looks_up: bool = False
    board: ProposalBoard | None = None
    head_slots: HeadSlots | None = None
    stage: HostStage | None = None
    tell: Callable[[np.ndarray], Callable[[], None] | None] = lambda word: None
    _end_telling: Callable[[], None] | None = None

    @property
    def groups(self) -> list[GroupMemory]:
        return [self.memory, *self.more]

    @property
    def segment(self) -> Segment:
        """The first group's, whose name names those of the others, too (see `group_name`)."""
        return self.memory.segment

    def pool(self, fence: Callable[[], None], *, zero_retention: bool) -> GroupedPool:
        """Return the bookkeeping of all blocks. zero_retention: clear a block that nobody holds any more.

        :raises ConfigError: blocks in a GPU's memory can't be cleared yet.
        """
        if zero_retention and self.on_gpu:
            raise ConfigError("zero_retention is not supported on GPUs yet: use --device cpu", param="zero_retention")
        groups: list[PoolGroup] = []
        for group in self.groups:
            segment = group.segment
            wipe = _wiping(segment) if zero_retention else None
            pool = BlockPool(segment.num_blocks, self.runner.block_tokens, segment.generations, fence, wipe=wipe)
            groups.append(PoolGroup(pool, group.retention))
        return GroupedPool(*groups)

    def blocks(self, transfers: TransferCounts) -> list[BlockMemory]:
        """Return the blocks of each group as a kvstore's client copies them. `transfers` counts what passes through a stage."""
        if self.stage is not None:
            self.stage.transfers = transfers
        return [group.blocks for group in self.groups]

    def tell_progress(self) -> bool:
        """Have the GPU itself keep the segment's `progress`. False: whoever takes the results of steps must."""
        self._end_telling = self.tell(self.segment.progress)
        return self._end_telling is not None

    def give_up(self) -> None:
        """A step hangs, and the process is about to end: nothing waits for the GPU any more."""
        if self.stage is not None:
            self.stage.give_up()

    def close(self) -> None:
        if self._end_telling is not None:
            self._end_telling()
        if self.stage is not None:
            self.stage.close()
        for group in self.groups:
            group.segment.close()


def _wiping(segment: Segment) -> Callable[[int], None]:
    blocks = segment.blocks

    def wipe(block: int) -> None:
        blocks[block] = 0

    return wipe


OpenEngine = Callable[[str, Callable[[int, int], None]], Engine]
"""`open_engine(segment_name, on_progress)`; blocks (loads weights), called in a thread. `on_progress(done, total)`: bytes."""
