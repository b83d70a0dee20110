"""`penstock bench --speculation`: what workers counted in between, as a table, JSON and a plot."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from rich.console import Console

from common.cli.net import free_port
from common.cli.speculation_counts import (
    STARTED,
    Reading,
    Source,
    found_by_gateway,
    parse,
    read,
    read_before,
    require_speculation,
    sources,
)
from common.cli.speculation_json import speculation_summary
from common.cli.speculation_plot import check_plot, draw
from common.cli.speculation_report import Speculation, between, speculation_table
from common.protocol.draft_messages import Drafting, DraftRow, DraftUpdate, Proposals
from common.protocol.errors import BusError, ConfigError
from common.protocol.handles import WorkerRef
from common.protocol.messages import Presence
from common.runtime.metrics import MODEL_LABEL, Metrics
from services.decode.lookup import Lookup
from services.decode.proposers import DRAFT_WORKER, Proposers
from services.decode.speculation import DraftBook
from services.decode.speculation_policy import SpeculationPolicy
from services.decode.telemetry import SpeculationTelemetry
from tests.unit.speculating import flat_costs


class Worker:
    """A decode worker's counters. started: when its process was."""

    def __init__(self, name: str, model: str = "m", *, max_tokens: int = 4, lookup: bool = True, started: float = 1.0) -> None:
        self.name, self.model = name, model
        self.metrics = Metrics(role="decode")
        self.metrics.registry.register(StartTime(started))
        policy = SpeculationPolicy(max_tokens=max_tokens, max_step_tokens=100, costs=flat_costs())
        drafters = [Lookup(max_tokens=100, max_recent_tokens=0)] if lookup else []
        self.proposers = Proposers(DraftBook(policy, vocab_size=100), drafters)
        self.telemetry = SpeculationTelemetry(self.metrics, model, self.proposers)
        self.generated = self.metrics.counter("engine_generation_tokens_total", "", [MODEL_LABEL]).labels(model)
        self.steps = self.metrics.histogram("engine_step_seconds", "", (1.0,), [MODEL_LABEL]).labels(model)

    def ran(self, source: str, proposed: int, accepted: int) -> None:
        """A step of a sequence ran, and verified a proposal."""
        self.proposers.by_source[source].record(proposed, accepted)
        self.proposers.num_sequence_steps += 1
        self.generated.inc(accepted + 1)
        self.steps.observe(0.01)

    def reading(self, at: float = 0.0) -> Reading:
        source = Source(worker=self.name, role="decode", model=self.model, url="http://w/metrics")
        return Reading(source, at, parse(self.metrics.render().decode()))


class StartTime(Collector):
    """As `ProcessCollector` says it, but of a process that a test makes up."""

    def __init__(self, at: float) -> None:
        self.at = at

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(STARTED, "When the process was started", value=self.at)


def draft_worker(at: float, busy_s: float, *, tokens: int = 0, in_vain: int = 0) -> Reading:
    metrics = Metrics(role="draft")
    metrics.counter("draft_busy_seconds_total", "").inc(busy_s)
    metrics.counter("draft_model_tokens_total", "").inc(tokens)
    metrics.counter("draft_model_tokens_in_vain_total", "").inc(in_vain)
    source = Source(worker="draft-0", role="draft", model="m", url="http://d/metrics")
    return Reading(source, at, parse(metrics.render().decode()))


def shown(found: Speculation) -> str:
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(speculation_table(found))
    return console.export_text()


def test_each_worker_s_drafters_by_position_and_nothing_of_what_was_before() -> None:
    first, second, other = Worker("decode-0"), Worker("decode-1"), Worker("decode-2", "another model's")
    first.ran("lookup", 3, 3)  # before the load
    before = [worker.reading() for worker in (first, second, other)]
    first.ran("lookup", 2, 1)
    first.ran("lookup", 2, 2)
    second.ran(DRAFT_WORKER, 1, 0)
    found = between(before, [worker.reading() for worker in (first, second, other)], "m")
    assert [worker.worker for worker in found.decode] == ["decode-0", "decode-1"], "the other one was idle"
    lookup = found.decode[0].drafters["lookup"]
    assert (lookup.drafts, lookup.verified, lookup.accepted, lookup.mean_accepted) == (2, 4, 3, 1.5)
    assert lookup.acceptance == [1.0, 0.5], "a third position was verified only before"
    one, two = speculation_summary(found)["decode_workers"]
    assert (one["generated_tokens"], one["tokens_per_step"], one["steps_saved"], one["steps_saved_share"]) == (5, 2.5, 3, 0.6)
    assert one["drafters"]["lookup"]["acceptance_by_position"] == [1.0, 0.5]
    assert two["drafters"][DRAFT_WORKER]["acceptance"] == 0 and two["tokens_per_step"] == 1
    text = shown(found)
    assert "100% 50%" in text and "2.50 tokens a step of a sequence; 3 steps saved (60% of the tokens)" in text
    assert "decode-1, m" in text


def test_another_model_s_worker_is_shown_if_it_worked_meanwhile() -> None:
    mine, other = Worker("decode-0"), Worker("decode-1", "a")
    before = [mine.reading(), other.reading()]
    other.ran("lookup", 1, 1)
    assert [one.model for one in between(before, [mine.reading(), other.reading()], "m").decode] == ["a", "m"]


def test_a_worker_that_was_started_anew_counts_from_zero_and_one_that_is_gone_is_named() -> None:
    old, gone, new = Worker("decode-0"), Worker("decode-1"), Worker("decode-0", started=2.0)
    for _ in range(3):
        old.ran("lookup", 2, 2)
    for _ in range(5):
        new.ran("lookup", 2, 2)
    found = between([old.reading(), gone.reading()], [new.reading()], "m")
    assert found.decode[0].drafters["lookup"].drafts == 5
    assert found.unread == ["decode-1"]


def test_draft_workers_lateness_tables_and_utilisation() -> None:
    worker = Worker("decode-0")
    before = [worker.reading(), draft_worker(10.0, 3.0, tokens=50)]
    drafts, tokens = worker.proposers.drafts, [1, 2, 3]
    draft = WorkerRef(role="draft", id="draft-0", epoch=1)
    worker.telemetry.draft_workers = [Presence(worker=draft, state="ready", credits=4)]
    drafts.set_workers(worker.telemetry.draft_workers)
    drafts.open("s", tokens)
    for now in (1.0, 2.0):
        worker.telemetry.decided([("s", len(tokens))], now)
        for _, update in drafts.messages(WorkerRef(role="decode", id="d", epoch=1)):
            assert isinstance(update, DraftUpdate)
            worker.telemetry.asked(update, now)
        tokens += [4, 5]
    late = Proposals(draft=draft, rows=[DraftRow(sequence="s", base=3, tokens=[4, 5])])
    good = Proposals(draft=draft, rows=[DraftRow(sequence="s", base=5, tokens=[4, 5, 6])])
    for message in (late, good):
        worker.telemetry.answered(message, 2.25)
        worker.telemetry.came_late(drafts.on_proposals(message), 2.25)
    drafts.counters.num_table_hits, drafts.counters.num_table_misses = 3, 1
    found = between(before, [worker.reading(), draft_worker(14.0, 5.0, tokens=150, in_vain=25)], "m")
    said = speculation_summary(found)
    proposals = said["decode_workers"][0]["draft_worker_proposals"]
    assert (proposals["received"], proposals["late"], proposals["late_share"]) == (2, 1, 0.5)
    assert proposals["mean_lateness_ms"] == 250 and proposals["mean_round_trip_ms"] == 250
    assert said["decode_workers"][0]["outcome_tables"] == {"hits": 3, "misses": 1, "hit_share": 0.75}
    (drafter,) = said["draft_workers"]
    assert (drafter["busy_share"], drafter["busy_s"]) == (0.5, 2)
    assert (drafter["drafted_tokens"], drafter["drafted_in_vain"]) == (100, 25)
    text = shown(found)
    assert "2 proposals received, 1 too late (50%, by 250.0 ms on average); 250.0 ms from a step to its answer" in text
    assert "outcome tables: 3 hits, 1 misses (75% hits)" in text
    assert "draft-0" in text and "50%" in text and "25%" in text


def test_what_probing_took() -> None:
    worker = Worker("decode-0")
    before = [worker.reading()]
    for _ in range(20):
        worker.ran("lookup", 1, 1)
    worker.proposers.policy.num_probes, worker.proposers.drafts.trial.num_tried = 3, 2
    worker.proposers.drafts.trial.num_quiet = 8
    found = between(before, [worker.reading()], "m")
    assert speculation_summary(found)["decode_workers"][0]["probing"] == {
        "engine_steps": 20,
        "steps_without_proposals": 3,
        "trial_steps": 2,
        "quiet_steps": 8,
        "head_probes": 0,
    }
    text = shown(found)
    assert "probing: 3 steps without proposals, 2 in trials of draft workers, 25% of 20 steps" in text
    assert "draft workers were told nothing in 8 of 20 steps" in text


def test_a_load_without_proposals_divides_by_nothing() -> None:
    worker = Worker("decode-0")
    found = between([worker.reading()], [worker.reading(), draft_worker(0.0, 0.0)], "m")
    said = speculation_summary(found)
    assert said["decode_workers"][0]["drafters"]["lookup"]["acceptance"] is None
    assert said["decode_workers"][0]["tokens_per_step"] is None and said["draft_workers"][0]["busy_share"] == 0
    assert "lookup" in shown(found)
    assert speculation_summary(between([], [], "m"))["decode_workers"] == [] and shown(between([], [], "m")).strip() == ""


def test_where_metrics_are() -> None:
    def presence(role: str, host: str, port: int) -> Presence:
        return Presence(worker=WorkerRef(role, f"{role}-0", 1), state="ready", http_host=host, http_port=port)  # type: ignore[arg-type]

    workers = [presence("draft", "fe80::1", 9001), presence("decode", "10.0.0.1", 9000), presence("prefill", "10.0.0.2", 9000)]
    assert [one.url for one in sources(workers)] == ["http://10.0.0.1:9000/metrics", "http://[fe80::1]:9001/metrics"]
    assert sources([presence("decode", "", 0), presence("gateway", "10.0.0.1", 8000)]) == []


async def test_a_worker_that_cannot_be_read_is_an_error_before_the_load_and_a_line_after_it() -> None:
    nobody = Source(worker="decode-0", role="decode", model="m", url=f"http://127.0.0.1:{free_port()}/metrics")

    readings, failures = await read([nobody])
    assert readings == [] and "can't be read: ConnectError" in failures["decode-0"]
    with pytest.raises(BusError, match="the metrics of decode-0 at"):
        await read_before([nobody], "m")
    draft = msgspec.structs.replace(nobody, worker="draft-0", role="draft")
    with pytest.raises(ConfigError, match="no decode worker here serves metrics"):
        await read_before([draft], "m")  # it is not what ends the run


async def test_a_gateway_says_where_metrics_are_and_wants_its_key() -> None:
    labels = {"worker": "decode-0", "__meta_penstock_model": "m"}
    groups = [{"targets": ["h:1"], "labels": {"role": role, **labels}} for role in ("decode", "gateway", "draft")]
    answers = {"/sd": httpx.Response(200, json=groups)}
    async with httpx.AsyncClient(
        base_url="http://g", transport=httpx.MockTransport(lambda request: answers[request.url.path])
    ) as http:
        assert [(one.role, one.model, one.url) for one in await found_by_gateway(http)] == [
            ("decode", "m", "http://h:1/metrics"),
            ("draft", "m", "http://h:1/metrics"),
        ]
        for answer, said in (
            (httpx.Response(401), "wants an API key"),
            (httpx.Response(403), "its tenant needs `dashboard = true`"),
            (httpx.Response(404), "is it Penstock's gateway"),
            (httpx.Response(200, json={"a": 1}), "is it Penstock's gateway"),
        ):
            answers["/sd"] = answer
            with pytest.raises(ConfigError, match=said):
                await found_by_gateway(http)


def test_who_does_not_speculate_is_told_so_before_the_load() -> None:
    looks_up, plain, off = Worker("decode-0"), Worker("decode-1", lookup=False), Worker("decode-2", max_tokens=0)
    other = Worker("decode-3", "a", lookup=False)
    require_speculation([looks_up.reading(), plain.reading()], "m")
    with pytest.raises(ConfigError, match="no decode worker here serves metrics"):
        require_speculation([draft_worker(0.0, 0.0)], "m")
    for readings, model in (([plain, off], "m"), ([looks_up, other], "a")):
        with pytest.raises(ConfigError, match="no decode worker speculates: start Penstock with"):
            require_speculation([worker.reading() for worker in readings], model)
    require_speculation([looks_up.reading(), other.reading()], "an alias")
    draft = Presence(worker=WorkerRef("draft", "draft-0", 1), state="ready", drafting=Drafting())
    plain.telemetry.draft_workers = [draft]
    require_speculation([plain.reading()], "m")


def test_acceptance_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "acceptance.png"
    check_plot(path)
    assert not path.exists(), "looking whether it can be written leaves nothing"
    one, two = Worker("decode-0"), Worker("decode-1", lookup=False)
    before = [one.reading(), two.reading()]
    one.ran("lookup", 2, 1)
    draw(between(before, [one.reading(), two.reading()], "m").decode, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    draw([], path)


def test_a_plot_that_cannot_be_drawn_is_found_out_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    for name, said in (
        ("a.xyz", r"ends in '\.xyz': take \.png"),
        ("a", "has no file type"),
        ("no/a.png", "can't be written: No"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_plot(tmp_path / name)
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ConfigError, match="can't be written: Is a directory"):
        check_plot(tmp_path / "folder.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"a plot needs matplotlib: pip install 'penstock\[bench\]'"):
        check_plot(tmp_path / "a.png")
