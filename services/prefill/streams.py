"""KV of prompts that are still computed, told to decode workers chunk by chunk: the prefill side of a streaming hand-off.

    chunk submitted  ─► KvPromise: the full blocks that it will have filled, leased from now on
                        └ KvWatched: the decode worker copies them when the step has run; KvParts are not needed
    chunk committed  ─► else KvPart: its full blocks ─► … ─► the last: KvPart, KvReady, same lease
    dropped, refused, lease over, a step failed ─► KvWithdrawn; the lease ends; what is still handed off is handed off whole

A group that keeps a window takes part with the blocks that KvReady will name, not with those that will have fallen out by then.
Blocks that were told do not change: a sequence's full blocks stay in its tables until the group lets go of them, and `rewind`
goes back to computed KV. With `kv_transfer nixl` a part waits for its checksums; parts may then overtake each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from anyio.abc import TaskGroup

from common.cache.grouped_pool import HOLE, GroupedPool
from common.cache.prefix import TOKEN_BYTES
from common.engine.engine import Engine
from common.engine.sequence import Sequence
from common.engine.sequence_cache import SequenceCache
from common.engine.timeline import Event
from common.protocol.handles import GroupBlocks, WorkerRef, new_lease
from common.protocol.messages import Message
from common.protocol.stream_messages import MAX_PART_BLOCKS, KvPart, KvPromise, KvWithdrawn
from common.runtime.leases import LeaseTable
from common.worker.remote_kv import RemoteKv

MIN_ONLY_PART_TOKENS = 1024
"""From so many tokens on, a prompt of one chunk is told ahead of its KvReady: less is copied in the time of a message."""


@dataclass(frozen=True, slots=True)
class Leased:
    """Blocks that a decode worker may read: a block table for each cache group. It grows while they are streamed."""

    request: str
    attempt: int
    tables: list[list[int]]


@dataclass(slots=True, eq=False)
class Stream:
    """`num_blocks`: of the block table that parts have told. `num_leased`: that parts or promises have. `checksums`: of each
    group's blocks, by block, where they are needed. `promised_at`: when the first so many blocks were promised, until a commit
    follows. `is_watched`: the decode worker needs no parts for what was promised. `is_over`: it is told nothing more."""

    name: str
    lease: str
    decode: WorkerRef
    leased: Leased
    num_blocks: int = 0
    num_leased: int = 0
    checksums: list[dict[int, int]] = field(default_factory=list)
    promised_at: dict[int, float] = field(default_factory=dict)
    is_watched: bool = False
    is_over: bool = False


class Owner(Protocol):
    """What streams need of their worker."""

    ref: WorkerRef
    task_group: TaskGroup
    engine: Engine
    pool: GroupedPool
    cache: SequenceCache
    remote: RemoteKv
    leases: LeaseTable[Leased]
    clock: Callable[[], float]

    def send(self, to: WorkerRef | str, message: Message) -> None: ...
    def end_lease(self, lease: str) -> None: ...


class Streams:
    def __init__(self, worker: Owner) -> None:
        self._worker = worker
        self._streams: dict[Sequence, Stream] = {}
        self._by_lease: dict[str, Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def promise(self, sequence: Sequence, decode: WorkerRef, end: int, step: int, due_s: float) -> None:
        """A step computes a prompt's tokens up to `end`, and has not ended: tell the decode worker what will be readable then.

        step: by which number the segment will say that it has run. due_s: in how many seconds that is expected.
        """
        if self._worker.remote.has_checksums:
            return  # there are none before there is KV
        stream = self._streams.get(sequence) or self._new(sequence, decode)
        is_only = stream.num_leased == 0 and end >= len(sequence.tokens)
        if stream.is_over or stream.decode != decode or (is_only and end < MIN_ONLY_PART_TOKENS):
            return
        num_blocks = end // self._worker.cache.block_tokens
        parts = self._leased(sequence, stream, num_blocks, end if end >= len(sequence.tokens) else 0)
        for part in parts:
            self._worker.send(decode, KvPromise(part=part, step=step, due_us=round(1e6 * due_s)))
        if parts:
            stream.promised_at[stream.num_leased] = self._worker.clock()

    def advance(self, sequence: Sequence, decode: WorkerRef) -> None:
        """A chunk of a prompt was committed, and is not its last: tell the decode worker what is readable now."""
        stream = self._streams.get(sequence) or self._new(sequence, decode)
        end = sequence.num_computed // self._worker.cache.block_tokens
        promised = min(end, stream.num_leased)
        parts: list[KvPart] = []
        if not (stream.is_over or stream.is_watched):
            parts += self._parts(sequence, stream, stream.num_blocks, promised)
        parts += self._leased(sequence, stream, end)
        begin, stream.num_blocks, told_at = stream.num_blocks, end, stream.promised_at.pop(end, None)
        for part in parts:
            if self._worker.remote.has_checksums:
                self._worker.task_group.start_soon(self._send_checked, stream, part)
            else:
                self._worker.send(stream.decode, part)
        if parts or told_at is not None:
            told_at = self._worker.clock() if parts or told_at is None else told_at
            if sequence.timeline is not None:
                num_tokens = (end - begin) * self._worker.cache.block_tokens
                sequence.timeline.note(Event("part", told_at, told_at, num_tokens, stream.decode.id))

    def advance_last(self, sequence: Sequence, decode: WorkerRef) -> None:
        """The last chunk was committed, and KvReady is about to be made: the decode worker copies meanwhile what it will name.

        With checksums it is not worth while: KvReady waits for the same ones. Nor is it for a short prompt of one chunk.
        """
        stream = self._streams.get(sequence)
        is_worth_it = sequence.num_computed >= MIN_ONLY_PART_TOKENS if stream is None else stream.decode == decode
        if is_worth_it and not self._worker.remote.has_checksums:
            self.advance(sequence, decode)

    def watched(self, holder: WorkerRef, streams: Iterable[str]) -> None:
        """The decode worker `holder` copies what it is promised of these when it is there."""
        for stream in self._by_lease.values():
            if stream.decode == holder and stream.name in streams:
                stream.is_watched = True

    def step_failed(self) -> None:
        """What was promised of steps that have not been committed is not there, and later ones may say they have run."""
        for stream in list(self._streams.values()):
            if stream.num_leased > stream.num_blocks:
                self._over(stream)

    def finish(self, sequence: Sequence, decode: WorkerRef) -> Stream | None:
        """The prompt is computed, and is handed off to `decode`: return its stream, whose lease is the caller's from now on."""
        stream = self._streams.get(sequence)
        if stream is None:
            return None
        if stream.is_over or stream.decode != decode:
            self.withdraw(sequence)
            return None
        self._forget(sequence, stream)
        return stream

    def withdraw(self, sequence: Sequence) -> None:
        """There will be no hand-off. Harmless for a sequence that is not streamed."""
        stream = self._streams.get(sequence)
        if stream is not None:
            self._forget(sequence, stream)
            self._over(stream)
            self._worker.end_lease(stream.lease)

    def refused(self, stream: Stream) -> None:
        """The decode worker did not take what `finish` returned. The lease is the caller's to end."""
        self._over(stream)

    def lease_ended(self, lease: str) -> None:
        """The decode worker has let go, or did not renew it: tell it nothing more. Harmless for other leases."""
        stream = self._by_lease.pop(lease, None)
        if stream is not None:
            self._over(stream)

    def clear(self) -> None:
        """All leases have ended, and nobody knows this life of the worker any more."""
        self._streams.clear()
        self._by_lease.clear()

    def _new(self, sequence: Sequence, decode: WorkerRef) -> Stream:
        """Return a stream that nobody knows of before `_leased` has something to tell."""
        groups: list[list[int]] = [[] for _ in self._worker.pool.groups]
        leased = Leased(sequence.request, sequence.attempt, groups)
        # one that ends with its first token here is not streamed
        is_over = sequence.sampling.max_tokens <= sequence.num_outputs + 1
        return Stream(new_lease(), new_lease(), decode, leased, checksums=[{} for _ in groups], is_over=is_over)

    def _leased(self, sequence: Sequence, stream: Stream, end: int, covered: int = 0) -> list[KvPart]:
        """Return what is new of the first `end` blocks, as parts whose blocks are leased from now on. covered: see `_parts`."""
        worker = self._worker
        parts = [] if stream.is_over else list(self._parts(sequence, stream, stream.num_leased, end, covered))
        if not parts:
            return []
        if sequence not in self._streams:
            worker.leases.grant(stream.lease, stream.decode, stream.leased, worker.clock())
            self._streams[sequence] = self._by_lease[stream.lease] = stream
        stream.num_leased = end
        for part in parts:
            tables: list[list[int]] = [[] for _ in worker.pool.groups]
            for blocks in part.groups:
                tables[blocks.group] = blocks.blocks
                stream.leased.tables[blocks.group].extend(blocks.blocks)
            worker.pool.lease(tables)
        return parts

    def _over(self, stream: Stream) -> None:
        if not stream.is_over:
            stream.is_over = True
            self._worker.send(stream.decode, KvWithdrawn(owner=self._worker.ref, streams=[stream.name]))

    def _forget(self, sequence: Sequence, stream: Stream) -> None:
        del self._streams[sequence]
        self._by_lease.pop(stream.lease, None)

    def _parts(self, sequence: Sequence, stream: Stream, begin: int, end: int, covered: int = 0) -> Iterator[KvPart]:
        """The blocks [begin, end) of the block table, as messages of a bounded size, as far as any group sends some of them.

        covered: the tokens of a whole prompt, whose last block, though it is not full, goes with the others.
        """
        worker, size = self._worker, self._worker.cache.block_tokens
        hashes = worker.cache.hash(sequence, end * size)
        for start in range(begin, end, MAX_PART_BLOCKS):
            stop = min(end, start + MAX_PART_BLOCKS)
            groups: list[GroupBlocks] = []
            last = max(covered, stop * size) if stop == end else stop * size
            for index, (group, table) in enumerate(zip(worker.pool.groups, sequence.tables, strict=True)):
                first = max(start, worker.cache.first_block(index, len(sequence.tokens)))
                blocks = table[first : worker.cache.blocks_for(last)]
                if blocks and HOLE not in blocks:
                    groups.append(GroupBlocks(index, blocks, group.pool.generations_of(blocks), first * size, last))
            if not groups:
                continue
            yield KvPart(
                owner=worker.ref,
                request=sequence.request,
                attempt=sequence.attempt,
                stream=stream.name,
                lease=stream.lease,
                fingerprint=worker.engine.runner.fingerprint,
                start=start,
                hashes=hashes[start:stop],
                groups=groups,
                tokens=sequence.generation.tokens[TOKEN_BYTES * start * size : TOKEN_BYTES * stop * size],
                salt=sequence.generation.salt,
            )

    async def _send_checked(self, stream: Stream, part: KvPart) -> None:
        groups = await self._worker.remote.with_checksums(part.groups, stream.checksums)
        if stream.is_over or stream.lease not in self._by_lease:
            return  # KvReady has all of it, or nobody wants it
        self._worker.send(stream.decode, msgspec.structs.replace(part, groups=groups))
