"""Who a worker is, and what a KV handle says.

A handle is a claim, not an address: it names the owner, the owner's epoch and a lease, and per cache group the block ids
with the generation each block had. A reader maps the owner's segment (named by the owner's presence, never by the
handle), copies, and then compares generations again: a block that was freed meanwhile has another generation, and the
copy is thrown away. So a handle can outlive its lease without ever giving wrong KV.
"""

from __future__ import annotations

import os
import time
from typing import Annotated, Literal

import msgspec

WorkerId = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,128}\Z")]
"""One token of a subject: whoever is named in a message can be answered."""

Role = Literal["gateway", "prefill", "decode", "draft", "kvstore"]


class WorkerRef(msgspec.Struct, frozen=True, array_like=True):
    """One life of one worker. A later epoch fences every message and handle of an earlier one.

    `id` is one token of a subject: 1 to 128 characters of A-Z a-z 0-9 _ -.
    """

    role: Role
    id: WorkerId
    epoch: int


class GroupBlocks(msgspec.Struct, frozen=True, array_like=True):
    """The blocks of one cache group: `blocks[i]` had `generations[i]`, and holds entries of tokens [start, end).

    A group whose layers read a window or a chunk leaves out the blocks before what the token at `end` reads: `start` is where
    its first block begins. `checksums[i]`: the CRC-32 of block i, for readers of other hosts; none: not told.
    """

    group: int
    blocks: list[int]
    generations: list[int]
    start: int
    end: int
    checksums: list[int] = []


class KvHandle(msgspec.Struct, frozen=True, kw_only=True):
    """Readable KV of a prompt, until the lease ends.

    `fingerprint` names model, dtype and layout: a reader with another one refuses. `chain` is the block hash of the last
    full block (empty when there is none). `groups`: every cache group of the layout, in its order. The segment of group i > 0
    is the one that the owner announces, with `-i` behind its name, and its blocks' fingerprint is `fingerprint` with `-i`.
    """

    owner: WorkerRef
    lease: str
    fingerprint: str
    num_tokens: int
    chain: bytes
    groups: list[GroupBlocks]


def new_worker_id(role: Role) -> str:
    return f"{role}-{os.urandom(4).hex()}"


def new_epoch(after: int = 0) -> int:
    """Return nanoseconds since 1970, or one more than `after` where the clock is behind it: an epoch never decreases."""
    return max(time.time_ns(), after + 1)


def new_lease() -> str:
    return os.urandom(8).hex()
