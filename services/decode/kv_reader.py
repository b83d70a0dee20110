"""How the KV of a hand-off comes here: copied from the prefill worker's blocks, whose lease is renewed meanwhile.

KvReady admitted ─► blocks that no stream brought are pulled, a group at a time; what the stream still writes has ended
    ─► lease released ─► the sequence runs
    ├ stale, unreadable, another layout: the sequence runs all the same, and computes what is missing
    └ dropped meanwhile: the transfer is given up, and the blocks are freed once nothing writes them
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel

from common.cache.spec import group_name
from common.engine.sequence import Sequence
from common.engine.sequence_cache import SequenceCache
from common.engine.timeline import DRAFTED
from common.protocol.errors import Cancelled, PenstockError, ProtocolError, StaleHandle
from common.protocol.handles import GroupBlocks, KvHandle, WorkerRef
from common.protocol.messages import Presence, ReleaseLease, RenewLeases
from common.runtime import logs
from common.transfer.base import LocalBlocks, RemoteBlocks, Transport
from common.transfer.transfer import Transfer
from services.decode.arrivals import Arrival
from services.decode.kv_source import Reader, way_to

log = logs.get("decode")

SUBMIT_S = 0.002
"""Seconds after which a first step has been submitted: hashes of a long prompt's blocks are work for the time that it runs."""


class KvReader:
    def __init__(self, worker: Reader) -> None:
        self._worker = worker
        self._pulling: dict[str, WorkerRef] = {}
        self._transfers: dict[Sequence, list[Transfer]] = {}

    def begin(self, sequence: Sequence, handle: KvHandle, arrival: Arrival | None, heard_at: float) -> None:
        """Copy the blocks of an admitted sequence that are not here yet. Call it in the turn that admitted it.

        arrival: the stream that came before, whose blocks the sequence was admitted with. heard_at: when KvReady came.
        """
        self._worker.scheduler.begin_copy(sequence)
        self._pulling[handle.lease] = handle.owner
        self._transfers[sequence] = [arrival.transfer] if arrival is not None and arrival.transfer is not None else []
        self._worker.task_group.start_soon(self._pull, sequence, handle, arrival, heard_at)

    def cancel(self, sequence: Sequence) -> None:
        """Nobody wants the sequence any more: end its copy soon. Harmless for one that copies nothing."""
        for transfer in self._transfers.get(sequence, ()):
            transfer.stop()

    def renew(self, others: Iterable[tuple[str, WorkerRef]] = ()) -> None:
        """Tell the owners that their blocks are still being read. `others`: further leases, with their owners."""
        owners: dict[WorkerRef, list[str]] = {}
        for lease, owner in (*self._pulling.items(), *others):
            owners.setdefault(owner, []).append(lease)
        for owner, leases in owners.items():
            self._worker.send(owner, RenewLeases(holder=self._worker.ref, leases=leases))

    async def _pull(self, sequence: Sequence, handle: KvHandle, arrival: Arrival | None, heard_at: float) -> None:
        """Whatever goes wrong, the sequence runs on: what is missing is recomputed."""
        worker = self._worker
        num_computed, num_bytes, code, began_at = 0, 0, "", worker.clock()
        here, transfers = sequence.num_computed, self._transfers[sequence]
        try:
            try:
                num_bytes = await self._copy(sequence, handle, arrival)
            finally:
                if arrival is not None:
                    await arrival.settled()
            num_computed = handle.num_tokens
        except Cancelled as error:
            code = error.code
        except PenstockError as error:
            code = error.code
            worker.remote.failed(error)
            worker.kv.not_received(code)
            log.warning("pull_failed", request=sequence.request, owner=handle.owner.id, code=error.code, reason=str(error))
        finally:
            ended_at = worker.clock()
            self._pulling.pop(handle.lease, None)
            self._transfers.pop(sequence, None)
            worker.scheduler.end_copy(sequence, num_computed)
            if not code and sequence.timeline is not None and sequence.num_computed < num_computed:
                sequence.timeline.reason = DRAFTED
            worker.wake()
            facts = (("admission_us", round(1e6 * (began_at - heard_at))), *_slowest(transfers))
            worker.traces.copied(  # in this turn: a step that ends would count what was copied as computed
                sequence,
                "pull",
                began_at,
                num_tokens=max(num_computed - here, 0),
                num_bytes=num_bytes,
                peer=handle.owner.id,
                error=code,
                facts=facts if arrival is None else (*arrival.facts, *facts),
                parts=() if arrival is None else arrival.copies,
                ended_at=ended_at,
            )
            try:
                await anyio.lowlevel.checkpoint()  # the first step is planned before the owner is told
            finally:
                worker.send(handle.owner, ReleaseLease(leases=[handle.lease]))
        if not code:
            worker.kv.received(max(num_computed - here, 0), num_bytes, min(here, num_computed))
            worker.kv.streamed(0 if arrival is None else arrival.early_bytes)
        await anyio.sleep(SUBMIT_S)
        worker.scheduler.publish(sequence)

    async def _copy(self, sequence: Sequence, handle: KvHandle, arrival: Arrival | None) -> int:
        """Return how many bytes were copied, those that a stream brought among them.

        :raises StaleHandle, TransportUnavailable, OutOfBlocks: nothing that was copied may be used.
        :raises Cancelled: the sequence was dropped meanwhile.
        """
        worker = self._worker
        cache = worker.cache
        owner, transport = await way_to(worker, handle.owner, handle.fingerprint, handle.lease)
        groups = covered_blocks(handle, len(sequence.tokens), cache)
        if handle.chain != (cache.hash(sequence, handle.num_tokens) or [b""])[-1]:
            raise StaleHandle("the handle is for other tokens")
        if sequence.cancelled:
            raise Cancelled("dropped before its KV was copied")
        if arrival is not None and transport is not worker.transport:
            await arrival.settled()  # an owner of another host stages one copy at a time
        cache.reach(sequence, handle.num_tokens)
        copy = _Copy(sequence, owner, handle, groups, transport)
        began_at = worker.clock()
        num_bytes = await self._copy_missing(copy, arrival)
        if arrival is not None:  # what no stream brings has come beside what the stream still wrote; now what that lacks
            num_taken = sum(map(len, arrival.taken))
            await arrival.settled()
            if sum(map(len, arrival.taken)) < num_taken:
                num_bytes += await self._copy_missing(copy, arrival)
            sizes = [group.segment.block_bytes for group in worker.engine.groups]
            num_bytes += sum(len(taken) * size for taken, size in zip(arrival.taken, sizes, strict=True))
        if transport is not worker.transport:
            worker.remote.pulled(copy.num_blocks * cache.block_tokens, worker.clock() - began_at)
        return num_bytes

    async def _copy_missing(self, copy: _Copy, arrival: Arrival | None) -> int:
        """Copy what neither the stream brings nor was copied before; return how many bytes that is. Errors: see `_copy`."""
        worker, sequence, owner, num_bytes = self._worker, copy.sequence, copy.owner, 0
        size, end = worker.cache.block_tokens, worker.cache.blocks_for(copy.handle.num_tokens)
        for theirs, table, memory in zip(copy.groups, sequence.tables, worker.engine.groups, strict=True):
            first, done = theirs.start // size, copy.done.setdefault(theirs.group, set())
            arrived = set[int]() if arrival is None else arrival.taken[theirs.group]
            places = sorted(set(range(max(first, sequence.num_computed // size), end)) - arrived - done)
            if not places:
                continue
            if sequence.cancelled:
                raise Cancelled("dropped while its KV was copied")
            segment, fingerprint = (group_name(name, theirs.group) for name in (owner.segment, copy.handle.fingerprint))
            source = RemoteBlocks(owner.host, segment, fingerprint, theirs.blocks, theirs.generations, theirs.checksums)
            target = LocalBlocks(memory.segment.blocks, [table[place] for place in places])
            transfer = copy.transport.pull(source.pick([place - first for place in places]), target)
            self._transfers[sequence].append(transfer)
            num_bytes += await transfer
            done.update(places)
            copy.num_blocks = max(copy.num_blocks, len(places))
        return num_bytes


@dataclass(slots=True)
class _Copy:
    """What one hand-off copies. `groups`: the handle's, checked. `done`: of each group, the indices of blocks that have been
    copied. `num_blocks`: the most that were copied of one group at a time."""

    sequence: Sequence
    owner: Presence
    handle: KvHandle
    groups: list[GroupBlocks]
    transport: Transport
    done: dict[int, set[int]] = field(default_factory=dict)
    num_blocks: int = 0


def _slowest(transfers: list[Transfer]) -> tuple[tuple[str, int], ...]:
    """What a timeline says of the copy that took longest."""
    longest = max(transfers, key=lambda transfer: transfer.queued_s + transfer.copy_s, default=None)
    return () if longest is None else longest.facts()


def covered_blocks(handle: KvHandle, num_tokens: int, cache: SequenceCache) -> list[GroupBlocks]:
    """The handle's blocks of each group, if they cover what comes behind all of `num_tokens` tokens but the last.

    :raises ProtocolError: for any other shape.
    """
    covered = num_tokens - 1
    expected = [
        (index, cache.first_block(index, covered) * cache.block_tokens, covered) for index in range(len(cache.pool.groups))
    ]
    if (
        handle.num_tokens != covered
        or [(group.group, group.start, group.end) for group in handle.groups] != expected
        or any(
            len(group.blocks) != cache.blocks_for(covered) - group.start // cache.block_tokens
            or len(group.generations) != len(group.blocks)
            for group in handle.groups
        )
    ):
        raise ProtocolError("the KV handle does not cover the tokens that came with it")
    return handle.groups
