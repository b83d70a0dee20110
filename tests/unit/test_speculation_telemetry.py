"""What a decode worker's /metrics say of speculation."""

from __future__ import annotations

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from common.protocol.draft_messages import DraftBranch, Drafting, DraftRow, DraftUpdate, Proposals
from common.protocol.handles import WorkerRef
from common.protocol.messages import Presence
from common.runtime.metrics import Metrics
from services.decode.draft_trial import FIRST, DraftTrial
from services.decode.lookup import Lookup
from services.decode.proposers import DRAFT_WORKER, Proposers
from services.decode.speculation import DraftBook
from services.decode.speculation_counters import SpeculationCounters
from services.decode.speculation_policy import SpeculationPolicy
from services.decode.telemetry import SpeculationTelemetry, verified
from tests.unit.speculating import flat_costs

DRAFT = WorkerRef(role="draft", id="draft-0", epoch=1)


def scraped(metrics: Metrics) -> dict[tuple[str, str, str], float]:
    """By name, drafter and position."""
    families = text_string_to_metric_families(metrics.render().decode())
    samples = [sample for family in families for sample in family.samples if "spec" in sample.name]
    assert all(sample.labels["model_name"] == "m" for sample in samples)
    return {
        (sample.name, sample.labels.get("drafter", ""), sample.labels.get("position", "")): sample.value
        for sample in samples
        if "le" not in sample.labels and not sample.name.endswith("_created")
    }


def test_what_was_verified_at_each_place() -> None:
    counters = SpeculationCounters()
    for proposed, accepted in ((3, 1), (1, 1), (3, 3), (2, 0)):
        counters.record(proposed, accepted)
    assert verified(counters) == [4, 3, 2] and counters.accepted_per_position == [3, 1, 1]
    assert verified(SpeculationCounters()) == []


def test_metrics_say_who_proposed_what_and_what_a_table_had() -> None:
    metrics, now = Metrics(role="decode"), 5.0
    policy = SpeculationPolicy(max_tokens=4, max_step_tokens=100, costs=flat_costs())
    drafts = DraftBook(policy, vocab_size=100)
    proposers = Proposers(drafts, [Lookup(max_tokens=1000, max_recent_tokens=0)])
    telemetry = SpeculationTelemetry(metrics, "m", proposers)
    found = scraped(metrics)
    assert found["penstock_speculation_drafts_total", DRAFT_WORKER, ""] == 0
    assert found["penstock_speculation_drafts_total", "lookup", ""] == 0

    proposers.by_source["lookup"].record(2, 1)
    tokens = [1, 2, 3]
    drafts.set_workers([Presence(worker=DRAFT, state="ready", credits=4)])
    drafts.open("s", tokens)
    ((_, update),) = drafts.messages(WorkerRef(role="decode", id="d", epoch=1))
    assert isinstance(update, DraftUpdate)
    answer = Proposals(
        draft=DRAFT,
        rows=[DraftRow(sequence="s", base=3, tokens=[4, 5])],
        tables={"s": [DraftBranch(accepted=0, tokens=[9, 8])]},
    )
    telemetry.asked(update, now)
    telemetry.answered(answer, now + 0.02)
    telemetry.answered(answer, now + 9)  # what it answers was answered
    drafts.on_proposals(answer)
    tokens += [9]
    drafts.record("s", 2, 0)
    found = scraped(metrics)
    assert found["penstock_speculation_draft_tokens_total", "lookup", ""] == 2
    assert found["penstock_speculation_accepted_tokens_total", "lookup", ""] == 1
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total", "lookup", "0"] == 1
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total", "lookup", "1"] == 0
    assert found["penstock_speculation_verified_tokens_per_pos_total", DRAFT_WORKER, "1"] == 1
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total", DRAFT_WORKER, "0"] == 0
    assert found["penstock_speculation_table_hits_total", "", ""] == 1
    assert found["penstock_speculation_table_misses_total", "", ""] == 0
    assert found["penstock_speculation_round_trip_seconds_count", "", ""] == 1
    assert abs(found["penstock_speculation_round_trip_seconds_sum", "", ""] - 0.02) < 1e-9
    assert found["penstock_speculation_received_proposals_total", "", ""] == 1
    assert found["penstock_speculation_late_proposals_total", "", ""] == 0


def test_metrics_count_steps_and_those_that_probe() -> None:
    metrics = Metrics(role="decode")
    policy = SpeculationPolicy(max_tokens=4, max_step_tokens=100)
    proposers = Proposers(DraftBook(policy, vocab_size=100, trial=DraftTrial()))
    SpeculationTelemetry(metrics, "m", proposers)
    policy.begin_step(1, [0.9])  # what such a step takes is not known yet
    proposers.num_sequence_steps = 5
    for _ in range(FIRST + 2):
        proposers.drafts.trial.step(1, 1, 0.01)
    found = scraped(metrics)
    assert found["penstock_speculation_probe_steps_total", "", ""] == 1
    assert found["penstock_speculation_sequence_steps_total", "", ""] == 5
    assert found["penstock_speculation_trial_steps_total", "", ""] == 2, "quiet ones, after the first phase"
    assert found["penstock_speculation_quiet_steps_total", "", ""] == 2
    assert found["penstock_speculation_max_tokens", "", ""] == 4


def test_only_the_answer_to_the_latest_update_is_timed() -> None:
    """A draft worker that has no guess sends nothing; one that is slow answers what is long decided."""
    metrics = Metrics(role="decode")
    drafts = DraftBook(SpeculationPolicy(max_tokens=4, max_step_tokens=100, costs=flat_costs()), vocab_size=100)
    telemetry = SpeculationTelemetry(metrics, "m", Proposers(drafts))

    def asked(length: int, now: float) -> None:
        row = DraftRow(sequence="s", base=length - 1, tokens=[7])
        telemetry.asked(DraftUpdate(decode=WorkerRef(role="decode", id="d", epoch=1), rows=[row]), now)

    def answered(length: int, now: float) -> None:
        telemetry.answered(Proposals(draft=DRAFT, rows=[DraftRow(sequence="s", base=length, tokens=[8])]), now)

    asked(4, 0.0)
    asked(5, 100.0)
    answered(4, 100.001)
    answered(5, 100.002)
    asked(6, 200.0)
    telemetry.forget("s")
    answered(6, 201.0)
    found = scraped(metrics)
    assert found["penstock_speculation_round_trip_seconds_count", "", ""] == 1
    assert abs(found["penstock_speculation_round_trip_seconds_sum", "", ""] - 0.002) < 1e-9


def with_one_sequence(metrics: Metrics) -> tuple[DraftBook, SpeculationTelemetry, list[int]]:
    """A draft worker that drafts for the sequence "s" of the tokens that are returned."""
    drafts = DraftBook(SpeculationPolicy(max_tokens=4, max_step_tokens=100, costs=flat_costs()), vocab_size=100)
    telemetry = SpeculationTelemetry(metrics, "m", Proposers(drafts))
    telemetry.draft_workers = [Presence(worker=DRAFT, state="ready", credits=4)]
    drafts.set_workers(telemetry.draft_workers)
    tokens = [7] * 3
    drafts.open("s", tokens)
    return drafts, telemetry, tokens


def test_lateness_runs_from_the_step_that_used_a_proposal_up() -> None:
    metrics = Metrics(role="decode")
    drafts, telemetry, tokens = with_one_sequence(metrics)
    for now in (1.0, 2.0, 3.0):
        tokens += [7]
        drafts.messages(WorkerRef(role="decode", id="d", epoch=1))
        telemetry.decided([("s", len(tokens))], now)

    def lateness_of(base: int, count: int, now: float) -> float:
        before = scraped(metrics)["penstock_speculation_lateness_seconds_total", "", ""]
        late = drafts.on_proposals(Proposals(draft=DRAFT, rows=[DraftRow(sequence="s", base=base, tokens=[8] * count)]))
        telemetry.came_late(late, now)
        return scraped(metrics)["penstock_speculation_lateness_seconds_total", "", ""] - before

    assert lateness_of(4, 1, 3.5) == 1.5, "its one token was decided at 2.0"
    assert lateness_of(4, 3, 3.5) == 0.0, "one of its tokens is still to come"
    assert lateness_of(4, 0, 3.5) == 0.0, "it proposes nothing"
    telemetry.forget("s")
    assert lateness_of(4, 1, 9.0) == 0.0


def test_a_proposal_is_late_although_its_draft_worker_was_not_told_of_the_tokens() -> None:
    """Of many sequences, one for which nothing is proposed is told of its tokens several at a time; see `QUIET_TOKENS`."""
    metrics, decode = Metrics(role="decode"), WorkerRef(role="decode", id="d", epoch=1)
    drafts, telemetry, tokens = with_one_sequence(metrics)
    drafts.messages(decode)  # of the steps below, it is told nothing
    for now in (1.0, 2.0, 3.0):
        tokens += [7]
        telemetry.decided([("s", len(tokens)), ("of nobody", 5)], now)
    message = Proposals(
        draft=DRAFT, rows=[DraftRow(sequence="s", base=3, tokens=[8, 8]), DraftRow(sequence="other", base=3, tokens=[8])]
    )
    telemetry.answered(message, 3.5)
    telemetry.came_late(drafts.on_proposals(message), 3.5)
    found = scraped(metrics)
    assert found["penstock_speculation_late_proposals_total", "", ""] == 1
    assert found["penstock_speculation_lateness_seconds_total", "", ""] == 1.5, "its second token was decided at 2.0"


def test_metrics_name_what_draft_workers_draft_with() -> None:
    metrics = Metrics(role="decode")
    drafts = DraftBook(SpeculationPolicy(max_tokens=4, max_step_tokens=100, costs=flat_costs()), vocab_size=100)
    telemetry = SpeculationTelemetry(metrics, "m", Proposers(drafts))
    telemetry.draft_workers = [
        Presence(worker=WorkerRef("draft", f"d{rank}", 1), state="ready", drafting=Drafting(name))
        for rank, name in enumerate(("small", "small", ""))
    ]
    text = generate_latest(metrics.registry).decode()
    assert 'penstock_speculation_draft_workers{draft_model="small",model_name="m"} 2.0' in text
    assert 'penstock_speculation_draft_workers{draft_model="n-grams",model_name="m"} 1.0' in text
