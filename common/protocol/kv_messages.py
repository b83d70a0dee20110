"""What workers say in their heartbeats of the KV that they copied, found and computed again, since their start."""

from __future__ import annotations

import msgspec


class PathTraffic(msgspec.Struct, frozen=True, array_like=True):
    """Copies over one path. `path`: one of `common/transfer/paths.py`; `operation`: `read` or `write`. `seconds`: of the copies
    that did not fail, added up."""

    path: str
    operation: str
    bytes: int = 0
    seconds: float = 0.0
    copies: int = 0
    failures: int = 0


class KvTraffic(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's KV since its start: by path; of prompts that it was given to compute, how many tokens were looked up and how
    many were found, in its own cache, in a kvstore's memory, on its disk, and in kvstores of other hosts; at hand-offs, what it
    received, and the tokens that were in its own cache already (`cached_tokens`).

    `recomputed_tokens`: computed although their KV had been computed before: the hand-off failed, the request moved here from a
    worker that died, or its blocks were given to others (`preempted_tokens` of them), or a head needs their hidden states
    (`drafted_tokens`). `leases`: held on its blocks now; the oldest since `oldest_lease_s`.
    """

    paths: list[PathTraffic] = []
    looked_up_tokens: int = 0
    own_tokens: int = 0
    memory_tokens: int = 0
    disk_tokens: int = 0
    remote_tokens: int = 0
    received_tokens: int = 0
    received_bytes: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    preempted_tokens: int = 0
    drafted_tokens: int = 0
    leases: int = 0
    oldest_lease_s: float = 0.0
