"""How the KV of a hand-off comes here: copied from the prefill worker's blocks, whose lease is renewed meanwhile.

KvReady admitted ─► blocks that are not here yet are pulled, a group at a time ─► lease released ─► the sequence runs
    ├ stale, unreadable, another layout: the sequence runs all the same, and computes what is missing
    └ dropped meanwhile: the transfer is given up, and the blocks are freed once nothing writes them
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from anyio.abc import TaskGroup

from common.cache.spec import group_name
from common.engine.engine import Engine
from common.engine.sequence import Sequence
from common.engine.sequence_cache import SequenceCache
from common.protocol.errors import Cancelled, PenstockError, ProtocolError, StaleHandle, TransportUnavailable
from common.protocol.handles import GroupBlocks, KvHandle, WorkerRef
from common.protocol.messages import Message, Presence, ReleaseLease, RenewLeases
from common.runtime import logs
from common.runtime.registry import Registry
from common.transfer.base import LocalBlocks, RemoteBlocks, Transport
from common.transfer.transfer import Transfer
from common.worker.kv_counts import KvCounts
from common.worker.remote_kv import RemoteKv
from common.worker.traces import WorkerTraces
from services.decode.scheduler import DecodeScheduler

log = logs.get("decode")


class Reader(Protocol):
    """What `KvReader` needs of its worker. `transport`: to workers of the same host."""

    ref: WorkerRef
    host: str
    task_group: TaskGroup
    registry: Registry
    remote: RemoteKv
    engine: Engine
    cache: SequenceCache
    scheduler: DecodeScheduler
    kv: KvCounts
    traces: WorkerTraces
    clock: Callable[[], float]

    @property
    def transport(self) -> Transport: ...
    def send(self, to: WorkerRef | str, message: Message) -> None: ...
    def wake(self) -> None: ...


class KvReader:
    def __init__(self, worker: Reader) -> None:
        self._worker = worker
        self._pulling: dict[str, WorkerRef] = {}
        self._transfers: dict[Sequence, Transfer] = {}

    def begin(self, sequence: Sequence, handle: KvHandle) -> None:
        """Copy the blocks of an admitted sequence that are not here yet. Call it in the turn that admitted it."""
        self._worker.scheduler.begin_copy(sequence)
        self._pulling[handle.lease] = handle.owner
        self._worker.task_group.start_soon(self._pull, sequence, handle)

    def cancel(self, sequence: Sequence) -> None:
        """Nobody wants the sequence any more: end its copy soon. Harmless for one that copies nothing."""
        transfer = self._transfers.get(sequence)
        if transfer is not None:
            transfer.stop()

    def renew(self) -> None:
        """Tell the owners that their blocks are still being read."""
        owners: dict[WorkerRef, list[str]] = {}
        for lease, owner in self._pulling.items():
            owners.setdefault(owner, []).append(lease)
        for owner, leases in owners.items():
            self._worker.send(owner, RenewLeases(holder=self._worker.ref, leases=leases))

    async def _pull(self, sequence: Sequence, handle: KvHandle) -> None:
        """Whatever goes wrong, the sequence runs on: what is missing is recomputed."""
        worker = self._worker
        num_computed, num_bytes, code, began_at = 0, 0, "", worker.clock()
        here = sequence.num_computed
        try:
            num_bytes = await self._copy(sequence, handle)
            num_computed = handle.num_tokens
            worker.kv.received(max(num_computed - here, 0), num_bytes, min(here, num_computed))
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
            )
            worker.send(handle.owner, ReleaseLease(leases=[handle.lease]))
            worker.wake()

    async def _copy(self, sequence: Sequence, handle: KvHandle) -> int:
        """Return how many bytes were copied.

        :raises StaleHandle, TransportUnavailable, OutOfBlocks: nothing that was copied may be used.
        :raises Cancelled: the sequence was dropped meanwhile.
        """
        worker = self._worker
        cache = worker.cache
        owner = self.owner_of(handle.owner, handle.fingerprint)
        transport = worker.remote.transport_to(owner, worker.transport, worker.host)
        if transport is not worker.transport:
            await worker.remote.reach(owner)
        groups = covered_blocks(handle, len(sequence.tokens), cache)
        if handle.chain != (cache.hash(sequence, handle.num_tokens) or [b""])[-1]:
            raise StaleHandle("the handle is for other tokens")
        if sequence.cancelled:
            raise Cancelled("dropped before its KV was copied")
        cache.reach(sequence, handle.num_tokens)
        have, end = sequence.num_computed // cache.block_tokens, cache.blocks_for(handle.num_tokens)
        copies: list[tuple[RemoteBlocks, LocalBlocks]] = []
        for theirs, table, memory in zip(groups, sequence.tables, worker.engine.groups, strict=True):
            first = theirs.start // cache.block_tokens
            begin = max(have, first)
            if begin < end:
                segment, fingerprint = (group_name(name, theirs.group) for name in (owner.segment, handle.fingerprint))
                source = RemoteBlocks(owner.host, segment, fingerprint, theirs.blocks, theirs.generations, theirs.checksums)
                copies.append((source.part(begin - first, end - first), LocalBlocks(memory.segment.blocks, table[begin:end])))
        num_bytes, began_at = 0, worker.clock()
        for source, target in copies:
            if sequence.cancelled:
                raise Cancelled("dropped while its KV was copied")
            self._transfers[sequence] = transfer = transport.pull(source, target)
            num_bytes += await transfer
        if transport is not worker.transport:
            worker.remote.pulled(handle.num_tokens - sequence.num_computed, worker.clock() - began_at)
        return num_bytes

    def owner_of(self, ref: WorkerRef, fingerprint: str) -> Presence:
        """Return what a prefill worker said of itself last.

        :raises TransportUnavailable: its KV has another layout. :raises StaleHandle: this life of it is not known, or over.
        """
        if fingerprint != self._worker.engine.runner.fingerprint:
            raise TransportUnavailable("the handle's model or KV layout is not ours")
        owner = self._worker.registry.get(ref.id)
        if owner is None or owner.worker != ref:
            raise StaleHandle(f"{ref.id} is not known in this epoch")
        return owner


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
