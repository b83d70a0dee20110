"""`penstock bench --speculation`: what decode workers counted in between."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from common.cli.speculation_report import (
    Counts,
    add,
    addresses,
    between,
    check_plot,
    draw,
    speculation_summary,
    speculation_table,
)
from common.protocol.errors import ConfigError
from common.protocol.handles import WorkerRef
from common.protocol.messages import Presence
from common.runtime.metrics import Metrics
from services.decode.lookup import Lookup
from services.decode.proposers import Proposers
from services.decode.speculation import DraftBook
from services.decode.speculation_policy import SpeculationPolicy
from services.decode.telemetry import SpeculationTelemetry
from tests.unit.speculating import flat_costs


def worker(model: str = "m") -> tuple[Metrics, Proposers]:
    metrics = Metrics(role="decode")
    policy = SpeculationPolicy(max_tokens=4, max_step_tokens=100, costs=flat_costs())
    proposers = Proposers(DraftBook(policy, vocab_size=100), [Lookup(max_tokens=100, max_recent_tokens=0)])
    SpeculationTelemetry(metrics, model, proposers)
    return metrics, proposers


def counts(*workers: tuple[Metrics, Proposers]) -> Counts:
    found: Counts = {}
    for metrics, _ in workers:
        add(found, metrics.render().decode())
    return found


def test_what_two_workers_counted_in_between_by_drafter_and_place() -> None:
    first, second, other = worker(), worker(), worker("another model's")
    first[1].by_source["lookup"].record(3, 3)  # before the run
    before = counts(first, second, other)
    first[1].by_source["lookup"].record(2, 1)
    second[1].by_source["lookup"].record(2, 2)
    second[1].by_source["draft worker"].record(1, 0)
    other[1].by_source["lookup"].record(4, 0)
    found = between(before, counts(first, second, other), "m")
    lookup = found["lookup"]
    assert (lookup.drafts, lookup.verified, lookup.accepted, lookup.mean_accepted) == (2, 4, 3, 1.5)
    assert lookup.acceptance == [1.0, 0.5]
    assert found["draft worker"].acceptance == [0.0]
    said = speculation_summary(found)
    assert said["lookup"]["acceptance_by_position"] == [1.0, 0.5] and said["draft worker"]["acceptance"] == 0
    console = Console(width=100, record=True)
    console.print(speculation_table(found, generated_tokens=30))
    shown = console.export_text()
    assert "100% 50%" in shown and "3 of 30 tokens took no step of their own (10%)" in shown


def test_a_run_without_proposals_divides_by_nothing() -> None:
    found = between({}, counts(worker()), "m")
    assert speculation_summary(found)["lookup"]["acceptance"] is None
    Console(width=100, record=True).print(speculation_table(found, generated_tokens=0))


def test_where_metrics_are_and_who_has_none() -> None:
    def presence(role: str, host: str, port: int) -> Presence:
        return Presence(worker=WorkerRef(role, f"{role}-0", 1), state="ready", http_host=host, http_port=port)  # type: ignore[arg-type]

    workers = [presence("decode", "10.0.0.1", 9000), presence("decode", "fe80::1", 9001), presence("prefill", "10.0.0.2", 9000)]
    assert addresses(workers) == ["http://10.0.0.1:9000/metrics", "http://[fe80::1]:9001/metrics"]
    with pytest.raises(ConfigError, match="no decode worker"):
        addresses([presence("decode", "", 0), presence("gateway", "10.0.0.1", 8000)])


def test_acceptance_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    check_plot()
    one = worker()
    one[1].by_source["lookup"].record(2, 1)
    draw(between({}, counts(one), "m"), tmp_path / "acceptance.png")
    assert (tmp_path / "acceptance.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="can't be written"):
        draw({}, tmp_path / "missing" / "acceptance.png")
