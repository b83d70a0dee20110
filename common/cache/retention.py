"""Which of a sequence's tokens a cache group keeps. Pure."""

from __future__ import annotations

import sys

import msgspec


class Retention(msgspec.Struct, frozen=True, array_like=True):
    """What the layers of a group read, and so which blocks the group keeps.

    window: keys that a query sees, its own included; 0 for all keys up to its own.
    chunk: positions of a chunk; a query sees only keys of its own chunk. 0 for no chunks.
    """

    window: int = 0
    chunk: int = 0

    @property
    def keeps_all(self) -> bool:
        return not self.window and not self.chunk

    @property
    def span(self) -> int:
        """Tokens that a query sees at most; 0 for all."""
        return min((limit for limit in (self.window, self.chunk) if limit), default=0)

    @property
    def name(self) -> str:
        """What a group that keeps this is called."""
        return f"window{self.window}" if self.window else f"chunk{self.chunk}" if self.chunk else "kv"

    def first_token(self, position: int) -> int:
        """Return the first token whose KV the token at `position`, or any later one, reads."""
        first = position - self.window + 1 if self.window else 0
        return max(first, position // self.chunk * self.chunk if self.chunk else 0, 0)

    def blocks_for(self, num_tokens: int, block_tokens: int) -> int:
        """Return the blocks that a sequence of `num_tokens` tokens needs while it is computed a block at a time.

        What the next token reads may begin within a block, and the next token may need a block of its own.
        """
        all_blocks = -(-num_tokens // block_tokens)
        if self.keeps_all:
            return all_blocks
        return min(all_blocks, -(-self.span // block_tokens) + 2)

    def longest(self, num_blocks: int, block_tokens: int) -> int:
        """Return the tokens of the longest sequence that `num_blocks` blocks hold."""
        bounded = not self.keeps_all and num_blocks >= self.blocks_for(sys.maxsize, block_tokens)
        return sys.maxsize if bounded else num_blocks * block_tokens


KEEP_ALL = Retention()
