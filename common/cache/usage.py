"""How full the KV blocks are that a worker says it has. Pure."""

from __future__ import annotations

from common.protocol.messages import KvUsage


def used_share(usage: KvUsage) -> float:
    """Return the share of blocks owned or leased, 0 to 1; 0 where there are none."""
    return (usage.owned + usage.leased) / usage.total if usage.total else 0.0


def fullest(usage: KvUsage) -> KvUsage:
    """Return the blocks of the cache group that has the smallest share left; where there is one group, `usage` itself."""
    return max(usage.groups, key=used_share, default=usage)
