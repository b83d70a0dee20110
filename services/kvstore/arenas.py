"""One capacity for the blocks of several models: each has an arena, and memory goes to the one that needs it.

    an offer needs a slot ─► a spare one of its arena
                          ─► new memory, while all arenas together have less than the capacity
                          ─► the block of least worth (`eviction.py`), whosever it is: its slot if it is the arena's own, else
                             its memory; those of tenants that have more than their share come first (`owners.py`)

So models that take turns keep what they use, one that nobody uses any more gives way block by block, and no arena is dropped to
make room for another. An arena that nobody has used for long is dropped whole.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Set

from common.protocol.errors import ConfigError, InvalidParameter, OutOfBlocks
from common.protocol.messages import KvUsage
from common.runtime import logs
from services.kvstore.arena import Arena
from services.kvstore.eviction import EvictionClock, LeafOrder
from services.kvstore.owners import Owners

log = logs.get("kvstore")

RETRY_S = 10.0
"""After the system had no memory: so long the arenas go on with what they have."""
MIN_ARENA_BYTES = 1 << 20
"""What others give up for a new arena where the system has nothing left: its table of generations, and some blocks."""


class Arenas(Mapping[str, Arena]):
    """Arenas by fingerprint, least recently used first. `name`: what their segments' names begin with. `active_s`: how long
    after its last use a tenant keeps its share."""

    def __init__(
        self,
        directory: str,
        name: str,
        *,
        capacity_bytes: int,
        max_arenas: int,
        clock: Callable[[], float],
        on_evicted: Callable[[int], None],
        active_s: float = 3600.0,
    ) -> None:
        self.directory = directory
        self.capacity_bytes = capacity_bytes
        self._name = name
        self._max_arenas = max_arenas
        self._clock = clock
        self._on_evicted = on_evicted
        self._arenas: OrderedDict[str, Arena] = OrderedDict()
        self._uses = EvictionClock()
        self.owners: Owners[bytes] = Owners(clock, active_s)
        self._num_made = 0
        self._limit_bytes = capacity_bytes
        self._limited_until = 0.0
        self._no_arena_before = 0.0
        self._no_arena_reason = ""

    def __getitem__(self, fingerprint: str) -> Arena:
        return self._arenas[fingerprint]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arenas)

    def __len__(self) -> int:
        return len(self._arenas)

    @property
    def memory_bytes(self) -> int:
        """Memory of all arenas' slots."""
        return sum(arena.memory_bytes for arena in self._arenas.values())

    @property
    def num_readable(self) -> int:
        return sum(arena.index.num_readable for arena in self._arenas.values())

    @property
    def stored_bytes(self) -> int:
        return sum(arena.stored_bytes for arena in self._arenas.values())

    @property
    def free_bytes(self) -> int:
        """What arenas may still grow by."""
        limit = self._limit_bytes if self._clock() < self._limited_until else self.capacity_bytes
        return max(0, limit - self.memory_bytes)

    def orders(self) -> list[tuple[str, LeafOrder]]:
        """Return the fingerprints that have arenas, and the order of their blocks."""
        return [(arena.fingerprint, arena.index.order) for arena in self._arenas.values()]

    def usage(self) -> KvUsage:
        """Slots of all arenas together. Memory that none has taken yet counts in blocks of the arena used last."""
        parts = [arena.index.usage() for arena in self._arenas.values()]
        owned, leased, cached = (sum(getattr(part, field) for part in parts) for field in ("owned", "leased", "cached"))
        free = sum(arena.index.num_spare for arena in self._arenas.values())
        if self._arenas:
            free += self.free_bytes // next(reversed(self._arenas.values())).slot_bytes
        return KvUsage(total=free + owned + leased + cached, free=free, owned=owned, leased=leased, cached=cached)

    def used(self, fingerprint: str) -> Arena | None:
        """The arena of a fingerprint, which counts as used now."""
        arena = self._arenas.get(fingerprint)
        if arena is not None:
            arena.used_at = self._clock()
            self._arenas.move_to_end(fingerprint)
        return arena

    def of(self, fingerprint: str, block_bytes: int) -> Arena:
        """The arena of a fingerprint, which counts as used now; made when there is none.

        :raises InvalidParameter: a block size that can't be. :raises OutOfBlocks: too many arenas are in use, or there is no
            memory.
        """
        arena = self.used(fingerprint)
        if arena is None:
            return self._make(fingerprint, block_bytes)
        if arena.block_bytes != block_bytes:
            raise InvalidParameter(f"{fingerprint} has blocks of {arena.block_bytes} bytes, not {block_bytes}")
        return arena

    def tidy(self, now: float, forget_after_s: float) -> None:
        """Drop arenas that nobody has used for so long, and take back what a writer that outlived its grant took."""
        for arena in [arena for arena in self._arenas.values() if now - arena.used_at >= forget_after_s]:
            if arena.is_idle:
                self._drop(arena, "unused for long")
        for arena in self._arenas.values():
            if reclaimed := arena.reclaim():
                log.warning("memory_reclaimed", segment=arena.segment.name, bytes=reclaimed)

    def close(self) -> None:
        while self._arenas:
            self._arenas.popitem()[1].close()

    def _make(self, fingerprint: str, block_bytes: int) -> Arena:
        if self._clock() < self._no_arena_before:
            raise OutOfBlocks(self._no_arena_reason)
        if len(self._arenas) >= self._max_arenas:
            idle = next((arena for arena in self._arenas.values() if arena.is_idle), None)
            if idle is None:
                raise OutOfBlocks("every arena is in use: raise max_fingerprints")
            self._drop(idle, "max_fingerprints")
        try:
            arena = self._opened(fingerprint, block_bytes)
        except ConfigError as error:
            self.limit(error)
            try:
                self._give_way(MIN_ARENA_BYTES)
                arena = self._opened(fingerprint, block_bytes)
            except ConfigError as again:
                self._no_arena_before = self._clock() + RETRY_S
                self._no_arena_reason = str(again)
                raise OutOfBlocks(str(again)) from again
        log.info("arena_made", segment=arena.segment.name, blocks=arena.index.num_slots, block_bytes=arena.block_bytes)
        self._arenas[fingerprint] = arena
        return arena

    def _opened(self, fingerprint: str, block_bytes: int) -> Arena:
        """:raises InvalidParameter, ConfigError: as `Arena`."""
        self._num_made += 1
        return Arena(
            self.directory,
            f"{self._name}-{self._num_made}",
            fingerprint=fingerprint,
            block_bytes=block_bytes,
            capacity_bytes=self.capacity_bytes,
            make_room=self._make_room,
            clock=self._uses,
            owners=self.owners,
            now=self._clock(),
        )

    def _give_way(self, size: int) -> None:
        """Give this much memory of what is worth least back to the system, or what there is of it."""
        before = self.memory_bytes
        while before - self.memory_bytes < size:
            victim, owners = self._victim(None)
            if victim is None or (not victim.index.num_spare and not self._evict(victim, owners)) or not victim.shrink():
                return

    def _make_room(self, arena: Arena, owner: bytes) -> bool:
        """One spare slot more for `owner` in `arena`. False: what there is is held."""
        while self.free_bytes < arena.slot_bytes:
            victim, owners = self._victim(arena, owner)
            if victim is None or (not victim.index.num_spare and not self._evict(victim, owners)):
                return False
            if victim is arena:
                return True
            if not victim.shrink():
                return self._evict(arena, owners)
        try:
            return arena.grow() or self._evict(arena, self._first_to_go(arena, owner))
        except ConfigError as error:
            self.limit(error)
            return self._evict(arena, self._first_to_go(arena, owner))

    def _victim(self, arena: Arena | None, owner: bytes | None = None) -> tuple[Arena | None, Set[bytes] | None]:
        """Return whose slot or memory goes: spare slots of others first, then the block of least worth among those of the
        owners that are returned too (None: of all)."""
        for other in self._arenas.values():
            if other is not arena and other.index.num_spare:
                return other, None
        first = self._first_to_go(arena, owner)
        for owners in (first, None):
            candidates = [(rank, other) for other in self._arenas.values() if (rank := other.index.first(owners)) is not None]
            if candidates:
                return min(candidates, key=lambda candidate: candidate[0])[1], owners
        return None, None

    def _first_to_go(self, arena: Arena | None, owner: bytes | None) -> Set[bytes] | None:
        return self.owners.first_to_go(self.capacity_bytes, owner, 0 if arena is None else arena.slot_bytes)

    def _evict(self, arena: Arena, owners: Set[bytes] | None) -> bool:
        evicted = arena.index.evict(owners) or (owners is not None and arena.index.evict())
        self._on_evicted(int(evicted))
        return evicted

    def limit(self, error: Exception) -> None:
        """The system has no memory: go on with what there is for a while."""
        if self._clock() >= self._limited_until:
            log.error("no_memory_for_blocks", reason=str(error))
        self._limit_bytes = self.memory_bytes
        self._limited_until = self._clock() + RETRY_S

    def _drop(self, arena: Arena, reason: str) -> None:
        log.info("arena_dropped", segment=arena.segment.name, blocks=arena.index.num_readable, reason=reason)
        self._on_evicted(arena.index.num_readable)
        del self._arenas[arena.fingerprint]
        arena.close()
