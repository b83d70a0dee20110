"""Block tables that stay on the GPU: a step sends only what is new of them.

    pack (host)    find the tables' slots; new ids, and their places, go to the end of the step's upload
    apply (device) ids[places] = new ids, one launch before the step's own, and none where nothing is new

`ids` is one array for all sequences and cache groups. A row says where its table begins in it (`DeviceBatch.block_starts`), so
kernels find a block as they would in tables that are uploaded whole. All launches are on one stream: a table changes after the
steps submitted before have run, and a graph reads what was applied before its replay.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from common.engine.gpu.pinned import to_device
from common.engine.gpu.table_slots import Placed, TableSlots, capacity
from common.engine.plan import StepRow
from common.protocol.errors import InvalidParameter

_CHANGE_BYTES = 12
"""Of an id that is sent: where it goes to (int64), and itself (int32)."""
MAX_CHANGE_BYTES = _CHANGE_BYTES << 17
"""Within a step's upload. More than that travels by itself."""
_SPARE_IDS = 4096
_MAX_IDS = 4 << 20


class BlockTables:
    """num_blocks: of the pool of each cache group. max_ids, max_tables: see `TableSlots`; of all groups together.

    ids: int32 [capacity], on the device.
    """

    def __init__(self, *, num_blocks: Sequence[int], max_ids: int, max_tables: int, device: torch.device) -> None:
        self.num_blocks = num_blocks
        self.slots = TableSlots(max_ids=max_ids, max_tables=max_tables)
        self.ids = torch.zeros(len(self.slots.ids), dtype=torch.int32, device=device)
        self._flat = self._placed = Placed(np.zeros(0, np.int64), np.zeros(0, np.int64))
        """What the slots said of the step before, and the same by groups."""

    def place(self, rows: Sequence[StepRow]) -> Placed:
        """Return where the tables of a step are to be: [groups, rows]; the same arrays where nothing has changed.

        :raises InvalidParameter: if a row has other tables than one for each group, or see `TableSlots.place`.
        """
        num_groups = len(self.num_blocks)
        tables, more = [row.blocks for row in rows], [row.more_blocks for row in rows]
        if set(map(len, more)) != {num_groups - 1}:
            raise InvalidParameter(f"a row has other block tables than one for each of {num_groups} cache groups")
        for group in range(num_groups - 1):
            tables += [others[group] for others in more]
        flat = self.slots.place(tables, self.num_blocks)
        if flat is not self._flat:
            self._flat, self._placed = flat, Placed(flat.starts.reshape(num_groups, -1), flat.held.reshape(num_groups, -1))
        return self._placed

    def write_changes(self, out: NDArray[np.uint8]) -> int:
        """Write what the device lacks to the end of a step's upload. out: uint8, aligned to 8 bytes.

        Return how many bytes that are; 0 if nothing has changed, or too much: then `apply` sends it by itself.
        """
        if not self.slots.has_changed:
            return 0
        places, ids = self.slots.changes()
        middle, end = places.nbytes, places.nbytes + ids.nbytes
        if end > len(out):
            return 0
        out[:middle].view(np.int64)[:] = places
        out[middle:end].view(np.int32)[:] = ids
        return end

    def apply(self, upload: torch.Tensor) -> None:
        """Launch the change of the tables. upload: uint8, on the device, what `write_changes` wrote."""
        if not self.slots.has_changed:
            return
        if middle := len(upload) // _CHANGE_BYTES * 8:
            places, ids = upload[:middle].view(torch.int64), upload[middle:].view(torch.int32)
        else:
            places, ids = (to_device(array, self.ids.device) for array in self.slots.changes())
        self.ids.scatter_(0, places, ids)
        self.slots.sent()


def max_table_ids(num_blocks: Sequence[int], max_rows: int, longest_blocks: int, *, batch_invariant: bool = False) -> int:
    """Return how many ids a step's tables have at most, in all cache groups. Rows that share a prefix name its blocks each.

    longest_blocks: of the longest sequence. batch_invariant: whether attention's workspace is sized by the ids; then they are
    fewer.
    """
    named = max(num_blocks) + max_rows + _SPARE_IDS
    if not batch_invariant:
        named = max(named, min(max_rows * longest_blocks, _MAX_IDS))
    return named * len(num_blocks)


def table_bytes(max_ids: int, max_tables: int) -> int:
    """Return the bytes of `BlockTables` on the device."""
    return 4 * capacity(max_ids, max_tables)
