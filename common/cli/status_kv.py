"""What `penstock status` says of KV below its table: prefixes by tier, hand-offs, transfers by path, leases, cache
groups, paths between hosts that fail."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from common.cli.sizes import short, size_text
from common.protocol.kv_messages import KvTraffic, PathTraffic
from common.protocol.messages import Presence

MAX_COLUMNS = 80
_STATES = ("owned", "leased", "cached")
_DONE = {"read": "read", "write": "written"}


def kv_lines(workers: Sequence[Presence]) -> list[str]:
    """Return lines of at most `MAX_COLUMNS` columns: first of all workers together, then of each that has something to tell."""
    lines = [line for line in (_prefixes(workers), _hand_offs(workers), *_others_again(workers)) if line]
    for worker in workers:
        told = [*_groups(worker), *map(_path, worker.traffic.paths), *_leases(worker.traffic), *_unreachable(worker)]
        lines += [_of(worker.worker.id, one) for one in told]
    return lines


def traffic_fields(traffic: KvTraffic) -> dict[str, object]:
    """Return a heartbeat's traffic with named fields, for --json."""
    fields = {name: getattr(traffic, name) for name in traffic.__struct_fields__}
    fields["paths"] = [{name: getattr(path, name) for name in path.__struct_fields__} for path in traffic.paths]
    return fields


def _of(worker: str, told: str) -> str:
    room = max(8, MAX_COLUMNS - len(told) - 2)
    return f"{worker if len(worker) <= room else worker[: room - 1] + '…'}: {told}"


def _total(workers: Iterable[Presence], field: str) -> int:
    return sum(getattr(worker.traffic, field) for worker in workers)


def _prefixes(workers: Sequence[Presence]) -> str:
    """Of all prompts that workers computed since their starts, which share was found where."""
    asked = _total(workers, "looked_up_tokens")
    if not asked:
        return ""
    tiers = {"own": "own_tokens", "kvstore": "memory_tokens", "disk": "disk_tokens", "remote": "remote_tokens"}
    found = {name: _total(workers, field) for name, field in tiers.items()}
    parts = ", ".join(f"{name} {count / asked:.0%}" for name, count in found.items() if count)
    return f"prefixes: {sum(found.values()) / asked:.0%} of {short(asked)} tokens found" + (f" ({parts})" if parts else "")


def _hand_offs(workers: Sequence[Presence]) -> str:
    """What came over hand-offs, and what was computed again instead."""
    received, cached, drafted = (_total(workers, name) for name in ("received_tokens", "cached_tokens", "drafted_tokens"))
    again = _total(workers, "recomputed_tokens") - _total(workers, "preempted_tokens") - drafted
    total = received + cached + again
    if not total:
        return ""
    size, kept = size_text(_total(workers, "received_bytes")), f", {short(cached)} cached" if cached else ""
    return f"hand-off: {short(received)} tokens received ({size}){kept}, {short(again)} recomputed ({again / total:.1%})"


def _others_again(workers: Sequence[Presence]) -> list[str]:
    """What was computed again for other reasons."""
    reasons = {"preempted_tokens": "of preempted sequences", "drafted_tokens": "for the hidden states that a head reads"}
    counts = {said: _total(workers, field) for field, said in reasons.items()}
    return [f"recomputed {said}: {short(count)} tokens" for said, count in counts.items() if count]


def _path(path: PathTraffic) -> str:
    speed = f" at {path.bytes / path.seconds / 1e9:.3g} GB/s" if path.seconds else ""
    failed = f", {path.failures:,} failed" if path.failures else ""
    return f"{path.path} {_DONE.get(path.operation, path.operation)} {size_text(path.bytes)}{speed}{failed}"


def _unreachable(worker: Presence) -> list[str]:
    count = sum(len(endpoint.unreachable) for endpoint in worker.endpoints)
    return [f"can't read KV of {count} prefill worker{'s' * (count > 1)} of other hosts"] if count else []


def _leases(traffic: KvTraffic) -> list[str]:
    if not traffic.leases:
        return []
    count = f"{traffic.leases:,} lease{'' if traffic.leases == 1 else 's'}"
    return [f"{count} held, the oldest for {traffic.oldest_lease_s:.1f} s"]


def _groups(worker: Presence) -> list[str]:
    """The blocks of each cache group; of one group the table says the same."""
    lines: list[str] = []
    for number, group in enumerate(worker.kv.groups):
        states = ", ".join(f"{short(getattr(group, state))} {state}" for state in _STATES)
        lines.append(f"cache group {number}: {states} of {short(group.total)} blocks")
    return lines
