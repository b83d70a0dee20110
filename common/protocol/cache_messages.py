"""Messages between workers and kvstores: which blocks are there, where to read them, where to write more; and blocks in use."""

from __future__ import annotations

import msgspec

from common.protocol.explain_messages import RequestContext
from common.protocol.handles import WorkerRef


class BlockLookup(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """worker → kvstore: which leading part of this hash chain do you hold? Answered by BlockLease.

    A group that keeps a window or chunks reads of a part only its last blocks: hashes[firsts[i]:i + 1] of the part that ends
    behind block i. With `firsts` the longest part is asked for of which those are there.

    The holder names the lease, so that it can release one whose answer it never got. Empty: the store names it. `fingerprint`
    names the blocks of one cache group: that of group i > 0 ends with `-i`. `context`: the request that is to be computed.
    `waits`: false where computing is faster than the store's disk: it answers at once, with what is in memory, and reads the
    rest for others.
    """

    holder: WorkerRef
    fingerprint: str
    hashes: list[bytes]
    lease: str = ""
    firsts: list[int] = []
    context: RequestContext = RequestContext()
    waits: bool = True


class BlockLease(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """kvstore → worker: `blocks` of `segment` hold len(blocks) hashes from index `first` on, until the lease ends. No block: a
    miss, or with `first` a part of so many blocks behind which nothing of it is read.

    `checksums[i]` is the CRC-32 that the i-th block must have once copied. `coming`: so many hashes behind them are being read
    from a disk; a lookup that begins there finds them soon. `num_from_disk`: so many of `blocks` were on a disk alone when they
    were asked for.
    """

    store: WorkerRef
    lease: str
    blocks: list[int]
    generations: list[int]
    segment: str = ""
    checksums: list[int] = []
    first: int = 0
    coming: int = 0
    num_from_disk: int = 0


class BlockOwner(msgspec.Struct, frozen=True, array_like=True):
    """Whose request blocks were computed for. `name`: see `cache.prefix.owner_of`; empty: nobody's in particular. Owners share
    a store by `weight`."""

    name: bytes = b""
    weight: float = 1.0


class BlockOffer(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """worker → kvstore: I can give you these blocks. Answered by BlockGrant. `lease` and `context` as in BlockLookup. `cost_s`:
    seconds that computing a block again takes; 0: not known."""

    holder: WorkerRef
    fingerprint: str
    block_bytes: int
    hashes: list[bytes]
    lease: str = ""
    context: RequestContext = RequestContext()
    owner: BlockOwner = BlockOwner()
    cost_s: float = 0.0


class BlockGrant(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """kvstore → worker: write hash `indices[i]` of the offer to `blocks[i]` of `segment`, then send BlockCommit.

    `indices` leaves out what the store has already, and may end early: who offers the rest again, from the last of them on,
    gets more, or nothing. `generations`: of `blocks`, while they are this grant's; none from a store
    that does not say.
    """

    store: WorkerRef
    lease: str
    indices: list[int]
    blocks: list[int]
    segment: str = ""
    generations: list[int] = []


class BlockCommit(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """worker → kvstore: everything granted under this lease is written; others may read it now.

    `checksums[i]` is the CRC-32 of the i-th granted block.
    """

    lease: str
    checksums: list[int]


class KvUsage(msgspec.Struct, frozen=True, array_like=True):
    """Blocks: free + owned + leased + cached == total. `groups`: of each cache group, where there are several."""

    total: int = 0
    free: int = 0
    owned: int = 0
    leased: int = 0
    cached: int = 0
    groups: list[KvUsage] = []


class KvTier(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One of a kvstore's tiers, in a heartbeat: what it holds now, and since its start hits (blocks found there for lookups),
    blocks evicted, and blocks that failed their checksum. `queued_blocks` wait to be written there. `problem`: why it is
    off."""

    name: str
    blocks: int = 0
    bytes: int = 0
    capacity_bytes: int = 0
    hit_blocks: int = 0
    evicted_blocks: int = 0
    queued_blocks: int = 0
    damaged_blocks: int = 0
    problem: str = ""
