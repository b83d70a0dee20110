"""Where the block tables of sequences stand in an array on a GPU, and what of it has to be sent. Pure.

A table gets a slot when a step first has it, and keeps it from step to step: an extent of the array, with room to grow. Then
only blocks that were appended are sent. A table whose version is new is sent whole (see `BlockTable`), and so is one that moves
to a larger extent. Blocks that were let go are not sent: no row reads them. Nobody says when a sequence has ended; tables that
were used longest ago give way when there is no room.

`ids` is what the array on the device is to be. Changes are remembered until `sent`, so that a step which could not be launched
takes nothing from the next one; whatever is named twice has the same value.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.cache.grouped_pool import HOLE
from common.engine.gpu.extents import UNIT, Extent, Extents
from common.protocol.errors import InvalidParameter

_GIVE_WAY = 64
"""Tables that give way at once."""
_NEVER = np.iinfo(np.int64).max


class Placed(NamedTuple):
    """Of each table of a step, int64: where it begins in the array, and how many ids it had when it was read."""

    starts: NDArray[np.int64]
    held: NDArray[np.int64]


class TableSlots:
    """max_ids: ids of a step's tables together, at most. max_tables: tables of a step, at most.

    ids: int32 [capacity], the array with -1 for holes.
    """

    def __init__(self, *, max_ids: int, max_tables: int) -> None:
        self.max_ids = max_ids
        self.ids = np.zeros(capacity(max_ids, max_tables), np.int32)
        self._max_tables = max_tables
        self._extents = Extents(len(self.ids))
        self._slot_of: dict[int, int] = {}
        """By version."""
        self._version_of = [0] * max_tables
        self._free = list(range(max_tables))
        self._starts, self._rooms, self._held = (np.zeros(max_tables, np.int64) for _ in range(3))
        self._used = np.full(max_tables, _NEVER)
        """The turn that a slot was last used in."""
        self._turn = 0
        self._versions: list[int] = []
        self._slots = np.zeros(0, np.int64)
        self._lengths: list[int] = []
        self._placed: Placed | None = None
        """Of the step before, whose tables had `_versions` and `_lengths`."""
        self._singles: list[int] = []
        self._ranges: list[tuple[int, int]] = []
        self._unnamed = itertools.count(1)

    def place(self, tables: Sequence[list[int]], num_blocks: Sequence[int]) -> Placed:
        """Give every table of a step a slot with what it holds now. For the same tables again, return the same arrays.

        num_blocks: of the pools of the step's cache groups. The tables are those of the first group's rows, then those of the
        next one's. A list that is no `BlockTable` is sent whole.

        :raises InvalidParameter: if a table names a block that its pool does not have, or the tables are too large together.
        """
        versions, counts = self._versions_of(tables), list(map(len, tables))
        if self._placed is not None and versions == self._versions and counts == self._lengths:
            return self._placed
        self._placed = None
        lengths = np.array(counts, np.int64)
        num_ids = lengths.sum()
        if len(tables) > self._max_tables or num_ids > self.max_ids:
            raise InvalidParameter(
                f"a step has {len(tables)} block tables with {num_ids} ids; this engine holds {self._max_tables} "
                f"with {self.max_ids}"
            )
        step = _Step(tables, versions, lengths)
        if not self._update(step, num_blocks):
            self.forget()  # the gaps between tables are too small: begin with the largest, and there are none
            self._enter(step, np.argsort(-lengths, kind="stable").tolist())
            placed = self._update(step, num_blocks)
            assert placed, "extents don't hold a step's tables"
        self._lengths = counts
        self._placed = Placed(self._starts[self._slots], self._held[self._slots])
        return self._placed

    def changes(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return what the device lacks: places in the array, and the ids to put there, 0 for holes."""
        parts = [np.array(self._singles, np.int64), *itertools.starmap(np.arange, self._ranges)]
        places = np.concatenate(parts) if self._ranges else parts[0]
        return places, np.maximum(self.ids[places], 0)

    @property
    def has_changed(self) -> bool:
        """Whether the device lacks anything."""
        return bool(self._singles or self._ranges)

    def sent(self) -> None:
        """The device has all changes up to here, or will have them before a later step runs."""
        self._singles.clear()
        self._ranges.clear()

    def forget(self) -> None:
        """Every table is sent whole when it comes again."""
        self._extents.clear()
        self._slot_of.clear()
        self._free = list(range(self._max_tables))
        self._used[:] = _NEVER
        self._versions, self._slots, self._placed = [], np.zeros(0, np.int64), None

    def _versions_of(self, tables: Sequence[list[int]]) -> list[int]:
        try:
            return [table.version for table in tables]  # pyright: ignore[reportAttributeAccessIssue]
        except AttributeError:
            return [getattr(table, "version", 0) or -next(self._unnamed) for table in tables]

    def _update(self, step: _Step, num_blocks: Sequence[int]) -> bool:
        """Return whether there was room."""
        if step.versions != self._versions and not self._enter(step, range(len(step.versions))):
            return False
        slots, per_group = self._slots, len(step.tables) // len(num_blocks)
        for index in (step.lengths != self._held[slots]).nonzero()[0].tolist():
            if not self._extend(
                int(slots[index]), step.tables[index], int(step.lengths[index]), num_blocks[index // per_group]
            ):
                return False
        return True

    def _enter(self, step: _Step, order: Sequence[int]) -> bool:
        """Find the slots of tables, and give one to those that have none; their ids are still to come. Return whether there
        was room."""
        self._turn += 1
        found = list(map(self._slot_of.get, step.versions))
        if None in found:
            self._used[[slot for slot in found if slot is not None]] = self._turn
            for index in order:
                version = step.versions[index]
                slot = self._slot_of.get(version)
                if slot is None:
                    if not self._free and not self._give_way():
                        return False
                    extent = self._take(int(step.lengths[index]) + 1)
                    if extent is None:
                        return False
                    slot = self._slot_of[version] = self._free.pop()
                    self._version_of[slot] = version
                    self._starts[slot], self._rooms[slot] = extent
                    self._held[slot], self._used[slot] = 0, self._turn
                found[index] = slot
        self._versions, self._slots = step.versions, np.array(found, np.int64)
        self._used[self._slots] = self._turn
        return True

    def _extend(self, slot: int, table: list[int], length: int, num_blocks: int) -> bool:
        """Write what a table has beyond what its slot has. Return whether there was room.

        :raises InvalidParameter: if a block is not in the pool.
        """
        known = int(self._held[slot])
        if length > self._rooms[slot]:
            self._extents.give(self._extent(slot))
            known = self._rooms[slot] = self._held[slot] = 0
            extent = self._take(length + 1)
            if extent is None:
                return False
            self._starts[slot], self._rooms[slot] = extent
        new = table[known:length]
        if not new:  # another row of the step has the same table
            return True
        start = int(self._starts[slot]) + known
        if len(new) == 1:  # as a rule
            ids = least = most = new[0]
            self._singles.append(start)
        else:
            ids = np.array(new, np.int32)
            least, most = ids.min(), ids.max()
            self._ranges.append((start, start + len(new)))
        if least < HOLE or most >= num_blocks:
            raise InvalidParameter(f"a row names a block outside the pool of {num_blocks}")
        self.ids[start : start + len(new)] = ids
        self._held[slot] = length
        return True

    def _extent(self, slot: int) -> Extent:
        return Extent(int(self._starts[slot]), int(self._rooms[slot]))

    def _take(self, count: int) -> Extent | None:
        while (extent := self._extents.take(count)) is None:
            if not self._give_way():
                return None
        return extent

    def _give_way(self) -> bool:
        """Drop the tables that were used longest ago, but none of this step. Return whether there were any."""
        idle = (self._used < self._turn).nonzero()[0]
        for slot in idle[self._used[idle].argsort(kind="stable")][:_GIVE_WAY].tolist():
            del self._slot_of[self._version_of[slot]]
            self._extents.give(self._extent(slot))
            self._free.append(slot)
            self._used[slot] = _NEVER
        return len(idle) > 0


class _Step(NamedTuple):
    """lengths: int64, of the tables when they were read. They may grow meanwhile, on another thread."""

    tables: Sequence[list[int]]
    versions: list[int]
    lengths: NDArray[np.int64]


def capacity(max_ids: int, max_tables: int) -> int:
    """Return the size of an array in which any tables fit that have `max_ids` ids together: an extent is less than twice as
    large as its table, or has `UNIT` elements."""
    return -(-2 * max_ids // UNIT) * UNIT + UNIT * max_tables
