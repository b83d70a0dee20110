"""Content addresses of KV blocks: equal hash, equal tokens from the first one on, same model, same tenant. Pure."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from common.protocol import tokens as wire_tokens

HASH_BYTES = 16


def hash_chain(tokens: Sequence[int], block_tokens: int, *, fingerprint: str, salt: bytes, parent: bytes = b"") -> list[bytes]:
    """One 16-byte hash per full block of `tokens`; a partial block at the end has none.

    hash[i] = BLAKE2b(hash[i - 1] + tokens of block i), keyed by `fingerprint`, `salt` and the block size. `salt` keeps
    tenants from probing each other's caches. To continue a chain, pass its last hash as `parent` and the tokens after it.
    """
    name = fingerprint.encode()
    lengths = struct.pack("<III", block_tokens, len(name), len(salt))
    key = hashlib.blake2b(lengths + name + salt, digest_size=32).digest()
    keyed = hashlib.blake2b(key=key, digest_size=HASH_BYTES)  # copied per block: the key is absorbed once
    num_blocks = len(tokens) // block_tokens
    packed = memoryview(wire_tokens.pack(tokens[: num_blocks * block_tokens]))
    stride = 4 * block_tokens
    hashes = []
    for start in range(0, num_blocks * stride, stride):
        block = keyed.copy()
        block.update(parent)
        block.update(packed[start : start + stride])
        parent = block.digest()
        hashes.append(parent)
    return hashes
