"""What is counted of copies, leases and recomputation, and how status shows it."""

from __future__ import annotations

import json
import threading

import msgspec
import numpy as np
import pytest

from common.cli import status
from common.cli.status_kv import kv_lines
from common.engine.timeline import MAX_PEERS, Event, Timeline, spans_of
from common.protocol.errors import StaleHandle, TransportUnavailable
from common.protocol.handles import WorkerRef
from common.protocol.kv_messages import KvTraffic, PathTraffic
from common.protocol.messages import KvUsage
from common.protocol.trace_context import traceparent
from common.protocol.transfer_messages import KvEndpoint
from common.runtime.lease_metrics import AGES, LeaseMetrics
from common.runtime.leases import LeaseTable
from common.runtime.metrics import Metrics
from common.transfer.base import RemoteBlocks
from common.transfer.measured import MeasuredTransport, TransferCounts
from common.transfer.memory import Faults, MemoryFabric, MemoryTransport
from common.worker.kv_counts import KvCounts
from tests.unit.presences import presence

READER = WorkerRef("decode", "decode-1", 1)


class Clock:
    """Each look takes half a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.5
        return self.now


def sample(metrics: Metrics, name: str, **labels: str) -> float:
    found = metrics.registry.get_sample_value(f"penstock_{name}", labels)
    return 0.0 if found is None else found


def transport(metrics: Metrics, faults: Faults | None = None) -> tuple[MeasuredTransport, RemoteBlocks, TransferCounts]:
    fabric = MemoryFabric()
    fabric.add("host", "prefill-1", "m", np.ones((4, 64), np.uint8), np.zeros(4, np.uint64))
    counts = TransferCounts(metrics, Clock())
    measured = MeasuredTransport(MemoryTransport(fabric, faults), counts)
    return measured, RemoteBlocks("host", "prefill-1", "m", [0, 2], [0, 0]), counts


# -- copies


def test_a_copy_is_counted_once_by_its_path() -> None:
    metrics = Metrics(role="decode")
    measured, source, counts = transport(metrics)
    into = np.zeros((4, 64), np.uint8)
    assert measured.read(source, into, [1, 3]) == 128 and into[1].all() and into[3].all()
    assert sample(metrics, "kv_transfer_bytes_total", path="memory", operation="read") == 128
    assert sample(metrics, "kv_transfer_seconds_count", path="memory", operation="read") == 1
    assert sample(metrics, "kv_transfer_seconds_sum", path="memory", operation="read") == 0.5
    assert counts.totals() == [PathTraffic("memory", "read", 128, 0.5, 1, 0)]


@pytest.mark.parametrize(
    ("faults", "error", "reason"),
    [
        (Faults(stale_every=1), StaleHandle, "stale_handle"),
        (Faults(fail_every=1), TransportUnavailable, "transport_unavailable"),
        (Faults(truncate_every=1), TransportUnavailable, "transport_unavailable"),
    ],
)
def test_a_copy_that_fails_is_counted_by_its_reason_alone(faults: Faults, error: type[Exception], reason: str) -> None:
    metrics = Metrics(role="decode")
    measured, source, counts = transport(metrics, faults)
    with pytest.raises(error):
        measured.read(source, np.zeros((4, 64), np.uint8), [1, 3])
    assert sample(metrics, "kv_transfer_failures_total", path="memory", operation="read", reason=reason) == 1
    assert sample(metrics, "kv_transfer_bytes_total", path="memory", operation="read") == 0
    assert counts.totals() == [PathTraffic("memory", "read", 0, 0.0, 0, 1)]


def test_copies_of_many_threads_are_all_counted() -> None:
    counts = TransferCounts(Metrics(role="decode"))

    def copy() -> None:
        for _ in range(500):
            with counts.measure("kvstore", "write") as one:
                one.num_bytes = 3

    threads = [threading.Thread(target=copy) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (total,) = counts.totals()
    assert (total.path, total.operation, total.bytes, total.copies) == ("kvstore", "write", 6000, 2000)


# -- leases


def test_leases_are_told_by_the_time_since_they_were_granted() -> None:
    table: LeaseTable[str] = LeaseTable(5.0)
    for key, now in (("old", 0.0), ("newer", 58.0), ("newest", 61.5)):
        table.grant(key, READER, key.upper(), now)
    table.renew(READER, ["old"], 61.0)
    assert table.ages(62.0) == [("OLD", 62.0), ("NEWER", 4.0), ("NEWEST", 0.5)]
    metrics = Metrics(role="prefill")
    metrics.registry.register(LeaseMetrics({"hand-off": lambda: [age_s for _, age_s in table.ages(62.0)]}))
    held = {age: sample(metrics, "kv_leases", kind="hand-off", age=age) for age, _ in AGES}
    assert held == {"0-1s": 1, "1-5s": 1, "5-15s": 0, "15-60s": 0, "60s+": 1}
    assert sample(metrics, "kv_lease_oldest_seconds", kind="hand-off") == 62.0
    table.clear()
    assert sample(metrics, "kv_lease_oldest_seconds", kind="hand-off") == 0.0


# -- what is computed again


def test_only_what_was_computed_before_counts_as_computed_again() -> None:
    line = Timeline(1.0, num_computed=16, num_outputs=3, known_tokens=40)
    line.stepped(1.0, 2.0, 32, 3)
    assert line.num_recomputed == 16
    line.stepped(2.0, 3.0, 41, 4)
    assert line.num_recomputed == 24, "the token behind those that were known is new"
    new = Timeline(1.0, num_computed=0, num_outputs=0)
    new.stepped(1.0, 2.0, 41, 1)
    assert new.num_recomputed == 0


def test_what_was_lost_is_counted_once() -> None:
    line = Timeline(1.0, num_computed=0, num_outputs=3, known_tokens=64)
    line.stepped(1.0, 2.0, 32, 3)
    line.preempted(3.0, 16, 16)
    assert line.num_recomputed == 48
    line.stepped(3.0, 4.0, 48, 3)
    assert line.num_recomputed == 64, "16 lost ones again, which were counted, and 16 that are known"
    assert [event.num_tokens for event in line.events] == [32, 0, 32]


def test_what_other_requests_computed_meanwhile_is_nobodys_recomputation() -> None:
    line = Timeline(1.0, num_computed=0, num_outputs=1, num_cached=0, known_tokens=64)
    line.stepped(1.0, 2.0, 48, 1, 32)
    assert (line.num_caught_up, line.num_recomputed) == (32, 16)
    assert line.events == [Event("shared prefix", 1.0, 1.0, num_tokens=32), Event("chunk", 1.0, 2.0, num_tokens=16)]
    line.stepped(2.0, 3.0, 64, 1, 48)  # a step of others: all of it was found
    assert (line.num_caught_up, line.num_recomputed) == (48, 16)
    assert line.events[2:] == [Event("shared prefix", 2.0, 2.0, num_tokens=16)]


def test_the_reason_is_that_of_the_hand_off_that_failed() -> None:
    line = Timeline(1.0, num_computed=0, num_outputs=1, known_tokens=32)
    assert line.reason == "moved"
    line.copied(Event("prefix", 1.0, 2.0, error="bus_timeout"), 0)
    assert line.reason == "moved"
    line.copied(Event("pull", 1.0, 2.0, error="stale_handle"), 0)
    assert line.reason == "stale_handle"


def test_spans_tell_bytes_received_against_tokens_computed_again() -> None:
    line = Timeline(1.0, num_computed=0, num_outputs=1, known_tokens=32)
    line.copied(Event("pull", 1.0, 1.5, num_tokens=32, num_bytes=4096, peer="prefill-1"), 32)
    line.stepped(1.5, 2.0, 33, 2)
    line.speculated(3.0, (("draft_worker_accepted_tokens", 7),))
    line.speculated(4.0, (("draft_worker_accepted_tokens", 9),))
    made = spans_of(line, parent=traceparent("ab" * 16, "cd" * 8), role="decode", worker="w", facts={}, now=5.0)
    spans = {span.name: span for span in made}
    facts = spans["decode worker"].facts
    assert (facts["penstock.received_tokens"], facts["penstock.received_bytes"]) == (32, 4096)
    assert facts["penstock.recomputed_tokens"] == 0 and spans["pull"].facts["penstock.bytes"] == 4096
    assert spans["speculation"].facts == {"penstock.draft_worker_accepted_tokens": 9}
    line.asked(WorkerRef("kvstore", f"kvstore-{number}", 1) for number in [*range(20), 0])
    assert len(line.peers) == MAX_PEERS and len(set(line.peers)) == MAX_PEERS


def test_a_heartbeat_tells_what_was_counted() -> None:
    metrics = Metrics(role="decode")
    counts = KvCounts(metrics, lambda: [1.0, 7.26])
    counts.looked_up(100)
    counts.found("own", 32)
    counts.found("kvstore_disk", 16)
    counts.found("kvstore_remote", 8)
    counts.received(64, 8192, 16)
    counts.not_received("stale_handle")
    counts.recomputed(48, "stale_handle")
    said = counts.traffic()
    assert said == KvTraffic(
        looked_up_tokens=100,
        own_tokens=32,
        disk_tokens=16,
        remote_tokens=8,
        received_tokens=64,
        received_bytes=8192,
        cached_tokens=16,
        recomputed_tokens=48,
        leases=2,
        oldest_lease_s=7.3,
    )
    assert sample(metrics, "prefix_hit_tokens_total", tier="kvstore_disk") == 16
    assert (
        sample(metrics, "kv_handoffs_total", outcome="ok") == sample(metrics, "kv_handoffs_total", outcome="stale_handle") == 1
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(said), type=KvTraffic) == said
    assert msgspec.msgpack.encode(KvTraffic()) == b"\x80", "a heartbeat that has nothing to tell stays short"


# -- penstock status


def test_status_tells_of_kv_within_eighty_columns() -> None:
    huge = 999 * 10**9
    paths = [PathTraffic("shm", "read", huge, 100.0, 10**6, 1234), PathTraffic("kvstore", "write", 2304, 0.0, 1, 0)]
    traffic = KvTraffic(
        paths=paths,
        looked_up_tokens=huge,
        own_tokens=huge // 2,
        memory_tokens=huge // 4,
        disk_tokens=huge // 8,
        remote_tokens=huge // 10,
        received_tokens=huge,
        received_bytes=huge,
        cached_tokens=huge,
        recomputed_tokens=3 * huge,
        preempted_tokens=huge,
        drafted_tokens=huge,
        leases=123_456,
        oldest_lease_s=98765.4,
    )
    group = KvUsage(total=1_000_000, free=0, owned=500_000, leased=250_000, cached=250_000)
    named = msgspec.structs.replace(presence("decode"), worker=WorkerRef("decode", "decode-" + "d" * 60, 1))
    endpoints = [KvEndpoint("nixl", "d", unreachable=["p1", "p2"])]
    worker = msgspec.structs.replace(named, traffic=traffic, kv=KvUsage(2, 2, groups=[group, group]), endpoints=endpoints)
    lines = kv_lines([worker])
    assert max(map(len, lines)) <= 80, lines
    assert lines[0] == "prefixes: 98% of 999G tokens found (own 50%, kvstore 25%, disk 12%, remote 10%)"
    assert lines[1] == "hand-off: 999G tokens received (930.4 GiB), 999G cached, 999G recomputed (33.3%)"
    assert lines[2] == "recomputed of preempted sequences: 999G tokens"
    assert lines[3] == "recomputed for the hidden states that a head reads: 999G tokens"
    assert any(line.endswith("…: shm read 930.4 GiB at 9.99 GB/s, 1,234 failed") for line in lines)
    assert any(line.endswith("kvstore written 2.2 KiB") for line in lines)
    assert any(line.endswith("123,456 leases held, the oldest for 98765.4 s") for line in lines)
    assert sum("cache group" in line for line in lines) == 2
    assert any(line.endswith("…: can't read KV of 2 prefill workers of other hosts") for line in lines)


def test_status_says_nothing_of_kv_where_there_was_none_and_all_of_it_as_json() -> None:
    assert kv_lines([presence("decode"), presence("gateway")]) == []
    told = msgspec.structs.replace(presence("decode"), traffic=KvTraffic(paths=[PathTraffic("cuda_ipc", "read", 5, 0.5, 1, 0)]))
    fields = json.loads(msgspec.json.encode(status.as_fields(told)))
    assert fields["traffic"]["paths"] == [
        {"path": "cuda_ipc", "operation": "read", "bytes": 5, "seconds": 0.5, "copies": 1, "failures": 0}
    ]
    assert fields["traffic"]["recomputed_tokens"] == 0
