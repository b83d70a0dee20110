"""One stream of KV that arrives at a decode worker: what has been told of it, what was copied, and where that is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import anyio

from common.cache.grouped_pool import ArrivedBlock
from common.engine.known_tokens import KnownTokens
from common.engine.timeline import Event
from common.protocol.handles import GroupBlocks, WorkerRef
from common.transfer.transfer import Transfer

MAX_TOLD = 8
"""The latest parts of a stream that the request's timeline tells of."""


@dataclass(slots=True)
class Block:
    """One that is being copied (`arrived.is_owned`), or was. `source`: the owner's block and its generation. `is_full`: else it
    is a prompt's last one, without a hash."""

    arrived: ArrivedBlock
    source: tuple[int, int]
    is_full: bool = True


class Told(NamedTuple):
    """Blocks of one cache group that can be copied, and when a part said so. step: of the owner, if they can't be before it has
    run. due_at: when it should have, by `time.perf_counter`."""

    theirs: GroupBlocks
    heard_at: float
    step: int = 0
    due_at: float = 0.0


@dataclass(slots=True, eq=False)
class Arrival:
    """One stream. `prompt`: the tokens that came with its parts. `groups`: of each cache group, blocks by their index in the
    block table. `taken`: of each group, the indices of those that are a sequence's. `early_bytes`: of the sequence's KV, what
    had been copied before KvReady came. `is_over`: nothing more is copied for it. `copies`: the latest, for the timeline.
    `progress`: reads which step its owner has run last. `awaited_end`: of the copy that waits for a step or is under way, the
    index behind its last block. `num_unread`: parts whose tokens have not been looked at."""

    name: str
    request: str
    attempt: int
    owner: WorkerRef
    lease: str
    fingerprint: str
    began_at: float
    heard_at: float
    prompt: KnownTokens
    groups: list[dict[int, Block]]
    taken: list[set[int]]
    hashes: dict[int, bytes] = field(default_factory=dict)
    todo: deque[Told] = field(default_factory=deque)
    copies: deque[Event] = field(default_factory=lambda: deque(maxlen=MAX_TOLD))
    transfer: Transfer | None = None
    progress: Callable[[], int] | None = None
    awaited_end: int = 0
    idle: anyio.Event | None = None
    is_over: bool = False
    num_parts: int = 0
    num_unread: int = 0
    early_bytes: int = 0

    async def settled(self) -> None:
        """Wait until nothing is written into its blocks any more."""
        with anyio.CancelScope(shield=True):
            while self.idle is not None:
                await self.idle.wait()

    @property
    def facts(self) -> tuple[tuple[str, int], ...]:
        """What a request's timeline says of its stream."""
        return (("streamed_bytes", self.early_bytes), ("streamed_parts", self.num_parts))
