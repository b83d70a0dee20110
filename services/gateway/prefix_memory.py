"""Which worker has computed which prompt prefix, as far as this gateway sent it there. Pure, bounded, approximate.

A wrong memory costs speed alone, so keys are Python's own keyed hashes (64 bits, salted per process): about 0.1 µs a block.
Prefixes are told apart every 16 tokens at first, then more coarsely, so that a prompt of 100,000 tokens has 400 keys.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence

FINE_TOKENS = 16
MAX_WORKERS_PER_KEY = 4

_TOKEN_BYTES = 4


def _boundaries() -> list[int]:
    """Prefix lengths in tokens: each 16 to 1,024, each 64 to 8,192, each 512 to a million."""
    return [*range(FINE_TOKENS, 1024, FINE_TOKENS), *range(1024, 8192, 64), *range(8192, 1 << 20, 512)]


BOUNDARIES = _boundaries()


def prefix_keys(packed: bytes, salt: bytes = b"") -> list[int]:
    """One key per boundary within the prompt; `packed` is uint32 tokens. Key i stands for the first BOUNDARIES[i] tokens."""
    keys: list[int] = []
    key, start = hash(salt), 0
    for end in BOUNDARIES[: bisect_right(BOUNDARIES, len(packed) // _TOKEN_BYTES)]:
        stop = end * _TOKEN_BYTES
        key = hash((key, packed[start:stop]))
        keys.append(key)
        start = stop
    return keys


class PrefixMemory:
    """`capacity`: keys kept, the least recently used leave first. Workers are small integers, one for each life."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._workers: OrderedDict[int, tuple[int, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._workers)

    def match(self, keys: Sequence[int]) -> dict[int, int]:
        """Tokens of the prompt that each worker is believed to hold; workers with none are left out."""
        found: dict[int, int] = {}
        for key, tokens in zip(keys, BOUNDARIES, strict=False):
            workers = self._workers.get(key)
            if workers is None:
                break
            for worker in workers:
                found[worker] = tokens
        return found

    def remember(self, keys: Sequence[int], worker: int) -> None:
        """`worker` holds, or is about to compute, the prefixes behind `keys`."""
        memory = self._workers
        for key in keys:
            workers = memory.get(key)
            if workers is None:
                memory[key] = (worker,)
                continue
            memory.move_to_end(key)
            if workers[0] != worker:
                others = [other for other in workers if other != worker]
                memory[key] = (worker, *others[: MAX_WORKERS_PER_KEY - 1])
        while len(memory) > self.capacity:
            memory.popitem(last=False)
