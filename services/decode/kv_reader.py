"""How the KV of a hand-off comes here: copied from the prefill worker's blocks, whose lease is renewed meanwhile.

KvReady admitted ─► what its stream still writes has ended ─► the blocks that are not here yet are pulled, a group at a time
    ─► lease released ─► the sequence runs
    ├ stale, unreadable, another layout: the sequence runs all the same, and computes what is missing
    └ dropped meanwhile: the transfer is given up, and the blocks are freed once nothing writes them
"""

from __future__ import annotations

from collections.abc import Iterable

from common.cache.spec import group_name
from common.engine.sequence import Sequence
from common.engine.sequence_cache import SequenceCache
from common.protocol.errors import Cancelled, PenstockError, ProtocolError, StaleHandle
from common.protocol.handles import GroupBlocks, KvHandle, WorkerRef
from common.protocol.messages import ReleaseLease, RenewLeases
from common.runtime import logs
from common.transfer.base import LocalBlocks, RemoteBlocks
from common.transfer.transfer import Transfer
from services.decode.arrivals import Arrival
from services.decode.kv_source import Reader, way_to

log = logs.get("decode")


class KvReader:
    def __init__(self, worker: Reader) -> None:
        self._worker = worker
        self._pulling: dict[str, WorkerRef] = {}
        self._transfers: dict[Sequence, Transfer] = {}

    def begin(self, sequence: Sequence, handle: KvHandle, arrival: Arrival | None = None) -> None:
        """Copy the blocks of an admitted sequence that are not here yet. Call it in the turn that admitted it.

        arrival: the stream that came before, whose blocks the sequence was admitted with.
        """
        self._worker.scheduler.begin_copy(sequence)
        self._pulling[handle.lease] = handle.owner
        if arrival is not None and arrival.transfer is not None:
            self._transfers[sequence] = arrival.transfer
        self._worker.task_group.start_soon(self._pull, sequence, handle, arrival)

    def cancel(self, sequence: Sequence) -> None:
        """Nobody wants the sequence any more: end its copy soon. Harmless for one that copies nothing."""
        transfer = self._transfers.get(sequence)
        if transfer is not None:
            transfer.stop()

    def renew(self, others: Iterable[tuple[str, WorkerRef]] = ()) -> None:
        """Tell the owners that their blocks are still being read. `others`: further leases, with their owners."""
        owners: dict[WorkerRef, list[str]] = {}
        for lease, owner in (*self._pulling.items(), *others):
            owners.setdefault(owner, []).append(lease)
        for owner, leases in owners.items():
            self._worker.send(owner, RenewLeases(holder=self._worker.ref, leases=leases))

    async def _pull(self, sequence: Sequence, handle: KvHandle, arrival: Arrival | None) -> None:
        """Whatever goes wrong, the sequence runs on: what is missing is recomputed."""
        worker = self._worker
        num_computed, num_bytes, code, began_at = 0, 0, "", worker.clock()
        here, facts = sequence.num_computed, () if arrival is None else arrival.facts
        try:
            if arrival is not None:
                await arrival.settled()
            num_bytes = await self._copy(sequence, handle, arrival)
            num_computed = handle.num_tokens
            worker.kv.received(max(num_computed - here, 0), num_bytes, min(here, num_computed))
            worker.kv.streamed(0 if arrival is None else arrival.early_bytes)
        except Cancelled as error:
            code = error.code
        except PenstockError as error:
            code = error.code
            worker.remote.failed(error)
            worker.kv.not_received(code)
            log.warning("pull_failed", request=sequence.request, owner=handle.owner.id, code=error.code, reason=str(error))
        finally:
            self._pulling.pop(handle.lease, None)
            self._transfers.pop(sequence, None)
            worker.scheduler.end_copy(sequence, num_computed)
            worker.traces.copied(
                sequence,
                "pull",
                began_at,
                num_tokens=max(num_computed - here, 0),
                num_bytes=num_bytes,
                peer=handle.owner.id,
                error=code,
                facts=facts,
            )
            worker.send(handle.owner, ReleaseLease(leases=[handle.lease]))
            worker.wake()

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
        cache.reach(sequence, handle.num_tokens)
        have, end = sequence.num_computed // cache.block_tokens, cache.blocks_for(handle.num_tokens)
        copies: list[tuple[RemoteBlocks, LocalBlocks]] = []
        num_bytes, began_at = 0, worker.clock()
        for theirs, table, memory in zip(groups, sequence.tables, worker.engine.groups, strict=True):
            first = theirs.start // cache.block_tokens
            arrived = set[int]() if arrival is None else arrival.taken[theirs.group]
            places = [place for place in range(max(have, first), end) if place not in arrived]
            num_bytes += len(arrived) * memory.segment.block_bytes
            if places:
                segment, fingerprint = (group_name(name, theirs.group) for name in (owner.segment, handle.fingerprint))
                source = RemoteBlocks(owner.host, segment, fingerprint, theirs.blocks, theirs.generations, theirs.checksums)
                mine = LocalBlocks(memory.segment.blocks, [table[place] for place in places])
                copies.append((source.pick([place - first for place in places]), mine))
        for source, target in copies:
            if sequence.cancelled:
                raise Cancelled("dropped while its KV was copied")
            self._transfers[sequence] = transfer = transport.pull(source, target)
            num_bytes += await transfer
        if transport is not worker.transport:
            num_tokens = max((len(target.blocks) for _, target in copies), default=0) * cache.block_tokens
            worker.remote.pulled(num_tokens, worker.clock() - began_at)
        return num_bytes


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
