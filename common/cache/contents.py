"""Which blocks of a pool can be found by content, for those who keep a copy of that elsewhere: all of them, and changes. Pure.

Hashes are short (`short_hash`). Changes are coalesced: of a block that was stored and removed since the last `take`, only the
end counts. Whoever applies them in the order of `take` holds what the pool holds; a change that is known already is harmless.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Sequence

import numpy as np

from common.cache.prefix import short_hashes

HASH_TYPE = "<u8"
"""How short hashes travel: 8 bytes each, little-endian."""


class PoolContents:
    """The short hash of each of `num_blocks` blocks, and the changes since they were last taken: `max_pending` hashes at most.

    `on_change()` is called for a change when there was none before. More changes than `max_pending` are forgotten, and
    `has_lost` is true from then on until `take`: whoever keeps a copy needs all of it again.
    """

    def __init__(self, num_blocks: int, *, max_pending: int, on_change: Callable[[], None] = lambda: None) -> None:
        self.max_pending = max_pending
        self.has_lost = False
        self._on_change = on_change
        self._hashes = array("Q", bytes(8 * num_blocks))
        self._pending: dict[int, bool] = {}

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def stored(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        """Each of these blocks can be found by its hash from now on."""
        shorts = short_hashes([block_hash for _, block_hash in blocks])
        for (block, _), short in zip(blocks, shorts, strict=True):
            self._hashes[block] = short
        self._note(shorts, True)

    def removed(self, block: int) -> None:
        """`block` can't be found any more."""
        short, self._hashes[block] = self._hashes[block], 0
        self._note([short], False)

    def take(self, limit: int) -> tuple[bytes, bytes]:
        """Return the oldest changes, of at most `limit` hashes: those stored and those removed, as `HASH_TYPE`."""
        self.has_lost = False
        pending = self._pending
        if len(pending) <= limit:
            taken, self._pending = pending, {}
        else:
            taken = dict(itertools.islice(pending.items(), limit))
            for short in taken:
                del pending[short]
        stored = [short for short, is_stored in taken.items() if is_stored]
        removed = [short for short, is_stored in taken.items() if not is_stored]
        return np.array(stored, HASH_TYPE).tobytes(), np.array(removed, HASH_TYPE).tobytes()

    def all(self) -> bytes:
        """Return the short hashes of all blocks that can be found, as `HASH_TYPE`, in no order."""
        hashes = np.frombuffer(self._hashes, np.uint64)
        return hashes[hashes != 0].astype(HASH_TYPE).tobytes()

    def _note(self, shorts: Sequence[int], is_stored: bool) -> None:
        pending = self._pending
        if not pending:
            self._on_change()
        pending.update(dict.fromkeys(shorts, is_stored))
        if len(pending) > self.max_pending:
            pending.clear()
            self.has_lost = True
