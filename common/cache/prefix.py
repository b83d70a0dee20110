"""Content addresses of KV blocks: equal hash, equal tokens from the first one on, same model, same tenant. Pure."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from common.protocol import tokens as wire_tokens

HASH_BYTES = 16
HASHES = 2
"""Which way of hashing this is. Part of every fingerprint: blocks that another version hashed otherwise are not found."""
TOKEN_BYTES = 4
OWNER_BYTES = 8


def keyed_hash(block_tokens: int, *, fingerprint: str, salt: bytes) -> hashlib.blake2b:
    """Return what the hashes of a model's and a tenant's blocks begin with: copy it for each block. `salt` keeps tenants from
    probing each other's caches. Both are in BLAKE2b's parameters: as a key they would be one more block of each hash."""
    name = fingerprint.encode()
    lengths = struct.pack("<III", block_tokens, len(name), len(salt))
    key = hashlib.blake2b(lengths + name + salt, digest_size=32).digest()
    return hashlib.blake2b(digest_size=HASH_BYTES, salt=key[:16], person=key[16:])


def owner_of(tenant: str) -> bytes:
    """Return what a kvstore knows a tenant by, which does not tell its name; empty: nobody in particular."""
    return hashlib.blake2b(tenant.encode(), digest_size=OWNER_BYTES, person=b"kv owner").digest() if tenant else b""


def hash_packed(keyed: hashlib.blake2b, packed: bytes | memoryview, block_tokens: int, *, parent: bytes = b"") -> list[bytes]:
    """Return one 16-byte hash per full block of `packed`, tokens as uint32; a partial block at the end has none.

    hash[i] = BLAKE2b(hash[i - 1] + tokens of block i), with the parameters of `keyed`. To continue a chain, pass its last hash
    as `parent` and the tokens after it.
    """
    stride = TOKEN_BYTES * block_tokens
    hashes: list[bytes] = []
    for (tokens,) in struct.iter_unpack(f"{stride}s", packed[: len(packed) // stride * stride]):
        block = keyed.copy()
        block.update(parent)
        block.update(tokens)
        parent = block.digest()
        hashes.append(parent)
    return hashes


def hash_chain(tokens: Sequence[int], block_tokens: int, *, fingerprint: str, salt: bytes, parent: bytes = b"") -> list[bytes]:
    """Return the hashes of the full blocks of `tokens`; see `keyed_hash` and `hash_packed`."""
    num_blocks = len(tokens) // block_tokens
    packed = memoryview(wire_tokens.pack(tokens[: num_blocks * block_tokens]))
    return hash_packed(keyed_hash(block_tokens, fingerprint=fingerprint, salt=salt), packed, block_tokens, parent=parent)


def short_hash(block_hash: bytes) -> int:
    """Return 60 bits of a block's hash, never 0: what gateways are told of it. Two blocks of a million share them once in two
    million million such sets, which costs speed alone: workers compare whole hashes."""
    return int.from_bytes(block_hash[:8], "little") >> 4 or 1


def short_hashes(block_hashes: Sequence[bytes]) -> list[int]:
    """Return `short_hash` of each, at a third of the cost."""
    words = struct.unpack("<" + "Q8x" * len(block_hashes), b"".join(block_hashes))
    return [word >> 4 or 1 for word in words]
