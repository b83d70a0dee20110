"""What a worker asks the kvstores of its host: which are worth asking, what each has of a hash chain, and who failed lately.

The store is a convenience. Whatever goes wrong here is a miss: nothing raises, nobody waits for a store that does not answer
at once, and one that failed is left alone for a while.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import anyio

from common.protocol.cache_messages import BlockLease, BlockLookup, BlockOffer
from common.protocol.errors import PenstockError, ProtocolError, from_wire
from common.protocol.explain_messages import RequestContext
from common.protocol.handles import WorkerRef, new_lease
from common.protocol.messages import Message, Presence, Rejected, ReleaseLease
from common.runtime import logs
from common.runtime.actor import Actor
from common.transfer.paths import KvPath

log = logs.get("store_client")

ASK_TIMEOUT_S = 0.2
SKIP_FAILED_S = 3.0
MAX_STORES = 4
"""Stores asked per lookup."""


@dataclass(slots=True)
class Search:
    """What looking for one request's prefix came to, of all its lookups and copies: which stores were asked, the bytes that
    were copied, the most blocks of a cache group that came from a disk and from another host, and the code of the last
    failure.

    `block_tokens`: tokens of a block, where a prefix that is computed sooner than fetched is to be computed; `block_bytes`: of
    the groups that keep all. `pays`: what was decided so, by path; `num_skipped`: blocks that were not fetched for that reason.
    """

    context: RequestContext = field(default_factory=RequestContext)
    stores: dict[WorkerRef, None] = field(default_factory=dict)
    num_bytes: int = 0
    num_from_disk: int = 0
    num_remote: int = 0
    error: str = ""
    block_tokens: int = 0
    block_bytes: int = 0
    pays: dict[KvPath, bool] = field(default_factory=dict)
    num_skipped: int = 0


class StoreLookups:
    """Asks kvstores on behalf of `actor`, which is on `host`. `enabled`: without it there is no store to ask."""

    def __init__(self, actor: Actor, host: str, *, enabled: bool = True) -> None:
        self.actor = actor
        self.host = host
        self.failures = actor.metrics.counter("store_failures_total", "Fetches and offers that a kvstore failed", ["code"])
        self._enabled = enabled
        self._skip_until: dict[WorkerRef, float] = {}

    def stores(self) -> list[WorkerRef]:
        """Return the stores of this host that are ready and have not failed lately."""
        return [presence.worker for presence in self.ready() if presence.host == self.host]

    def ready(self) -> list[Presence]:
        """Return the stores of all hosts that are ready and have not failed lately."""
        if not self._enabled or not self.actor.bus.connected:
            return []
        now = self.actor.clock()
        if self._skip_until:
            self._skip_until = {store: until for store, until in self._skip_until.items() if until > now}
        return [
            presence
            for presence in self.actor.registry.alive("kvstore", now)
            if presence.state == "ready" and presence.worker not in self._skip_until
        ]

    def failed(self, store: WorkerRef, error: PenstockError) -> None:
        """Count a failure, and leave the store alone for `SKIP_FAILED_S`."""
        log.info("kvstore_failed", store=store.id, code=error.code, reason=str(error))
        self.failures.labels(error.code).inc()
        self._skip_until[store] = self.actor.clock() + SKIP_FAILED_S

    def forgive(self) -> None:
        """Ask all stores again, also those that failed."""
        self._skip_until.clear()

    async def ask(self, store: WorkerRef, question: BlockLookup | BlockOffer) -> Message:
        """:raises PenstockError: no answer, or a refusal."""
        try:
            answer = await self.actor.ask(store, question, ASK_TIMEOUT_S)
        except BaseException:  # too late, or not waited for: the store may have granted it all the same
            self.actor.send(store, ReleaseLease(leases=[question.lease]))
            raise
        if isinstance(answer, Rejected):
            raise from_wire(answer.code, answer.message)
        return answer

    async def leases(
        self,
        fingerprint: str,
        stores: Sequence[WorkerRef],
        hashes: Sequence[bytes],
        search: Search,
        firsts: Sequence[int] = (),
        *,
        waits: bool = True,
    ) -> list[BlockLease]:
        """Ask all of `stores` at once what they have of a chain of blocks of `fingerprint`; `firsts` and `waits` as in
        `BlockLookup`.

        Stores that have nothing of it, or fail, are left out. The caller releases what is returned.
        """
        found: list[BlockLease] = []
        try:
            async with anyio.create_task_group() as tasks:
                for store in stores:
                    lookup = BlockLookup(
                        holder=self.actor.ref,
                        fingerprint=fingerprint,
                        hashes=list(hashes),
                        lease=new_lease(),
                        firsts=list(firsts),
                        context=search.context,
                        waits=waits,
                    )
                    tasks.start_soon(self._look_up, store, lookup, found, search)
        except BaseException:
            self.release(found)
            raise
        return found

    def release(self, found: list[BlockLease], keep: BlockLease | None = None) -> None:
        """Release all leases but one, and take them out of the list."""
        for lease in [lease for lease in found if lease is not keep]:
            if lease.lease:
                self.actor.send(lease.store, ReleaseLease(leases=[lease.lease]))
            found.remove(lease)

    async def _look_up(self, store: WorkerRef, lookup: BlockLookup, found: list[BlockLease], search: Search) -> None:
        search.stores[store] = None
        try:
            answer = await self.ask(store, lookup)
            if not isinstance(answer, BlockLease):
                raise ProtocolError(f"{type(answer).__name__} in answer to a lookup")
            hashes, firsts = lookup.hashes, lookup.firsts
            end = answer.first + len(answer.blocks)
            if not end and not answer.coming:
                return
            if (
                not len(answer.blocks) == len(answer.generations) == len(answer.checksums) <= end <= len(hashes)
                or not 0 <= answer.first <= (firsts[end - 1] if firsts and end else 0)
                or not 0 <= answer.coming <= len(hashes) - end
                or (answer.blocks and not answer.lease)
            ):
                self.release([answer])
                raise ProtocolError("a lease that does not fit its lookup")
            found.append(answer)
        except PenstockError as error:
            search.error = error.code
            self.failed(store, error)
