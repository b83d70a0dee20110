"""KV of prompts that are still computed elsewhere, as it arrives: the decode worker's side of a streaming hand-off.

    KvPart ─► blocks taken ─► pulled ─► set aside: the worker's own, until somebody else needs the memory ─► the next part …
                  KvReady ─► what KvReady names, too, becomes the sequence's; the rest of the KV is pulled as always
    KvWithdrawn, Cancel, owner lost, fenced, drain, silence ─► the copy is given up ─► all blocks free

A stream can cost time, never correctness: a part that is lost, or for which there was no room, is pulled behind KvReady. A
block counts only where KvReady names the same block of the same generation at the same place, and its hash is that of the
tokens. What was set aside is given up before any sequence is preempted or refused. What is being written can't be; it is a
bounded part of the pool, and leaves a block to every sequence.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import anyio

from common.cache.grouped_pool import HOLE, Arrived, ArrivedBlock
from common.cache.prefix import HASH_BYTES, TOKEN_BYTES
from common.cache.spec import group_name
from common.engine.known_tokens import KnownTokens
from common.engine.sequence import Sequence
from common.engine.timeline import Event
from common.protocol.errors import Cancelled, PenstockError
from common.protocol.handles import GroupBlocks, WorkerRef
from common.protocol.messages import KvReady, ReleaseLease
from common.protocol.stream_messages import MAX_PART_BLOCKS, KvPart
from common.runtime import logs
from common.transfer.base import LocalBlocks, RemoteBlocks
from common.transfer.transfer import Transfer
from services.decode.kv_source import Reader, is_known, way_to

log = logs.get("decode")

SILENT_S = 30.0
"""Seconds without a part after which a stream is given up."""
MAX_WRITTEN_SHARE = 8
"""One copy of a stream writes at most this part of a cache group's blocks: nobody else can have them before it has ended."""
MAX_TOLD = 8
"""The latest parts of a stream that the request's timeline tells of."""
MAX_ENDED = 4096
"""Streams that are remembered as over, so that a late part does not begin them anew."""


@dataclass(slots=True)
class _Block:
    """One that is being copied (`arrived.is_owned`), or was. `source`: the owner's block and its generation."""

    arrived: ArrivedBlock
    source: tuple[int, int]


class _Told(NamedTuple):
    """Blocks of one cache group that can be copied, and when a part said so."""

    theirs: GroupBlocks
    heard_at: float


@dataclass(slots=True, eq=False)
class Arrival:
    """One stream. `prompt`: the tokens that came with its parts. `groups`: of each cache group, blocks by their index in the
    block table. `taken`: of each group, the indices of those that are a sequence's. `early_bytes`: of the sequence's KV, what
    had been copied before KvReady came. `is_over`: nothing more is copied for it. `copies`: the latest, for the timeline.
    `num_unread`: parts whose tokens have not been looked at."""

    name: str
    request: str
    attempt: int
    owner: WorkerRef
    lease: str
    fingerprint: str
    began_at: float
    heard_at: float
    prompt: KnownTokens
    groups: list[dict[int, _Block]]
    taken: list[set[int]]
    hashes: dict[int, bytes] = field(default_factory=dict)
    todo: deque[_Told] = field(default_factory=deque)
    copies: deque[Event] = field(default_factory=lambda: deque(maxlen=MAX_TOLD))
    transfer: Transfer | None = None
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


class Arrivals:
    """`max_streams`: further ones are ignored; their KV is pulled behind KvReady."""

    def __init__(self, worker: Reader, *, max_streams: int) -> None:
        self._worker = worker
        self._max_streams = max_streams
        self._arrivals: dict[str, Arrival] = {}
        self._ended: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._arrivals)

    @property
    def leases(self) -> list[tuple[str, WorkerRef]]:
        """Those to renew, with their owners."""
        return [(one.lease, one.owner) for one in self._arrivals.values()]

    def on_part(self, part: KvPart) -> None:
        """Copy what a part names, in the background. What can't be is left to KvReady."""
        worker, arrival = self._worker, self._arrivals.get(part.stream)
        if part.stream in self._ended:
            return
        if not self._is_sound(part):
            log.warning("kv_part_refused", request=part.request, owner=part.owner.id, start=part.start)
            return
        if arrival is None:
            is_ours = is_known(worker, part.owner) and part.fingerprint == worker.engine.runner.fingerprint
            if not is_ours or len(self) >= self._max_streams:
                return
            self._end([one for one in self._arrivals.values() if one.request == part.request and one.attempt < part.attempt])
            now = worker.clock()
            groups: list[dict[int, _Block]] = [{} for _ in worker.cache.pool.groups]
            taken: list[set[int]] = [set() for _ in groups]
            prompt = KnownTokens(
                block_tokens=worker.cache.block_tokens,
                fingerprint=worker.cache.fingerprint,
                salt=part.salt,
                vocab_size=worker.engine.runner.vocab_size,
            )
            names = (part.stream, part.request, part.attempt, part.owner, part.lease, part.fingerprint)
            arrival = Arrival(*names, now, now, prompt, groups, taken)
            self._arrivals[part.stream] = arrival
        elif (part.owner, part.request, part.attempt, part.lease) != (
            arrival.owner,
            arrival.request,
            arrival.attempt,
            arrival.lease,
        ):
            return
        arrival.heard_at = worker.clock()
        arrival.num_parts += 1
        arrival.hashes.update(enumerate(part.hashes, part.start))
        if not arrival.is_over:
            arrival.todo.extend(_Told(theirs, arrival.heard_at) for theirs in part.groups)
            if arrival.idle is None:
                arrival.idle = anyio.Event()
                worker.task_group.start_soon(self._copy, arrival)
        arrival.num_unread += 1
        worker.task_group.start_soon(self._read, arrival, part)  # while the copy runs

    def withdraw(self, owner: WorkerRef, streams: Iterable[str]) -> None:
        """The prefill worker won't hand these off to us."""
        for name in streams:
            arrival = self._arrivals.get(name)
            if arrival is None:
                self._remember(name)
            elif arrival.owner == owner:
                self._end([arrival], tell=False)

    def cancel(self, requests: Iterable[tuple[str, int]]) -> None:
        """Nobody wants these requests, up to these attempts."""
        if not self._arrivals:
            return
        attempts = dict(requests)
        self._end([one for one in self._arrivals.values() if one.attempt <= attempts.get(one.request, -1)])

    def lost(self, owner: WorkerRef) -> None:
        """This life of a prefill worker is over."""
        self._end([one for one in self._arrivals.values() if one.owner == owner], tell=False)

    def clear(self) -> None:
        """End all streams: this worker drains, or has been fenced."""
        self._end(list(self._arrivals.values()))

    def tick(self, now: float) -> None:
        """End streams of which nothing has been heard for long, or whose owner is not known any more."""
        for arrival in list(self._arrivals.values()):
            if now - arrival.heard_at > SILENT_S:
                log.warning("kv_stream_silent", request=arrival.request, owner=arrival.owner.id, silent_s=SILENT_S)
                self._end([arrival])
            elif not is_known(self._worker, arrival.owner):
                self._end([arrival], tell=False)

    # -- KvReady

    def is_beginning(self, stream: str) -> bool:
        """Whether a part has come whose copy begins, and whose tokens are read, in the next turn of the event loop."""
        arrival = self._arrivals.get(stream)
        return arrival is not None and arrival.num_unread > 0

    def find(self, ready: KvReady) -> Arrival | None:
        """Return the stream that came before a hand-off, if it is known here."""
        arrival = self._arrivals.get(ready.stream) if ready.stream else None
        if arrival is None:
            return None
        says = (ready.handle.owner, ready.handle.lease, ready.handle.fingerprint)
        says += (ready.generation.request, ready.generation.attempt)
        knows = (arrival.owner, arrival.lease, arrival.fingerprint, arrival.request, arrival.attempt)
        return arrival if says == knows else None

    def usable(self, arrival: Arrival | None, ready: KvReady, sequence: Sequence) -> Arrived:
        """Return the blocks that hold, or will, what the hand-off names for these tokens, for `SequenceCache.open`."""
        if arrival is None:
            return ()
        cache, arrived, told = self._worker.cache, list[dict[int, ArrivedBlock]](), arrival.hashes
        hashes = cache.hash(sequence, len(sequence.tokens) - 1)
        for theirs, mine in zip(ready.handle.groups, arrival.groups, strict=True):
            first = theirs.start // cache.block_tokens
            named = list(zip(theirs.blocks, theirs.generations, strict=True))
            end = min(len(hashes), first + len(named))
            arrived.append(
                {
                    index: one.arrived
                    for index, one in mine.items()
                    if first <= index < end and named[index - first] == one.source and told[index] == hashes[index]
                }
            )
        return arrived

    def take(self, arrival: Arrival, arrived: Arrived) -> None:
        """The sequence was admitted with what `arrived` still holds: the stream is over, and all other blocks of it free."""
        self._forget(arrival)
        for index, (mine, group) in enumerate(zip(arrived, self._worker.engine.groups, strict=True)):
            arrival.taken[index].update(mine)
            arrival.early_bytes += sum(not one.is_owned for one in mine.values()) * group.segment.block_bytes
            for place in arrival.groups[index].keys() - mine.keys():
                self._drop(arrival, index, place)

    async def _read(self, arrival: Arrival, part: KvPart) -> None:
        """Check and hash the tokens of a part."""
        arrival.num_unread -= 1
        arrival.prompt.extend(part.start, part.tokens)

    # -- copies

    async def _copy(self, arrival: Arrival) -> None:
        """Copy what is to do, one piece of a group at a time."""
        try:
            while arrival.todo and not arrival.is_over:
                await self._copy_blocks(arrival, *arrival.todo.popleft())
        except Cancelled:
            pass
        except PenstockError as error:
            self._worker.remote.failed(error)
            log.warning("kv_stream_failed", request=arrival.request, owner=arrival.owner.id, code=error.code, reason=str(error))
            arrival.is_over = True  # what is here stays; what is not is tried once more behind KvReady
        finally:
            arrival.todo.clear()
            idle, arrival.idle = arrival.idle, None
            if idle is not None:
                idle.set()

    async def _copy_blocks(self, arrival: Arrival, theirs: GroupBlocks, heard_at: float) -> None:
        """:raises StaleHandle, TransportUnavailable, Cancelled: what has not been copied is not among the blocks any more."""
        worker, cache = self._worker, self._worker.cache
        owner, transport = await way_to(worker, arrival.owner, arrival.fingerprint, arrival.lease)
        pool, mine = cache.pool.groups[theirs.group].pool, arrival.groups[theirs.group]
        size, first = max(1, pool.num_blocks // MAX_WRITTEN_SHARE), theirs.start // cache.block_tokens
        lacking = [i for i in range(len(theirs.blocks)) if first + i not in mine and not self._is_here(arrival, theirs, i)]
        memory = worker.engine.groups[theirs.group].segment.blocks
        segment, fingerprint = (group_name(name, theirs.group) for name in (owner.segment, arrival.fingerprint))
        source = RemoteBlocks(owner.host, segment, fingerprint, theirs.blocks, theirs.generations, theirs.checksums)
        for start in range(0, len(lacking), size):
            part = lacking[start : start + size]
            room = pool.available - pool.num_aside - worker.scheduler.num_held - 1  # each sequence may need a block next
            if arrival.is_over or len(part) > room:
                return
            taken = pool.allocate(len(part))
            generations = pool.generations_of(taken)
            for i, block, generation in zip(part, taken, generations, strict=True):
                source_block = (theirs.blocks[i], theirs.generations[i])
                mine[first + i] = _Block(ArrivedBlock(block, generation, is_owned=True), source_block)
            transfer = arrival.transfer = transport.pull(source.pick(part), LocalBlocks(memory, taken))
            is_copied, began_at = False, worker.clock()
            try:
                await transfer
                is_copied = True
            finally:
                arrival.transfer = None
                self._written(arrival, theirs.group, [first + i for i in part], is_copied)
            times = transfer.facts(waited_s=began_at - heard_at)
            copied = Event("part", heard_at, worker.clock(), len(part) * cache.block_tokens, arrival.owner.id, facts=times)
            arrival.copies.append(copied)

    def _is_here(self, arrival: Arrival, theirs: GroupBlocks, i: int) -> bool:
        """Whether this worker's own cache has the block: it need not be copied, unless it is evicted before KvReady."""
        index = theirs.start // self._worker.cache.block_tokens + i
        return self._worker.cache.pool.groups[theirs.group].pool.find(arrival.hashes.get(index, b"")) != HOLE

    def _written(self, arrival: Arrival, group: int, indices: list[int], is_copied: bool) -> None:
        """A copy into these blocks has ended."""
        if is_copied and arrival.taken[group].issuperset(indices):
            return  # a sequence waits for them
        mine, pool = arrival.groups[group], self._worker.cache.pool.groups[group].pool
        for index in indices:
            block, generation, _ = mine[index].arrived
            mine[index].arrived = ArrivedBlock(block, generation, is_owned=False)
            if index in arrival.taken[group]:
                if not is_copied:
                    arrival.taken[group].remove(index)  # the block is the sequence's, and is pulled into once more
                    del mine[index]
            elif is_copied and arrival.name in self._arrivals:
                pool.set_aside([block])
            else:
                pool.release([block])
                del mine[index]
        self._worker.wake()  # somebody may have waited for these blocks

    # -- ends

    def _end(self, arrivals: Iterable[Arrival], *, tell: bool = True) -> None:
        """Give up streams and their blocks, those that are written now once that has ended. `tell`: free the lease, too."""
        for arrival in arrivals:
            self._forget(arrival)
            if arrival.transfer is not None:
                arrival.transfer.stop()
            for index, mine in enumerate(arrival.groups):
                for place in list(mine):
                    self._drop(arrival, index, place)
            if tell:
                self._worker.send(arrival.owner, ReleaseLease(leases=[arrival.lease]))

    def _drop(self, arrival: Arrival, group: int, index: int) -> None:
        """Free a block that no sequence has taken; one that is written is freed when that has ended."""
        block, generation, is_written = arrival.groups[group][index].arrived
        pool = self._worker.cache.pool.groups[group].pool
        if is_written:
            return
        if pool.take_back(block, generation):
            pool.release([block])
        del arrival.groups[group][index]

    def _forget(self, arrival: Arrival) -> None:
        arrival.is_over = True
        self._arrivals.pop(arrival.name, None)
        self._remember(arrival.name)

    def _remember(self, name: str) -> None:
        self._ended[name] = None
        while len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    def _is_sound(self, part: KvPart) -> bool:
        """Whether a part can be what it says it is; anything else is nobody's KV."""
        cache, count = self._worker.cache, len(part.hashes)
        longest = cache.blocks_for(self._worker.engine.runner.max_context)
        if not 0 < count <= MAX_PART_BLOCKS or not 0 <= part.start <= longest - count:
            return False
        if any(len(block_hash) != HASH_BYTES for block_hash in part.hashes):
            return False
        if len(part.tokens) not in (0, TOKEN_BYTES * cache.block_tokens * count):
            return False
        size, groups = cache.block_tokens, [theirs.group for theirs in part.groups]
        if len(set(groups)) < len(groups) or not set(groups) <= set(range(len(cache.pool.groups))):
            return False
        return all(
            theirs.start % size == theirs.end % size == 0
            and part.start * size <= theirs.start < theirs.end <= (part.start + count) * size
            and len(theirs.blocks) == len(theirs.generations) == (theirs.end - theirs.start) // size
            and len(theirs.checksums) in (0, len(theirs.blocks))
            for theirs in part.groups
        )
