"""Where KV blocks are copied from and to: blocks of another worker's pool, and of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class RemoteBlocks(NamedTuple):
    """`blocks` of the segment that the worker on `host` announced, as they were at `generations`; `checksums`, if there are
    any, are their CRC-32s."""

    host: str
    segment: str
    fingerprint: str
    blocks: Sequence[int]
    generations: Sequence[int]
    checksums: Sequence[int] = ()

    def pick(self, indices: Sequence[int]) -> RemoteBlocks:
        """Return those at `indices` of these."""
        blocks, generations = ([one[i] for i in indices] for one in (self.blocks, self.generations))
        checksums = [self.checksums[i] for i in indices] if self.checksums else ()
        return self._replace(blocks=blocks, generations=generations, checksums=checksums)

    def part(self, start: int, end: int) -> RemoteBlocks:
        """Return the blocks [start, end) of these."""
        blocks, generations, checksums = (one[start:end] for one in (self.blocks, self.generations, self.checksums))
        return self._replace(blocks=blocks, generations=generations, checksums=checksums)


class LocalBlocks(NamedTuple):
    """`blocks` of this worker's own pool, which a copy writes. `memory`: [num_blocks, block_bytes], uint8."""

    memory: np.ndarray
    blocks: Sequence[int]
