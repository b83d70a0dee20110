"""The hash chain of a prompt's blocks as workers compute it, as far as somebody needs it. Pure.

A block costs 0.35 µs to hash, and a hash needs the one before it. So a prompt that nobody has seen is hashed for one block, any
other by segments, until no worker has the last block of one. Segments that were hashed lately are found by Python's own keyed
hash (64 bits, salted per process) of all tokens up to their end, at 2 µs a segment: popular beginnings are hashed once. A
collision there costs speed alone.
"""

from __future__ import annotations

import functools
from collections import OrderedDict

from common.cache.prefix import TOKEN_BYTES, hash_packed, keyed_hash, short_hashes

SEGMENT_BLOCKS = 32
MAX_SEGMENTS = 2048
"""Segments kept of one model's prompts, 2 KB each."""

Segment = tuple[bytes, tuple[int, ...]]
"""The last block's hash, and the short hashes of all blocks."""


class ChainCache:
    """Segments hashed lately, by their keys; the least recently used leave first."""

    def __init__(self, max_segments: int = MAX_SEGMENTS) -> None:
        self.max_segments = max_segments
        self._segments: OrderedDict[int, Segment] = OrderedDict()

    def __len__(self) -> int:
        return len(self._segments)

    def get(self, key: int) -> Segment | None:
        segment = self._segments.get(key)
        if segment is not None:
            self._segments.move_to_end(key)
        return segment

    def put(self, key: int, segment: Segment) -> None:
        self._segments[key] = segment
        if len(self._segments) > self.max_segments:
            self._segments.popitem(last=False)


class PromptChain:
    """The chain of one prompt under one layout. `hashes`: the short ones of its first blocks, as many as `extend` has added.
    A block that the last token completes is left out: a worker computes the last token in any case."""

    def __init__(self, packed: bytes, salt: bytes, cache: ChainCache, *, fingerprint: str, block_tokens: int) -> None:
        self.hashes: list[int] = []
        self._packed = packed
        self._cache = cache
        self._block_tokens = block_tokens
        self._stride = TOKEN_BYTES * block_tokens
        self._num_blocks = max(0, len(packed) - TOKEN_BYTES) // self._stride
        self._begin = functools.cache(functools.partial(keyed_hash, block_tokens, fingerprint=fingerprint, salt=salt))
        self._key = hash((block_tokens, fingerprint, salt))
        self._last = b""

    def extend(self) -> bool:
        """Add hashes: of the first block at first, then to the end of a segment. False: the prompt has no more full blocks."""
        begin = len(self.hashes)
        if begin >= self._num_blocks:
            return False
        first = begin // SEGMENT_BLOCKS * SEGMENT_BLOCKS
        end = first + SEGMENT_BLOCKS
        if end > self._num_blocks:
            self._hash(begin, self._num_blocks if begin else 1)
            return True
        key = hash((self._key, self._packed[first * self._stride : end * self._stride]))
        segment = self._cache.get(key)
        if segment is not None:
            self._last = segment[0]
            self.hashes[first:] = segment[1]
        elif not begin:
            self._hash(0, 1)
            return True
        else:
            self._hash(begin, end)
            self._cache.put(key, (self._last, tuple(self.hashes[first:])))
        self._key = key
        return True

    def _hash(self, begin: int, end: int) -> None:
        part = self._packed[begin * self._stride : end * self._stride]
        hashes = hash_packed(self._begin(), part, self._block_tokens, parent=self._last)
        self._last = hashes[-1]
        self.hashes += short_hashes(hashes)


class Prompt:
    """A prompt that is looked up: `packed` is uint32 tokens. Its chains are made once for each layout that a worker has."""

    def __init__(self, packed: bytes, salt: bytes, cache: ChainCache) -> None:
        self._packed = packed
        self._salt = salt
        self._cache = cache
        self._chains: dict[tuple[str, int], PromptChain] = {}

    def forget(self) -> None:
        """Give the memory of its chains back; they are made again if need be."""
        self._chains.clear()

    def chain(self, fingerprint: str, block_tokens: int) -> PromptChain:
        key = fingerprint, block_tokens
        chain = self._chains.get(key)
        if chain is None:
            chain = PromptChain(self._packed, self._salt, self._cache, fingerprint=fingerprint, block_tokens=block_tokens)
            self._chains[key] = chain
        return chain
