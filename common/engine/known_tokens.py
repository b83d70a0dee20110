"""The beginning of a prompt that came ahead of it: checked, and hashed as KV blocks are. Pure.

    extend (a part of the prompt) … ─► KvReady with the whole prompt ─► `begins`: only what is new of it is looked at

Nothing is taken on trust: a prompt is compared with these tokens byte by byte, and the hashes are computed here.
"""

from __future__ import annotations

from common.cache.prefix import TOKEN_BYTES, hash_packed, keyed_hash
from common.protocol import tokens as token_bytes
from common.protocol.messages import Generation


class KnownTokens:
    """tokens: of full blocks, all below `vocab_size`. hashes: of these blocks, as `SequenceCache.hash` would compute them."""

    def __init__(self, *, block_tokens: int, fingerprint: str, salt: bytes, vocab_size: int) -> None:
        self.tokens: list[int] = []
        self.hashes: list[bytes] = []
        self._salt = salt
        self._packed = bytearray()
        self._block_tokens = block_tokens
        self._vocab_size = vocab_size
        self._keyed = keyed_hash(block_tokens, fingerprint=fingerprint, salt=salt)

    def extend(self, first_block: int, packed: bytes) -> None:
        """Take the tokens of full blocks from index `first_block` on, if they follow what is known and are of the vocabulary.

        packed: as `Generation.tokens`.
        """
        follows = first_block == len(self.hashes) and len(packed) % (TOKEN_BYTES * self._block_tokens) == 0
        if not packed or not follows or token_bytes.largest(packed) >= self._vocab_size:
            return  # what is not known here is checked and hashed when the prompt comes
        parent = self.hashes[-1] if self.hashes else b""
        self.hashes += hash_packed(self._keyed, packed, self._block_tokens, parent=parent)
        self.tokens += token_bytes.unpack(packed)
        self._packed += packed

    def begins(self, generation: Generation) -> bool:
        """Return whether a prompt begins with these tokens, and its blocks with these hashes."""
        return generation.salt == self._salt and generation.tokens.startswith(self._packed)
