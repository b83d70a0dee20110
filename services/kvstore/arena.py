"""The memory of one fingerprint: a shared-memory segment, and the index of what lies in it.

Workers of the host copy blocks in and out of the segment themselves; the store only says where. A slot's generation is
raised before it is granted to a writer, so that who still reads it under an old lease notices.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.protocol.errors import InvalidParameter
from common.transfer.segment import Segment
from services.kvstore.index import BlockIndex

MAX_BLOCK_BYTES = 1 << 32


class Arena:
    """Slots of `block_bytes` each, as many as `capacity_bytes` holds. Pages are taken when first written."""

    def __init__(self, directory: str, name: str, *, fingerprint: str, block_bytes: int, capacity_bytes: int) -> None:
        """:raises InvalidParameter: no block fits. :raises ConfigError: the directory has no room for the segment."""
        if not 0 < block_bytes <= min(capacity_bytes, MAX_BLOCK_BYTES):
            raise InvalidParameter(f"blocks of {block_bytes} bytes don't fit {capacity_bytes >> 20} MiB: raise capacity_mb")
        self.fingerprint = fingerprint
        self.block_bytes = block_bytes
        num_slots = capacity_bytes // block_bytes
        self.segment = Segment.create(directory, name, num_blocks=num_slots, block_bytes=block_bytes, fingerprint=fingerprint)
        self.index = BlockIndex(num_slots)

    @property
    def stored_bytes(self) -> int:
        return self.index.num_readable * self.block_bytes

    @property
    def is_idle(self) -> bool:
        """Nobody reads or writes here."""
        usage = self.index.usage()
        return not usage.owned and not usage.leased

    def reserve(self, hashes: Sequence[bytes]) -> list[tuple[int, int]]:
        """See `BlockIndex.reserve`; the slots have new generations."""
        granted = self.index.reserve(hashes)
        for _, slot in granted:
            self.segment.generations[slot] += 1
        return granted

    def generations_of(self, slots: Sequence[int]) -> list[int]:
        return [int(self.segment.generations[slot]) for slot in slots]

    def close(self) -> None:
        self.segment.close()
