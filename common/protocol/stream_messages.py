"""A prompt's KV that leaves while the rest of the prompt is computed: a stream of parts, ahead of its KvReady.

Each part stands alone: one that is lost, repeated or late costs time, not correctness. KvReady names all blocks again, and what
a part brought counts only where KvReady names the same block of the same generation for the same tokens.
"""

from __future__ import annotations

import msgspec

from common.protocol.handles import GroupBlocks, WorkerRef

MAX_PART_BLOCKS = 2048
"""Entries of `KvPart.hashes` at most: 34 bytes each with one cache group, 16 more for each further one, and their tokens."""


class KvPart(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """prefill → decode: more KV of a prompt is readable before its KvReady comes, until `lease` ends. Not answered.

    `stream`: this attempt's hand-off to you; its KvReady names it, unless KvWithdrawn ends it first. `hashes`: of the full
    blocks from index `start` of the chain on. `groups`: of these blocks, those of each cache group that KvReady will name;
    groups without any are left out. `lease`: renew it with RenewLeases as if KvReady had come; ReleaseLease ends the stream.
    `tokens`, `salt`: of these blocks, as in `Generation`, so that they are hashed before KvReady comes; empty: they are not.
    """

    owner: WorkerRef
    request: str
    attempt: int
    stream: str
    lease: str
    fingerprint: str
    start: int
    hashes: list[bytes]
    groups: list[GroupBlocks]
    tokens: bytes = b""
    salt: bytes = b""


class KvPromise(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """prefill → decode: a step was submitted, and `part` is readable once it has run, so not before. Not answered. Its
    groups name a prompt's last block also if that is not full.

    The number of the last step that has run is in the owner's segment: who can read it there copies the blocks as soon as it is
    `step` or higher, and says so with KvWatched. Anyone else forgets the promise, and is sent a KvPart when the step has run.
    Of a step that fails nothing is readable: the stream is withdrawn, and KvReady does not name it. `due_us`: in how many
    microseconds the step is expected to have run.
    """

    part: KvPart
    step: int
    due_us: int


class KvWatched(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """decode → prefill: what you promise of these streams needs no KvPart. One that is lost costs a KvPart for each chunk."""

    holder: WorkerRef
    streams: list[str]


class KvWithdrawn(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """prefill → decode: these streams will have no KvReady; forget their parts. Harmless twice, and for unknown ones."""

    owner: WorkerRef
    streams: list[str]
