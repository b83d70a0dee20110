"""How many blocks each cache group gets of a worker's memory. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from common.cache.spec import GroupSpec


def divide_memory(
    groups: Sequence[GroupSpec], memory_bytes: int, *, max_context: int, num_sequences: int, step_tokens: int
) -> list[int]:
    """Return the number of blocks of each group.

    A group that keeps a window or chunks gets what `num_sequences` sequences of `max_context` tokens need of it, and a step's
    tokens; what is left goes to the groups that keep everything. Where memory is too small for that, groups get what sequences
    of the longest length need with which it is not.
    """
    if len(groups) == 1:
        return [memory_bytes // groups[0].block_bytes]

    def counts(num_tokens: int) -> list[int]:
        return [
            num_sequences * group.retention.blocks_for(num_tokens, group.block_tokens)
            + (0 if group.retention.keeps_all else -(-step_tokens // group.block_tokens))
            for group in groups
        ]

    def size(blocks: list[int]) -> int:
        return sum(group.block_bytes * count for group, count in zip(groups, blocks, strict=True))

    shortest, longest = 0, max_context
    while shortest < longest:
        middle = (shortest + longest + 1) // 2
        shortest, longest = (middle, longest) if size(counts(middle)) <= memory_bytes else (shortest, middle - 1)
    found = counts(shortest) if shortest else [0] * len(groups)
    growing = [index for index, group in enumerate(groups) if group.retention.keeps_all and shortest] or range(len(groups))
    more = (memory_bytes - size(found)) // sum(groups[index].block_bytes for index in growing)
    return [count + (more if index in growing else 0) for index, count in enumerate(found)]
