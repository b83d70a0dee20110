"""Token frames on their way from a worker to gateways, no faster than each gateway takes them. Pure: `now` is an argument.

    put ─► room in the gateway's window: sent, numbered ─► FramesTaken: room again
        └► none: what is new of each request waits here as an index, and goes as one frame when there is room

So a gateway that can't keep up gets fewer, larger frames, nothing piles up on the way to it, and the engine never waits: a
sequence's tokens are kept until its gateway has them anyway. A gateway that says nothing of a window (an older version) gets
every frame at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from common.engine.sequence import Sequence
from common.protocol.handles import WorkerRef
from common.protocol.messages import FramesTaken, TokenFrame, frame_units

MESSAGE_UNITS = 1024
"""A message holds about so much; see `frame_units`."""
FRAME_ENTRIES = 2048
"""Tokens of a frame, with their alternatives; the rest goes with the next."""
SILENT_S = 1.0
"""A gateway that has acknowledged nothing for so long has lost what was on its way, or its acknowledgement was lost."""
FORGET_AFTER_S = 60.0
UNBOUNDED = 1 << 60

Send = Callable[[WorkerRef, list[TokenFrame], int], None]
"""`send(gateway, frames, number)`"""


class _Book(msgspec.Struct):
    """One gateway's. `waiting`: what is new of each sequence begins at this output index. `under_way`: number and units of
    messages not acknowledged."""

    window: int = 0
    number: int = 0
    waiting: dict[Sequence, int] = {}
    under_way: deque[tuple[int, int]] = msgspec.field(default_factory=deque)
    num_units: int = 0
    heard_at: float = 0.0


@dataclass(slots=True)
class _Batch:
    """What one step has for one gateway, and the room that there is for it, in units."""

    book: _Book
    room: int
    frames: list[TokenFrame] = field(default_factory=list)
    cost: int = 0


class Outflow:
    """`put` after each step, `taken` for each acknowledgement, `tick` once a heartbeat."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._books: dict[WorkerRef, _Book] = {}

    @property
    def num_waiting(self) -> int:
        """Requests that have tokens for which there was no room."""
        return sum(len(book.waiting) for book in self._books.values())

    def open(self, gateway: WorkerRef, window: int, now: float) -> None:
        """A request of `gateway` came, which takes so many units without an acknowledgement; 0: any number."""
        book = self._books.setdefault(gateway, _Book(heard_at=now))
        book.window = window

    def put(self, news: Iterable[tuple[Sequence, int]], *, urgent: bool = False) -> None:
        """Take what a step generated: for each sequence its tokens from an output index on.

        First tokens, and all that are urgent, go whether there is room or not.
        """
        batches: dict[WorkerRef, _Batch] = {}
        for sequence, start in news:
            gateway = sequence.generation.gateway
            batch = batches.get(gateway)
            if batch is None:
                batch = batches[gateway] = self._begin(gateway)
            waiting = batch.book.waiting
            if sequence in waiting:
                continue
            if start == 0 or urgent or (batch.cost < batch.room and not waiting):
                frame = sequence.frame(start)
                batch.frames.append(frame)
                batch.cost += frame_units(frame)
            else:
                waiting[sequence] = start
        for gateway, batch in batches.items():
            self._flush(gateway, batch.book, batch.frames, batch.cost)

    def _begin(self, gateway: WorkerRef) -> _Batch:
        book = self._books.get(gateway)
        if book is None:
            book = self._books[gateway] = _Book()
        return _Batch(book, book.window - book.num_units if book.window else UNBOUNDED)

    def again(self, sequence: Sequence, start: int) -> None:
        """The gateway lacks this sequence's tokens from `start` on."""
        gateway = sequence.generation.gateway
        book = self._books.setdefault(gateway, _Book())
        book.waiting[sequence] = min(start, book.waiting.get(sequence, start))
        self._flush(gateway, book)

    def read(self, sequence: Sequence) -> None:
        """More of a prompt may have been read: send what is new of it, and its end."""
        if sequence.finish is not None or sequence.num_outputs > sequence.num_reported:
            self.again(sequence, sequence.num_reported)
            sequence.num_reported = sequence.num_outputs

    def drop(self, sequence: Sequence) -> int:
        """Forget the sequence. Returns from which output index on its gateway has been sent nothing."""
        book = self._books.get(sequence.generation.gateway)
        return sequence.num_outputs if book is None else book.waiting.pop(sequence, sequence.num_outputs)

    def taken(self, message: FramesTaken, now: float) -> None:
        """A gateway has worked through all messages up to a number."""
        book = self._books.get(message.gateway)
        if book is None:
            return
        book.window, book.heard_at = message.window, now
        while book.under_way and book.under_way[0][0] <= message.number:
            book.num_units -= book.under_way.popleft()[1]
        self._flush(message.gateway, book)

    def lost(self) -> None:
        """The bus was away: nobody knows what arrived. Gateways fetch what they miss."""
        for gateway, book in self._books.items():
            self._forgive(gateway, book)

    def tick(self, now: float) -> None:
        for gateway, book in list(self._books.items()):
            if book.waiting and now - book.heard_at > SILENT_S:
                book.heard_at = now
                self._forgive(gateway, book)
            elif not book.waiting and now - book.heard_at > FORGET_AFTER_S:
                del self._books[gateway]

    def clear(self) -> None:
        self._books.clear()

    def _forgive(self, gateway: WorkerRef, book: _Book) -> None:
        book.under_way.clear()
        book.num_units = 0
        self._flush(gateway, book)

    def _flush(self, gateway: WorkerRef, book: _Book, frames: list[TokenFrame] | None = None, cost: int = 0) -> None:
        """Send `frames`, of so many units, and what waits, the longest waiting first, as far as there is room."""
        frames = frames or []
        while frames or (book.waiting and (not book.window or book.num_units < book.window)):
            while book.waiting and cost < MESSAGE_UNITS and (not book.window or book.num_units + cost < book.window):
                sequence = next(iter(book.waiting))
                frame = sequence.frame(book.waiting.pop(sequence), max_entries=FRAME_ENTRIES)
                frames.append(frame)
                cost += frame_units(frame)
                if (end := frame.start + len(frame.tokens)) < sequence.num_outputs:
                    book.waiting[sequence] = end
            self._post(gateway, book, frames, cost)
            frames, cost = [], 0

    def _post(self, gateway: WorkerRef, book: _Book, frames: list[TokenFrame], cost: int) -> None:
        book.number += 1
        if book.window:
            book.under_way.append((book.number, cost))
            book.num_units += cost
        self._send(gateway, frames, book.number)
