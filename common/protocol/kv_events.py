"""What workers tell gateways of their prefix caches, so that requests go where their prefix is.

    worker  → every gateway   `penstock.v1.int.kv.<role>.<worker>`: KvEvents, one every 30 ms at most as a rule
    gateway → worker          KvSnapshotRequest    answered by KvSnapshot; after a gap, and for a worker that is new here

Hashes are short: the first 60 bits of a block's, 8 bytes each, little-endian (`common/cache/prefix.py`). They say nothing of a
prompt to whoever does not know its tokens and its tenant's salt.
"""

from __future__ import annotations

import msgspec

from common.protocol.handles import WorkerRef


class KvLayout(msgspec.Struct, frozen=True, array_like=True):
    """What a worker's block hashes are made of. `groups`: of each cache group the window and the chunk that it keeps of a
    sequence, in tokens; (0, 0): all of it. A prefix counts where every group has the blocks that the token behind it reads.
    """

    fingerprint: str
    block_tokens: int
    groups: list[tuple[int, int]]


class KvEvents(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """prefill or decode → every gateway: blocks of each cache group that can be found by content now, and that no longer can.

    `number` counts the messages with changes of one process, from 1. A message without changes repeats the last number, once a
    second, so that a gateway notices when the last one was lost. A number that is left out is a gap, whatever its reason.
    """

    worker: WorkerRef
    number: int
    layout: KvLayout
    stored: list[bytes] = []
    removed: list[bytes] = []


class KvSnapshotRequest(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """gateway → prefill or decode: which blocks can be found by content? From hash `offset` on, of the snapshot `number`.

    `offset` 0 asks for a snapshot that has all changes up to `number`, or later ones. Answered by KvSnapshot, or by Rejected
    when that snapshot is no longer kept.
    """

    number: int = 0
    offset: int = 0


class KvSnapshot(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """prefill or decode → gateway: part of what could be found when KvEvents `number` was sent.

    `counts[i]`: hashes of cache group i. All groups' hashes are one list, the first group's first; `hashes` is the part of it
    that begins at `offset`.
    """

    worker: WorkerRef
    number: int
    layout: KvLayout
    counts: list[int]
    offset: int
    hashes: bytes


KvEventMessage = KvEvents | KvSnapshotRequest | KvSnapshot
