"""Which blocks each worker's prefix cache holds, as workers tell it. Pure.

    KvEvents, the next number ─► applied
              a later number  ─► a gap: kept for now, and a snapshot is wanted ─► snapshot ─► what was kept is applied behind it
              an earlier one, an unknown worker or an epoch that is over ─► ignored

Several gateways that hear the same workers hold the same, without talking to each other. A worker of whom nothing was heard, or
who does not fit, is not covered: others guess what it holds (`prefix_memory.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from common.protocol.errors import ProtocolError
from common.protocol.handles import WorkerRef
from common.protocol.kv_events import KvEvents
from services.gateway.prompt_chain import Prompt, PromptChain
from services.gateway.worker_blocks import Arriving, Blocks, Held, Layout

RETRY_S, MAX_RETRY_S = 1.0, 30.0
"""Between snapshots that failed, doubled each time."""
RETRY_SOON_S = 0.1
TOO_LARGE_RETRY_S = 30.0
"""A worker whose blocks did not fit is asked again after this."""
STALE_S = 10.0
"""What a worker held before a gap is believed for so long, if no snapshot comes."""
MAX_KEPT_HASHES = 1 << 17
"""Hashes of messages that are kept of one worker while its snapshot is under way."""
MAX_FOLLOWED = 32
"""Of workers that hold a prompt's first block, so many are looked at further, others each time."""
MAX_EXACT = 8
"""Of a model with windows so many workers are looked at block by block, at 0.1 µs a block; more of them by bisection."""
MAX_WINDOW_BLOCKS = 4096
"""Blocks of a prompt that are hashed where no group keeps a whole sequence: its first blocks say nothing of the last then."""


class _Worker:
    """number: of the last message that is in `blocks`. covered: `blocks` are what it held at some time. waiting: since when
    messages are missing, -1: none are. needs: what number its snapshot must have reached; `kept` are the messages behind it."""

    def __init__(self, serial: int) -> None:
        self.serial = serial
        self.forget()
        self.is_asked = False
        self.is_too_large = False
        self.retry_at = 0.0
        self.retry_s = RETRY_S

    def forget(self) -> None:
        self.layout: Layout | None = None
        self.blocks: Blocks | None = None
        self.number = 0
        self.waiting_since = -1.0
        self.needs = 0
        self.kept: list[KvEvents] = []
        self.num_kept = 0

    @property
    def is_waiting(self) -> bool:
        return self.waiting_since >= 0

    def keep(self, events: KvEvents, now: float) -> None:
        """A message that can't be applied before a snapshot has come."""
        self.waiting_since = now if not self.is_waiting else self.waiting_since
        last = self.needs + len(self.kept)
        if events.number <= last:
            return
        changes = sum(map(len, (*events.stored, *events.removed))) // 8
        if events.number > last + 1 or not changes or self.is_too_large or self.num_kept + changes > MAX_KEPT_HASHES:
            self.kept, self.num_kept = [], 0
            self.needs = events.number
            if not changes or self.is_too_large or changes > MAX_KEPT_HASHES:
                return
            self.needs -= 1
        self.kept.append(events)
        self.num_kept += changes


class KvIndex:
    """`max_blocks`: hashes held of all workers together; 0: the index is off."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.num_blocks = 0
        self.num_events = self.num_gaps = self.num_snapshots = self.num_malformed = 0
        self._workers: dict[WorkerRef, _Worker] = {}
        self._covered: dict[Layout, dict[int, Blocks]] = {}
        self._serials: set[int] = set()
        self._turn = 0

    @property
    def num_covered(self) -> int:
        """Workers whose blocks are known."""
        return len(self._serials)

    @property
    def num_too_large(self) -> int:
        """Workers that are left out since their blocks did not fit."""
        return sum(worker.is_too_large for worker in self._workers.values())

    def covers(self, serial: int) -> bool:
        return serial in self._serials

    # -- who is there

    def joined(self, ref: WorkerRef, serial: int) -> None:
        self._workers[ref] = _Worker(serial)

    def left(self, ref: WorkerRef) -> None:
        """Harmless for one that is not there."""
        worker = self._workers.pop(ref, None)
        if worker is not None:
            self._drop(worker)

    def knows(self, ref: WorkerRef) -> bool:
        return ref in self._workers

    # -- what they tell

    def apply(self, events: KvEvents, now: float) -> None:
        """Take a message. One that can't be read is a gap, as if it had been lost."""
        worker = self._workers.get(events.worker)
        if worker is None or not self.max_blocks:
            return
        self.num_events += 1
        try:
            self._apply(worker, events, now)
        except ProtocolError:
            self.num_malformed += 1

    def _apply(self, worker: _Worker, events: KvEvents, now: float) -> None:
        layout = Layout.of(events.layout)
        if worker.layout is not None and worker.layout != layout:
            self._drop(worker)
        if worker.layout is None:
            worker.layout = layout
            if events.number == 0 or (events.number == 1 and (events.stored or events.removed)):
                self._cover(worker, Blocks(layout), 0)
        if worker.blocks is None or worker.is_waiting:
            worker.keep(events, now)
        elif events.number == worker.number + 1 and (events.stored or events.removed):
            self._change(worker, events, now)
        elif events.number > worker.number:
            self.num_gaps += 1
            worker.needs = worker.number
            worker.keep(events, now)

    def _change(self, worker: _Worker, events: KvEvents, now: float) -> None:
        assert worker.blocks is not None
        before = len(worker.blocks)
        worker.blocks.change(events)
        worker.number = events.number
        self.num_blocks += len(worker.blocks) - before
        if self.num_blocks > self.max_blocks:
            self._leave_out(worker, events.number, now)

    # -- snapshots

    def wanted(self, now: float) -> list[WorkerRef]:
        """Workers that should be asked for a snapshot now. What is too old to be believed is forgotten."""
        found: list[WorkerRef] = []
        for ref, worker in self._workers.items():
            if not worker.is_waiting:
                continue
            if worker.blocks is not None and now - worker.waiting_since > STALE_S:
                self._uncover(worker)
            if not worker.is_asked and now >= worker.retry_at:
                found.append(ref)
        return found

    def begin(self, ref: WorkerRef) -> Arriving | None:
        """A snapshot is asked for; `finish` or `fail` must follow. None: nobody needs it any more."""
        worker = self._workers.get(ref)
        if worker is None or worker.is_asked or not worker.is_waiting:
            return None
        worker.is_asked = True
        held = len(worker.blocks) if worker.blocks is not None else 0
        return Arriving(worker.needs, self.max_blocks - self.num_blocks + held)

    def finish(self, ref: WorkerRef, arrived: Arriving, now: float) -> None:
        """All parts are there, or it is known to be too large."""
        worker, blocks = self._workers.get(ref), arrived.blocks
        if worker is None or blocks is None:
            return
        worker.is_asked = False
        if not worker.is_waiting:
            return
        if arrived.is_too_large or len(blocks) + self.num_blocks - len(worker.blocks or ()) > self.max_blocks:
            self._leave_out(worker, arrived.number, now)
            return
        worker.retry_at, worker.retry_s, worker.is_too_large = 0.0, RETRY_S, False
        if arrived.number < worker.needs or blocks.layout != worker.layout:
            worker.retry_at = now + RETRY_SOON_S  # more was lost meanwhile
            return
        kept = worker.kept
        self._cover(worker, blocks, arrived.number)
        self.num_snapshots += 1
        for events in kept:
            if events.number != worker.number + 1 or worker.is_waiting:
                continue
            try:
                self._change(worker, events, now)
            except ProtocolError:
                self.num_malformed += 1
                return  # the next message is behind a gap

    def fail(self, ref: WorkerRef, now: float) -> None:
        """No snapshot came. It is wanted again later."""
        worker = self._workers.get(ref)
        if worker is not None:
            worker.is_asked = False
            worker.retry_at = now + worker.retry_s
            worker.retry_s = min(2 * worker.retry_s, MAX_RETRY_S)

    # -- what is held of a prompt

    def match(self, prompt: Prompt) -> dict[int, int]:
        """Return by serial how many of the prompt's tokens each covered worker could reuse; those with none are left out.

        Blocks leave a cache from the ends of chains, so what is held of a prompt is a beginning, whose end bisection finds.
        That is not so where two sequences computed the same blocks at once, and where windows let go of blocks that are
        computed again: models with windows are looked at block by block. Else the answer may be too long, at the cost of speed.
        """
        found: dict[int, int] = {}
        for layout, workers in self._covered.items():
            chain = prompt.chain(layout.fingerprint, layout.block_tokens)
            if layout.keeps_beginnings:
                ends = self._beginnings(layout, workers, chain)
            else:
                while len(chain.hashes) < MAX_WINDOW_BLOCKS and chain.extend():
                    pass
                ends = dict.fromkeys(workers, len(chain.hashes))
            for serial, end in ends.items():
                usable = workers[serial].reusable(chain.hashes, end)
                if usable:
                    found[serial] = usable * layout.block_tokens
        return found

    def _beginnings(self, layout: Layout, workers: dict[int, Blocks], chain: PromptChain) -> dict[int, int]:
        """Return by serial how many of the chain's blocks each worker holds in all groups that keep whole sequences."""
        if not chain.hashes and not chain.extend():
            return {}
        whole = [index for index, group in enumerate(layout.groups) if group.keeps_all]
        main, others, hashes = whole[0], whole[1:], chain.hashes
        first = hashes[0]
        alive = [(serial, held) for serial, blocks in workers.items() if first in (held := blocks.groups[main])]
        if len(alive) > MAX_FOLLOWED:
            self._turn += MAX_FOLLOWED
            start = self._turn % len(alive)
            alive = (alive[start:] + alive[:start])[:MAX_FOLLOWED]
        ends: dict[int, int] = {}
        known, bisects = 1, layout.keeps_beginnings_alone or len(alive) > MAX_EXACT
        while alive:
            size, part = len(hashes), hashes[-1:] if bisects else hashes[known:]
            going_on: list[tuple[int, Held]] = []
            for each in alive:
                if all(map(each[1].__contains__, part)):
                    going_on.append(each)
                else:
                    ends[each[0]] = _leading(each[1], hashes, known, size, bisects=bisects)
            if not going_on or not chain.extend():
                ends.update((serial, size) for serial, _ in going_on)
                break
            alive, known = going_on, size
        for index in others:
            for serial, end in ends.items():
                ends[serial] = _leading(workers[serial].groups[index], hashes, 0, end, bisects=bisects)
        return ends

    # -- inside

    def _cover(self, worker: _Worker, blocks: Blocks, number: int) -> None:
        self._drop(worker)
        worker.layout, worker.blocks, worker.number = blocks.layout, blocks, number
        self.num_blocks += len(blocks)
        self._covered.setdefault(blocks.layout, {})[worker.serial] = blocks
        self._serials.add(worker.serial)

    def _uncover(self, worker: _Worker) -> None:
        if worker.blocks is not None:
            self.num_blocks -= len(worker.blocks)
            self._serials.discard(worker.serial)
            of_layout = self._covered[worker.blocks.layout]
            del of_layout[worker.serial]
            if not of_layout:
                del self._covered[worker.blocks.layout]
        worker.blocks = None

    def _drop(self, worker: _Worker) -> None:
        self._uncover(worker)
        worker.forget()

    def _leave_out(self, worker: _Worker, number: int, now: float) -> None:
        """Its blocks don't fit: hold none of them, and look again later."""
        layout = worker.layout
        self._drop(worker)
        worker.layout, worker.is_too_large = layout, True
        worker.waiting_since, worker.needs, worker.retry_at = now, number, now + TOO_LARGE_RETRY_S


def _leading(held: Held, hashes: Sequence[int], low: int, high: int, *, bisects: bool) -> int:
    """Return how many of hashes[:high] are held one after the other, of which hashes[:low] are."""
    if bisects:
        return bisect_left(range(high), True, lo=low, hi=high, key=lambda index: hashes[index] not in held)
    return next((index for index in range(low, high) if hashes[index] not in held), high)
