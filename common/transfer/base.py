"""What every KV transport does: copy blocks of another worker's pool into one's own, and never accept a stale one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from common.protocol.errors import StaleHandle
from common.transfer.awaited import Awaited
from common.transfer.blocks import LocalBlocks as LocalBlocks
from common.transfer.blocks import RemoteBlocks as RemoteBlocks  # who knows transports takes both from here
from common.transfer.paths import KvPath
from common.transfer.transfer import Transfer


class Transport(Protocol):
    """Reads other workers' blocks. Safe to call from several threads."""

    @property
    def slice_bytes(self) -> int:
        """Bytes that a pull copies between two looks at whether it was cancelled."""
        ...

    def path_of(self, source: RemoteBlocks) -> KvPath:
        """Return which way `read` would take to `source`: what is measured is told apart by it. Does not block or fail."""
        ...

    def read(self, source: RemoteBlocks, into: np.ndarray, into_blocks: Sequence[int]) -> int:
        """Copy `source` to `into[into_blocks]`; returns bytes. Blocks: call it in a thread.

        `into`: [num_blocks, block_bytes], uint8. Generations are compared after the copy; when this raises, the target
        blocks hold anything.

        :raises StaleHandle: a block was reused, or the segment now belongs to another model.
        :raises TransportUnavailable: the segment can't be reached from here.
        """
        ...

    def begin(self, source: RemoteBlocks, into: np.ndarray, into_blocks: Sequence[int]) -> Callable[[], int] | None:
        """Begin what `read` does, if that takes no time, and return what ends it: it blocks, raises and returns as `read`.

        None: nothing has begun, and `read` says why if it fails, too. What is returned must be called, in any thread.
        """
        ...

    def prepare(self, source: RemoteBlocks, into: np.ndarray, into_blocks: Sequence[int]) -> Callable[[], int] | None:
        """Get ready for what `read` does, as far as that is possible before the blocks are complete, and return what does the
        rest: it blocks, raises and returns as `read`. Blocks: call it in a thread.

        None: there is nothing to get ready, and `read` says why if it fails. What is returned need not be called.
        """
        ...

    def progress_of(self, host: str, segment: str, fingerprint: str) -> Callable[[], int] | None:
        """Return what reads the number of the last step that a segment's owner has run, in any thread, as long as it is called.
        None: it can't be read from here. Does not block for long, and does not fail."""
        ...

    def pull(self, source: RemoteBlocks, target: LocalBlocks, after: Awaited | None = None) -> Transfer:
        """Return the same copy to await: with progress, and an end that can be asked for. It begins when it is awaited, and
        when the step `after` which the blocks are complete has run."""
        ...


def runs(source: Sequence[int], target: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first source block, first target block, length) of each stretch that is consecutive on both sides."""
    start = 0
    for i in range(1, len(source) + 1):
        if i == len(source) or source[i] != source[i - 1] + 1 or target[i] != target[i - 1] + 1:
            yield source[start], target[start], i - start
            start = i


def copy_blocks(source: np.ndarray, source_blocks: Sequence[int], target: np.ndarray, target_blocks: Sequence[int]) -> int:
    """`target[target_blocks] = source[source_blocks]`, in as few copies as the ids allow; returns bytes.

    Both are [blocks, block_bytes], uint8. Whole slices are assigned: numpy lets other threads run meanwhile.
    """
    assert len(source_blocks) == len(target_blocks)
    if not source_blocks:
        return 0
    for first_source, first_target, count in runs(source_blocks, target_blocks):
        target[first_target : first_target + count] = source[first_source : first_source + count]
    return len(source_blocks) * source.shape[1]


def check_generations(current: np.ndarray, blocks: Sequence[int], generations: Sequence[int]) -> None:
    """:raises StaleHandle: unless every block exists and has the generation the handle names."""
    check_handle(len(current), blocks, generations)
    compare_generations(current[np.array(blocks, np.int64)].tolist(), blocks, generations)


def check_handle(num_blocks: int, blocks: Sequence[int], generations: Sequence[int] | None = None) -> None:
    """:raises StaleHandle: unless the handle's blocks are in a pool of `num_blocks`, with a generation each."""
    if generations is not None and len(blocks) != len(generations):
        raise StaleHandle(f"a handle names {len(blocks)} blocks and {len(generations)} generations")
    if blocks and (min(blocks) < 0 or max(blocks) >= num_blocks):
        raise StaleHandle(f"a handle names a block outside a pool of {num_blocks}")


def compare_generations(current: Sequence[int], blocks: Sequence[int], generations: Sequence[int]) -> None:
    """`current`: what the blocks have now. :raises StaleHandle: unless each has the generation the handle names."""
    if list(current) == list(generations):  # as a rule, and thousands of them
        return
    for now, block, generation in zip(current, blocks, generations, strict=True):
        if now != generation:
            raise StaleHandle(f"block {block} was reused since the handle was made")
