"""The kvstore worker: KV blocks by content hash in the host's shared memory, for every worker that can map it.

The life of a block here:

    BlockOffer ─► BlockGrant: slots, for a lease ─► the worker copies ─► BlockCommit: readable ─► least recently used: evicted
                       └ lease ends, ReleaseLease, or the worker dies: slots are free again
    BlockLookup ─► BlockLease: slots, generations, checksums ─► the worker copies ─► ReleaseLease, or the lease ends

With a disk (`disk_tier.py`) committed blocks are also written there, and a lookup of blocks that only the disk has is answered
when they are in memory again, or after a tenth of a second. With `kv_transfer nixl` workers of other hosts read blocks, too,
which are copied for them (`remote_readers.py`). Otherwise the store never touches the bytes. It owes nobody
anything: a store that is full, slow or dead costs its workers a computation they would have done without it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.to_thread

from common.cache.prefix import OWNER_BYTES
from common.protocol.cache_messages import BlockCommit, BlockGrant, BlockLease, BlockLookup, BlockOffer, KvTier
from common.protocol.errors import InvalidParameter, PenstockError, ShuttingDown
from common.protocol.explain_messages import Explain, WorkerEvent
from common.protocol.handles import new_lease
from common.protocol.kv_messages import KvTraffic
from common.protocol.messages import KvUsage, Message, Presence, Rejected, ReleaseLease, RenewLeases
from common.protocol.transfer_messages import DescribeMemory, StageBlocks, UnstageBlocks
from common.runtime import logs
from common.runtime.actor import Actor, WorkerState
from common.runtime.bus import Bus
from common.runtime.lease_metrics import LeaseMetrics
from common.runtime.leases import LeaseTable
from common.runtime.request_records import RequestRecords
from common.transfer.measured import TransferCounts
from common.transfer.segment_file import check_room, sweep, wait_for_room
from common.transfer.shm import host_id
from common.transfer.store_capacity import store_capacity_bytes
from services.kvstore.arena import Arena
from services.kvstore.arenas import Arenas
from services.kvstore.config import KvstoreConfig
from services.kvstore.disk_counts import DiskCounts
from services.kvstore.disk_tier import DiskTier
from services.kvstore.growth import Growth
from services.kvstore.held import HeldMetrics
from services.kvstore.holds import Hold
from services.kvstore.remote_readers import RemoteReaders

log = logs.get("kvstore")


class KvstoreActor(Actor):
    role = "kvstore"
    hears = ("prefill", "decode")
    config: KvstoreConfig

    def __init__(self, *, bus: Bus, config: KvstoreConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """:raises ConfigError: `shm_dir` can't be used."""
        super().__init__(bus=bus, config=config, clock=clock)
        self.host = host_id(config.shm_dir)
        self.leases: LeaseTable[Hold] = LeaseTable(config.lease_s)
        self._idle = anyio.Event()
        self._num_lookups = self.metrics.counter("kvstore_lookups_total", "Lookups answered")
        self._num_looked_up = self.metrics.counter("kvstore_lookup_blocks_total", "Blocks that lookups asked for")
        self._num_hits = self.metrics.counter("kvstore_hit_blocks_total", "Blocks found in the store")
        self._num_stored = self.metrics.counter("kvstore_stored_blocks_total", "Blocks written and committed")
        self._num_abandoned = self.metrics.counter("kvstore_abandoned_blocks_total", "Blocks granted, but never committed")
        self._num_evicted = self.metrics.counter("kvstore_evicted_blocks_total", "Blocks in memory given up for others")
        self._num_damaged = self.metrics.counter("kvstore_damaged_blocks_total", "Blocks that failed a reader's checksum")
        self.arenas = Arenas(
            config.shm_dir,
            f"{self.ref.id[:96]}-{self.ref.epoch:x}",
            capacity_bytes=store_capacity_bytes(config.capacity_mb, config.shm_dir),
            max_arenas=config.max_fingerprints,
            clock=clock,
            on_evicted=self._count_evicted,
            active_s=config.forget_after_s,
        )
        self.growth = Growth(self.arenas)
        self.transfers = TransferCounts(self.metrics)
        self.records = RequestRecords(lambda: self.tracing, lambda: self.ref, clock)
        self.disk = DiskTier(config, self.arenas, self.metrics, DiskCounts(self.metrics, self.transfers, self.records), clock)
        self.readers = RemoteReaders(self, config, self.records, self._forget_damaged)
        self._memory_hits = self._memory_evicted = self._memory_damaged = 0
        self.metrics.gauge("kvstore_blocks", "Readable blocks in memory", read=lambda: float(self.arenas.num_readable))
        self.metrics.gauge("kvstore_bytes", "Bytes of readable blocks in memory", read=lambda: float(self.stored_bytes))
        self.metrics.gauge("kvstore_memory_bytes", "Bytes of shared memory taken", read=lambda: float(self.arenas.memory_bytes))
        self.metrics.gauge("kvstore_arenas", "Models and layouts that have blocks here", read=lambda: float(len(self.arenas)))
        self.metrics.gauge("kvstore_leases", "Leases held by readers and writers", read=lambda: float(len(self.leases)))
        help_text = "Blocks of memory by state; they add up to its capacity once a model has blocks here, and to 0 before"
        states = self.metrics.gauge("kvstore_state_blocks", help_text, ["state"])
        for state in ("free", "owned", "leased", "cached"):
            states.labels(state).set_function(lambda state=state: float(getattr(self.usage(), state)))
        self.metrics.registry.register(
            LeaseMetrics({"read": lambda: self.lease_ages(writing=False), "write": lambda: self.lease_ages(writing=True)})
        )
        held = HeldMetrics({"memory": self.arenas.orders, "disk": self.disk.orders}, self.model_names)
        self.metrics.registry.register(held)

    # -- life

    async def start(self) -> None:
        """:raises ConfigError: shared memory is too small for `capacity_mb`: better now than at the first offer."""
        swept = await anyio.to_thread.run_sync(sweep, self.config.shm_dir)
        if swept:
            log.info("swept_segments", segments=swept)
        directory = Path(self.config.shm_dir)
        await anyio.to_thread.run_sync(wait_for_room, directory, self.arenas.capacity_bytes)
        check_room(directory, self.arenas.capacity_bytes)
        await self.disk.open()
        await self.readers.open()

    async def work(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.growth.run)
            await self.disk.run()

    async def drain(self) -> None:
        """Readers and writers finish, and what is queued for the disk is written; new ones are refused."""
        if len(self.leases):
            await self._idle.wait()
        await self.disk.flush()

    def close(self) -> None:
        self.disk.close()
        self.arenas.close()

    def presence(self, state: WorkerState) -> Presence:
        usage = self.usage()
        return Presence(
            worker=self.ref,
            state=state,
            model=self.config.served_name,
            host=self.host,
            running=len(self.leases),
            credits=max(usage.free + usage.cached, 1) if state == "ready" else 0,
            kv=usage,
            http_port=self.http_port,
            tiers=self.tiers(),
            traffic=self.traffic(),
            endpoints=self.readers.endpoints,
        )

    def tick(self, now: float) -> None:
        for lease, hold in self.leases.expire(now):
            log.warning("lease_expired", lease=lease, blocks=len(hold.slots), writing=hold.writing)
            self._give_back(hold)
        self.arenas.tidy(now, self.config.forget_after_s)
        self.disk.tick()

    def peer_lost(self, peer: Presence) -> None:
        for _, hold in self.leases.release_holder(peer.worker.id):
            self._give_back(hold)

    def fenced(self) -> None:
        for _, hold in self.leases.clear():
            self._give_back(hold)

    def connection_changed(self, connected: bool) -> None:
        (self.leases.resume if connected else self.leases.pause)(self.clock())

    # -- what there is

    @property
    def stored_bytes(self) -> int:
        return self.arenas.stored_bytes

    def usage(self) -> KvUsage:
        return self.arenas.usage()

    def model_names(self) -> dict[str, str]:
        """Return what models are called, by the fingerprints of their workers."""
        return {worker.fingerprint: worker.model for worker in self.registry.alive(None, self.clock())}

    def lease_ages(self, *, writing: bool) -> list[float]:
        """Return the age in seconds of each lease of readers, or of writers."""
        return [age_s for hold, age_s in self.leases.ages(self.clock()) if hold.writing == writing]

    def traffic(self) -> KvTraffic:
        """Return what a heartbeat says of the disk's traffic, and of leases."""
        oldest_s = max((age_s for _, age_s in self.leases.ages(self.clock())), default=0.0)
        return KvTraffic(paths=self.transfers.totals(), leases=len(self.leases), oldest_lease_s=round(oldest_s, 1))

    def tiers(self) -> list[KvTier]:
        """Memory, and the disk where there is to be one."""
        memory = KvTier(
            name="memory",
            blocks=self.arenas.num_readable,
            bytes=self.stored_bytes,
            capacity_bytes=self.arenas.capacity_bytes,
            hit_blocks=self._memory_hits,
            evicted_blocks=self._memory_evicted,
            damaged_blocks=self._memory_damaged,
        )
        return [memory, self.disk.usage()] if self.config.kv_disk else [memory]

    # -- messages

    def handle(self, message: Message, reply: str) -> None:
        match message:
            case BlockLookup():
                self._try(reply, lambda: self._look_up(message, reply))
            case BlockOffer():
                self._try(reply, lambda: self.answer(reply, self._grant(message)))
            case BlockCommit():
                self._commit(message)
            case ReleaseLease():
                self._release(message)
            case DescribeMemory():
                self.readers.describe(reply)
            case StageBlocks():
                hold = self.leases.get(message.lease) if self.leases.holder(message.lease) == message.holder else None
                self._try(reply, lambda: self.readers.stage(message, hold, reply), drains=True)
            case UnstageBlocks():
                self.readers.end(message.stages)
            case Explain():
                self.answer(reply, self.records.explain(message.request))
            case RenewLeases():
                self.leases.renew(message.holder, message.leases, self.clock())
            case _:
                log.warning("unexpected_message", message=type(message).__name__)

    def _try(self, reply: str, answer: Callable[[], None], *, drains: bool = False) -> None:
        """`drains`: also while draining, since it helps somebody to finish."""
        try:
            if self.state == "draining" and not drains:
                raise ShuttingDown("this kvstore is draining")
            answer()
        except PenstockError as error:
            self.answer(reply, Rejected(worker=self.ref, code=error.code, message=str(error)))

    def _name(self, question: BlockLookup | BlockOffer) -> str:
        """:raises InvalidParameter: the holder's name for the lease is taken."""
        if question.lease in self.leases:
            raise InvalidParameter("there is a lease of this name", param="lease")
        return question.lease or new_lease()

    def _look_up(self, lookup: BlockLookup, reply: str) -> None:
        """Answer now, or once the disk has given what memory lacks. :raises InvalidParameter: the question contradicts
        itself."""
        _check(lookup)
        self._num_lookups.inc()
        self._num_looked_up.inc(len(lookup.hashes))
        now = self.clock()
        missing = self.disk.missing(lookup, self.arenas.get(lookup.fingerprint))
        if missing:
            self.task_group.start_soon(self._look_up_on_disk, lookup, missing, reply, now)
        else:
            self.answer(reply, self._leased(lookup, num_from_disk=0, began_at=now))

    async def _look_up_on_disk(self, lookup: BlockLookup, missing: range, reply: str, began_at: float) -> None:
        arena = self.arenas.get(lookup.fingerprint)
        absent = [
            block for block in lookup.hashes[missing.start : missing.stop] if arena is None or arena.index.find(block) is None
        ]
        await self.disk.bring(lookup, missing)
        arena = self.arenas.get(lookup.fingerprint)
        num_from_disk = sum(arena is not None and arena.index.find(block) is not None for block in absent)
        self._try(reply, lambda: self.answer(reply, self._leased(lookup, num_from_disk, began_at)))

    def _leased(self, lookup: BlockLookup, num_from_disk: int, began_at: float) -> BlockLease:
        """Return what is in memory, leased. `num_from_disk`: blocks of it that were not before they were asked for. `began_at`:
        when the question came.

        :raises InvalidParameter: the lease's name is taken."""
        lease = self._lease(lookup, num_from_disk)
        found = ("memory_hit_blocks", len(lease.blocks) - lease.num_from_disk), ("disk_hit_blocks", lease.num_from_disk)
        coming = [("coming_blocks", lease.coming)] if lease.coming else []
        facts = (("asked_blocks", len(lookup.hashes)), *found, *coming)
        event = WorkerEvent("lookup", began_at, self.clock(), peer=lookup.holder.id, facts=facts)
        self.records.note(lookup.context, event)
        return lease

    def _lease(self, lookup: BlockLookup, num_from_disk: int) -> BlockLease:
        """:raises InvalidParameter: the lease's name is taken."""
        arena = self.arenas.used(lookup.fingerprint)
        first, slots = _found(arena, lookup) if arena is not None else (0, [])
        coming = 0 if lookup.firsts else self.disk.coming(lookup, len(slots))
        if arena is None or not slots:
            return BlockLease(store=self.ref, lease="", blocks=[], generations=[], first=first, coming=coming)
        self._num_hits.inc(len(slots))
        self._memory_hits += max(0, len(slots) - num_from_disk)
        self.disk.used(lookup.fingerprint, lookup.hashes[first : first + len(slots)])
        lease = self._name(lookup)
        arena.index.lease(slots)
        self.leases.grant(lease, lookup.holder, Hold(arena, slots, writing=False, context=lookup.context), self.clock())
        return BlockLease(
            store=self.ref,
            lease=lease,
            blocks=slots,
            generations=arena.generations_of(slots),
            segment=arena.segment.name,
            checksums=arena.index.checksums_of(slots),
            first=first,
            coming=coming,
            num_from_disk=min(num_from_disk, len(slots)),
        )

    def _grant(self, offer: BlockOffer) -> BlockGrant:
        """:raises PenstockError: there is no memory for this fingerprint, or the offer's numbers can't be."""
        owner = offer.owner
        if not 0 < owner.weight < math.inf or not 0 <= offer.cost_s < math.inf or len(owner.name) not in (0, OWNER_BYTES):
            raise InvalidParameter(f"an owner is {OWNER_BYTES} bytes with a weight above 0", param="owner")
        arena = self.arenas.of(offer.fingerprint, offer.block_bytes)
        lease = self._name(offer)
        self.arenas.owners.weigh(owner.name, owner.weight)
        arena.index.order.measured(offer.cost_s)
        granted = arena.reserve(offer.hashes, owner.name)
        if not granted:
            return BlockGrant(store=self.ref, lease="", indices=[], blocks=[])
        self.growth.granted(arena)
        slots = [slot for _, slot in granted]
        now = self.clock()
        self.leases.grant(lease, offer.holder, Hold(arena, slots, writing=True, context=offer.context, granted_at=now), now)
        return BlockGrant(
            store=self.ref,
            lease=lease,
            indices=[index for index, _ in granted],
            blocks=slots,
            segment=arena.segment.name,
            generations=arena.generations_of(slots),
        )

    def _commit(self, commit: BlockCommit) -> None:
        hold = self.leases.get(commit.lease)
        if hold is None or not hold.writing:
            log.info("commit_too_late", lease=commit.lease)
            return
        self.leases.release(commit.lease)
        if len(commit.checksums) != len(hold.slots):
            log.warning("commit_refused", lease=commit.lease, granted=len(hold.slots), checksums=len(commit.checksums))
            self._give_back(hold)
            return
        hold.arena.index.commit(hold.slots, commit.checksums)
        num_stored = len(hold.slots)
        self._num_stored.inc(num_stored)
        num_bytes, facts = num_stored * hold.arena.block_bytes, (("stored_blocks", num_stored),)
        event = WorkerEvent("store", hold.granted_at, self.clock(), num_bytes=num_bytes, facts=facts)
        self.records.note(hold.context, event)
        self.disk.committed(hold.arena, hold.arena.index.hashes_of(hold.slots), hold.context)
        self._wake_drain()

    def _release(self, release: ReleaseLease) -> None:
        for lease in release.leases:
            hold = self.leases.release(lease)
            if hold is None:
                continue
            if release.damaged and not hold.writing:
                self._forget_damaged(hold, release.damaged)
            self._give_back(hold)

    def _forget_damaged(self, hold: Hold, hashes: list[bytes]) -> None:
        damaged = hold.arena.index.forget(hold.slots, set(hashes))
        self._num_damaged.inc(damaged)
        self._memory_damaged += damaged
        log.warning("damaged_blocks", blocks=damaged, segment=hold.arena.segment.name)

    def _give_back(self, hold: Hold) -> None:
        self.readers.end(hold.stages)
        if hold.writing:
            hold.arena.index.abandon(hold.slots)
            self._num_abandoned.inc(len(hold.slots))
        else:
            hold.arena.index.end_lease(hold.slots)
        self._wake_drain()

    def _wake_drain(self) -> None:
        if self.state == "draining" and not len(self.leases):
            self._idle.set()

    def _count_evicted(self, blocks: int) -> None:
        self._num_evicted.inc(blocks)
        self._memory_evicted += blocks


def _check(lookup: BlockLookup) -> None:
    """:raises InvalidParameter: `firsts` are not those of the hashes."""
    if not lookup.firsts:
        return
    if len(lookup.firsts) != len(lookup.hashes) or any(not 0 <= first <= i + 1 for i, first in enumerate(lookup.firsts)):
        raise InvalidParameter("firsts are one for each hash, and none is behind it", param="firsts")


def _found(arena: Arena, lookup: BlockLookup) -> tuple[int, list[int]]:
    if lookup.firsts:
        return arena.index.lookup_tail(lookup.hashes, lookup.firsts)
    return 0, arena.index.lookup(lookup.hashes)
