"""KV of prompts that are still computed elsewhere, as it arrives: the decode worker's side of a streaming hand-off.

    KvPart ─► blocks taken ─► pulled ─► set aside: the worker's own, until somebody else needs the memory ─► the next part …
    KvPromise ─► likewise, pulled once the owner's step has run: a thread notices, and the owner needs to send no KvPart
                  KvReady ─► what KvReady names, too, becomes the sequence's; the rest of the KV is pulled as always
    KvWithdrawn, Cancel, owner lost, fenced, drain, silence ─► the copy is given up ─► all blocks free

A stream can cost time, never correctness: a part that is lost, or for which there was no room, is pulled behind KvReady. A
block counts only where KvReady names the same block of the same generation at the same place, and its hash is that of the
tokens. What was set aside is given up before any sequence is preempted or refused. What is being written can't be; it is a
bounded part of the pool, and leaves a block to every sequence.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

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
from common.protocol.stream_messages import MAX_PART_BLOCKS, KvPart, KvPromise, KvWatched
from common.runtime import logs
from common.transfer.awaited import Awaited
from common.transfer.base import LocalBlocks, RemoteBlocks
from common.transfer.transfer import MAX_AWAITING
from services.decode.arrival import Arrival, Block, Told
from services.decode.kv_source import Reader, is_known, way_to

log = logs.get("decode")

SILENT_S = 30.0
"""Seconds without a part after which a stream is given up."""
MAX_WRITTEN_SHARE = 8
"""One copy of a stream writes at most this part of a cache group's blocks: nobody else can have them before it has ended."""
MAX_ENDED = 4096
"""Streams that are remembered as over, so that a late part does not begin them anew."""


class Arrivals:
    """`max_streams`: further ones are ignored; their KV is pulled behind KvReady."""

    def __init__(self, worker: Reader, *, max_streams: int) -> None:
        self._worker = worker
        self._max_streams = max_streams
        self._arrivals: dict[str, Arrival] = {}
        self._ended: dict[str, None] = {}
        self._num_awaiting = 0

    def __len__(self) -> int:
        return len(self._arrivals)

    @property
    def leases(self) -> list[tuple[str, WorkerRef]]:
        """Those to renew, with their owners."""
        return [(one.lease, one.owner) for one in self._arrivals.values()]

    def on_promise(self, promise: KvPromise) -> None:
        """Copy what a part names as soon as the owner's step has run, if that can be seen from here."""
        part = promise.part
        if self._num_awaiting >= MAX_AWAITING:
            return
        known = self._arrivals.get(part.stream)
        progress = None if known is None else known.progress
        progress = progress or self._progress_of(part.owner, part.fingerprint)
        if progress is None or promise.step <= 0:
            return
        due_at = time.perf_counter() + max(0, promise.due_us) / 1e6
        if self.on_part(part, promise.step, due_at):
            arrival = self._arrivals[part.stream]
            if arrival.progress is None:
                self._worker.send(part.owner, KvWatched(holder=self._worker.ref, streams=[part.stream]))
            arrival.progress = progress

    def on_part(self, part: KvPart, step: int = 0, due_at: float = 0.0) -> bool:
        """Copy what a part names, in the background. What can't be is left to KvReady. Returns whether anything can.

        step, due_at: see `Told`.
        """
        worker, arrival = self._worker, self._arrivals.get(part.stream)
        if part.stream in self._ended:
            return False
        if not self._is_sound(part, is_promised=step > 0):
            log.warning("kv_part_refused", request=part.request, owner=part.owner.id, start=part.start)
            return False
        if arrival is None:
            is_ours = is_known(worker, part.owner) and part.fingerprint == worker.engine.runner.fingerprint
            if not is_ours or len(self) >= self._max_streams:
                return False
            self._end([one for one in self._arrivals.values() if one.request == part.request and one.attempt < part.attempt])
            now = worker.clock()
            groups: list[dict[int, Block]] = [{} for _ in worker.cache.pool.groups]
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
            return False
        if not step and part.start + len(part.hashes) >= arrival.awaited_end and arrival.transfer is not None:
            arrival.transfer.hurry()
        arrival.heard_at = worker.clock()
        arrival.num_parts += part.start + len(part.hashes) - 1 not in arrival.hashes  # a part may follow its promise
        arrival.hashes.update(enumerate(part.hashes, part.start))
        if not arrival.is_over:
            arrival.todo.extend(Told(theirs, arrival.heard_at, step, due_at) for theirs in part.groups)
            if arrival.idle is None:
                arrival.idle = anyio.Event()
                worker.task_group.start_soon(self._copy, arrival)
        arrival.num_unread += 1
        worker.task_group.start_soon(self._read, arrival, part)  # while the copy runs
        return True

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
            usable = {
                index: one.arrived
                for index, one in mine.items()
                if first <= index < end and named[index - first] == one.source and one.is_full and told[index] == hashes[index]
            }
            tail = mine.get(len(hashes))  # not full, so without a hash: as good as if it were pulled now
            if tail is not None and not tail.is_full and named[len(hashes) - first :] == [tail.source]:
                usable[len(hashes)] = tail.arrived
            arrived.append(usable)
        return arrived

    def take(self, arrival: Arrival, arrived: Arrived) -> None:
        """The sequence was admitted with what `arrived` still holds: the stream is over, and all other blocks of it free."""
        self._forget(arrival)
        if arrival.transfer is not None:
            arrival.transfer.hurry()  # the prompt is computed, so no step need be waited for
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
                await self._copy_blocks(arrival, arrival.todo.popleft())
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

    async def _copy_blocks(self, arrival: Arrival, told: Told) -> None:
        """:raises StaleHandle, TransportUnavailable, Cancelled: what has not been copied is not among the blocks any more."""
        worker, cache, theirs = self._worker, self._worker.cache, told.theirs
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
            if told.step:
                room //= 2  # these blocks are kept from others for as long as the step takes
            if arrival.is_over or len(part) > room:
                return
            taken = pool.allocate(len(part))
            generations = pool.generations_of(taken)
            for i, block, generation in zip(part, taken, generations, strict=True):
                source_block = (theirs.blocks[i], theirs.generations[i])
                is_full = (first + i + 1) * cache.block_tokens <= theirs.end
                mine[first + i] = Block(ArrivedBlock(block, generation, is_owned=True), source_block, is_full)
            after = self._awaited(arrival, told)
            transfer = arrival.transfer = transport.pull(source.pick(part), LocalBlocks(memory, taken), after)
            arrival.awaited_end = first + part[-1] + 1
            is_copied, began_at = False, worker.clock()
            self._num_awaiting += after is not None
            try:
                await transfer
                is_copied = True
            finally:
                arrival.transfer = None
                self._num_awaiting -= after is not None
                self._written(arrival, theirs.group, [first + i for i in part], is_copied)
            times = transfer.facts(waited_s=began_at - told.heard_at)
            copied = Event("part", told.heard_at, worker.clock(), len(part) * cache.block_tokens, arrival.owner.id, facts=times)
            arrival.copies.append(copied)

    def _progress_of(self, ref: WorkerRef, fingerprint: str) -> Callable[[], int] | None:
        """Return what reads a prefill worker's progress; None: it is not to be seen from here."""
        worker, owner = self._worker, self._worker.registry.get(ref.id)
        if owner is None or owner.worker != ref or fingerprint != worker.engine.runner.fingerprint:
            return None
        if worker.remote.transport_to(owner, worker.transport, worker.host, "") is not worker.transport:
            return None
        return worker.transport.progress_of(owner.host, owner.segment, fingerprint)

    def _awaited(self, arrival: Arrival, told: Told) -> Awaited | None:
        """Return what a copy has to wait for; None: nothing, as far as is known already."""
        if not told.step:
            return None
        assert arrival.progress is not None
        if arrival.progress() >= told.step:
            return None
        return Awaited(told.step, arrival.progress, told.due_at)

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

    def _is_sound(self, part: KvPart, *, is_promised: bool) -> bool:
        """Whether a part can be what it says it is; anything else is nobody's KV. Only a promise names a last block that is not
        full."""
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
        end = (part.start + count) * size
        return all(
            theirs.start % size == 0
            and part.start * size <= theirs.start < theirs.end
            and ((theirs.end <= end and theirs.end % size == 0) or (is_promised and end < theirs.end < end + size))
            and len(theirs.blocks) == len(theirs.generations) == cache.blocks_for(theirs.end - theirs.start)
            and len(theirs.checksums) in (0, len(theirs.blocks))
            for theirs in part.groups
        )
