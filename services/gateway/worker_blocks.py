"""What one worker holds in its prefix cache, by its own word, and how long a beginning of a prompt it could reuse. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from common.cache.contents import HASH_TYPE
from common.cache.retention import Retention
from common.protocol.errors import ProtocolError
from common.protocol.kv_events import KvEvents, KvLayout, KvSnapshot

Held = dict[int, None]
"""A set of hashes. Garbage collection would go through a `set`, 40 ms for a million; it leaves a dict of numbers alone."""
MAX_BLOCK_TOKENS = 1 << 16
MAX_GROUPS = 64


class Layout(NamedTuple):
    """What workers have in common whose hashes can be compared."""

    fingerprint: str
    block_tokens: int
    groups: tuple[Retention, ...]

    @classmethod
    def of(cls, said: KvLayout) -> Layout:
        """:raises ProtocolError: there is no such layout."""
        sizes = [size for group in said.groups for size in group]
        if not 1 <= said.block_tokens <= MAX_BLOCK_TOKENS or not 1 <= len(said.groups) <= MAX_GROUPS or min(sizes) < 0:
            raise ProtocolError("a layout needs cache groups, and blocks of one token or more")
        return cls(said.fingerprint, said.block_tokens, tuple(Retention(window, chunk) for window, chunk in said.groups))

    @property
    def keeps_beginnings(self) -> bool:
        """Whether a cache group keeps all of a sequence: what is held of a prompt is its beginning then."""
        return any(group.keeps_all for group in self.groups)

    @property
    def keeps_beginnings_alone(self) -> bool:
        """Whether all cache groups keep all of a sequence."""
        return all(group.keeps_all for group in self.groups)


def unpack(packed: bytes) -> list[int]:
    """:raises ProtocolError: `packed` holds no whole number of hashes."""
    if len(packed) % 8:
        raise ProtocolError(f"{len(packed)} bytes are not a whole number of hashes")
    return np.frombuffer(packed, HASH_TYPE).tolist()


class Blocks:
    """The hashes that each cache group of one worker holds, some 75 bytes each."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.groups: list[Held] = [{} for _ in layout.groups]

    def __len__(self) -> int:
        return sum(map(len, self.groups))

    def change(self, events: KvEvents) -> None:
        """:raises ProtocolError: nothing was changed then."""
        if len(events.stored) > len(self.groups) or len(events.removed) > len(self.groups):
            raise ProtocolError("events name a cache group that the layout lacks")
        stored, removed = [unpack(part) for part in events.stored], [unpack(part) for part in events.removed]
        for held, hashes in zip(self.groups, removed, strict=False):
            for short in hashes:
                held.pop(short, None)
        for held, hashes in zip(self.groups, stored, strict=False):
            held.update(dict.fromkeys(hashes))

    def reusable(self, hashes: Sequence[int], end: int) -> int:
        """Return the blocks of the longest beginning of a prompt that a sequence could go on behind, `end` at most: as
        `GroupedPool.match` finds it. Every group that keeps all of a sequence holds `hashes[:end]`."""
        before = -1
        while before != end and end > 0:
            before = end
            for held, retention in zip(self.groups, self.layout.groups, strict=True):
                if not retention.keeps_all:
                    end = self._usable(held, retention, hashes, end)
        return end

    def _usable(self, held: Held, retention: Retention, hashes: Sequence[int], end: int) -> int:
        """Return the most blocks, at most `end`, behind which the group has what the next token reads."""
        block_tokens = self.layout.block_tokens
        while end > 0:
            first, i = retention.first_token(end * block_tokens) // block_tokens, end - 1
            while i >= first and hashes[i] in held:
                i -= 1
            if i < first:
                return end
            end = i
        return 0


class Arriving:
    """A snapshot of which not all parts have come. `max_blocks`: what it may hold."""

    def __init__(self, number: int, max_blocks: int) -> None:
        self.number = number
        self.offset = 0
        self.max_blocks = max_blocks
        self.blocks: Blocks | None = None
        self._counts: list[int] = []

    @property
    def is_complete(self) -> bool:
        return self.blocks is not None and self.offset >= sum(self._counts)

    @property
    def is_too_large(self) -> bool:
        return sum(self._counts) > self.max_blocks

    def add(self, part: KvSnapshot) -> None:
        """:raises ProtocolError: it is not the next part."""
        if self.blocks is None:
            layout = Layout.of(part.layout)
            if len(part.counts) != len(layout.groups) or min(part.counts) < 0 or part.offset or part.number < self.number:
                raise ProtocolError("a snapshot does not begin as it was asked for")
            self.blocks, self._counts, self.number = Blocks(layout), part.counts, part.number
        elif part.number != self.number or part.offset != self.offset or not part.hashes:
            raise ProtocolError("a part of a snapshot does not continue the parts before it")
        hashes = unpack(part.hashes)
        if self.offset + len(hashes) > sum(self._counts) or (not hashes and not self.is_complete):
            raise ProtocolError("a snapshot holds another number of hashes than it says")
        if not self.is_too_large:
            self._put(self.blocks.groups, hashes)
        self.offset += len(hashes)

    def _put(self, groups: Iterable[Held], hashes: list[int]) -> None:
        begin, end = self.offset, self.offset + len(hashes)
        first = 0
        for held, count in zip(groups, self._counts, strict=True):
            held.update(dict.fromkeys(hashes[max(first - begin, 0) : max(min(first + count, end) - begin, 0)]))
            first += count
