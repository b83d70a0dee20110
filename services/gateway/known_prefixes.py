"""How much of a prompt each worker has in its prefix cache: by what workers tell, and otherwise by what was sent to them. Pure.

A worker that tells (`kv_index.py`) holds what it says, and what this gateway has sent there in the last seconds: blocks are
told of once they are computed, and requests that share a prefix come in bursts. Of another one (an older version, one that is
new here, one with too many blocks) everything that this gateway remembers counts (`prefix_memory.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from common.protocol.handles import WorkerRef
from services.gateway.kv_index import KvIndex
from services.gateway.prefix_memory import PrefixMemory
from services.gateway.prompt_chain import ChainCache, Prompt

SENT_S = 5.0
"""What was sent to a worker counts for so long, or up to twice as long, whether it is told of or not."""


class KnownPrefixes:
    """`affinity_blocks`: keys of prompts remembered. `index_blocks`: blocks of workers held; 0: workers are not listened to."""

    def __init__(self, affinity_blocks: int, index_blocks: int) -> None:
        self.index = KvIndex(index_blocks)
        self._memory = PrefixMemory(affinity_blocks)
        self._sent, self._sent_before = PrefixMemory(affinity_blocks), PrefixMemory(affinity_blocks)
        self._turns_at = -math.inf
        self._cache = ChainCache()

    def prompt(self, packed: bytes, salt: bytes) -> Prompt | None:
        """What `match` takes, of uint32 tokens; None where nobody listens to workers."""
        return Prompt(packed, salt, self._cache) if self.index.max_blocks else None

    def joined(self, ref: WorkerRef, serial: int) -> None:
        self.index.joined(ref, serial)

    def left(self, ref: WorkerRef) -> None:
        self.index.left(ref)

    def tick(self, now: float) -> None:
        """Forget what was sent too long ago. Call it about once a heartbeat."""
        if now >= self._turns_at:
            self._sent, self._sent_before = PrefixMemory(self._sent.capacity), self._sent
            self._turns_at = now + SENT_S

    def remember(self, keys: Sequence[int], serial: int) -> None:
        """This worker is about to compute the prefixes behind `keys`, or to copy them."""
        (self._sent if self.index.covers(serial) else self._memory).remember(keys, serial)

    def match(self, keys: Sequence[int], prompt: Prompt | None) -> dict[int, int]:
        """Return by serial how many tokens of a prompt each worker is believed to hold; workers with none are left out."""
        if prompt is None or not self.index.num_covered:
            return self._memory.match(keys)
        covers, found = self.index.covers, self.index.match(prompt)
        for memory in (self._sent, self._sent_before):
            for serial, tokens in memory.match(keys).items():
                if tokens > found.get(serial, 0):
                    found[serial] = tokens
        for serial, tokens in self._memory.match(keys).items():
            if not covers(serial):
                found[serial] = tokens
        return found
