"""What speculation gives, by who proposed: for a decode worker's `/metrics`. Read when it is scraped."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from common.protocol.draft_messages import DraftUpdate, Proposals
from common.protocol.messages import Presence
from common.runtime.metrics import MODEL_LABEL, Metrics
from services.decode.proposers import Proposers
from services.decode.speculation_counters import SpeculationCounters

DRAFTER_LABEL = "drafter"
NGRAMS = "n-grams"
_ROUND_TRIP_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
_BY_DRAFTER: tuple[tuple[str, str, Callable[[SpeculationCounters], int]], ...] = (
    ("penstock_speculation_drafts", "Proposals verified", lambda counters: counters.num_drafts),
    ("penstock_speculation_draft_tokens", "Proposed tokens verified", lambda counters: counters.num_draft_tokens),
    (
        "penstock_speculation_accepted_tokens",
        "Proposed tokens accepted: each saved its sequence a step",
        lambda counters: counters.num_accepted_tokens,
    ),
)
_OF_DRAFT_WORKERS: tuple[tuple[str, str, Callable[[SpeculationCounters], int]], ...] = (
    (
        "penstock_speculation_received_proposals",
        "Proposals that draft workers sent and that had tokens",
        lambda counters: counters.num_received,
    ),
    (
        "penstock_speculation_late_proposals",
        "Proposals of which every token was already decided when they arrived",
        lambda counters: counters.num_late,
    ),
    (
        "penstock_speculation_table_hits",
        "Failed proposals whose outcome table had what came instead",
        lambda counters: counters.num_table_hits,
    ),
    (
        "penstock_speculation_table_misses",
        "Failed proposals whose outcome table had something else",
        lambda counters: counters.num_table_misses,
    ),
)


_OF_STEPS: tuple[tuple[str, str, Callable[[Proposers], int]], ...] = (
    (
        "penstock_speculation_sequence_steps",
        "Steps that gave tokens to a sequence, counted once for each sequence",
        lambda proposers: proposers.num_sequence_steps,
    ),
    (
        "penstock_speculation_probe_steps",
        "Steps that verified nothing, to learn how long such a step takes",
        lambda proposers: proposers.policy.num_probes,
    ),
    (
        "penstock_speculation_trial_steps",
        "Steps in which draft workers were asked, or not, to see whether the other way had become faster",
        lambda proposers: proposers.drafts.trial.num_tried,
    ),
    (
        "penstock_speculation_quiet_steps",
        "Steps in which draft workers were told nothing: it was faster, or was tried",
        lambda proposers: proposers.drafts.trial.num_quiet,
    ),
)
_MAX_STEPS = 128
"""Steps whose times are kept: a proposal that is later counts from the first of them."""


class _Asked(NamedTuple):
    """length: tokens of the sequence that its draft worker was told. at: when."""

    length: int
    at: float


class _Step(NamedTuple):
    """at: when its tokens were decided. lengths: of its sequences, with these tokens."""

    at: float
    lengths: dict[str, int]


class SpeculationTelemetry(Collector):
    """model: its name for clients. `draft_workers`: those that may draft now."""

    def __init__(self, metrics: Metrics, model: str, proposers: Proposers) -> None:
        self._model = model
        self._proposers = proposers
        self.draft_workers: Sequence[Presence] = ()
        self._asked: dict[str, _Asked] = {}
        self._steps: deque[_Step] = deque(maxlen=_MAX_STEPS)
        self._round_trip = metrics.histogram(
            "speculation_round_trip_seconds",
            "Time from what a step told a draft worker to the proposal that answers it",
            _ROUND_TRIP_S,
            [MODEL_LABEL],
        ).labels(model)
        self._lateness = metrics.counter(
            "speculation_lateness_seconds_total",
            "Time from the step that decided a late proposal's last token to its arrival",
            [MODEL_LABEL],
        ).labels(model)
        metrics.registry.register(self)

    def decided(self, lengths: Iterable[tuple[str, int]], now: float) -> None:
        """A step decided tokens, whether or not a draft worker is told of them. lengths: of its sequences, with them."""
        if self.draft_workers:
            self._steps.append(_Step(now, dict(lengths)))

    def asked(self, update: DraftUpdate, now: float) -> None:
        """A draft worker was told what a step decided. Only what answers the latest update of a sequence is timed."""
        for row in update.rows:
            self._asked[row.sequence] = _Asked(row.base + len(row.tokens), now)

    def answered(self, message: Proposals, now: float) -> None:
        """Observe the first answer of a message; a draft worker without a guess sends none."""
        times: list[float] = []
        for row in message.rows:
            asked = self._asked.get(row.sequence)
            if asked is not None and asked.length == row.base:
                times.append(self._asked.pop(row.sequence).at)
        if times:
            self._round_trip.observe(now - max(times))

    def came_late(self, late: Iterable[tuple[str, int]], now: float) -> None:
        """Add up how late proposals were. late: see `DraftBook.on_proposals`."""
        for sequence, end in late:
            self._lateness.inc(now - next((step.at for step in self._steps if step.lengths.get(sequence, -1) >= end), now))

    def forget(self, sequence: str) -> None:
        """That sequence is over, or nobody drafts for it any more."""
        self._asked.pop(sequence, None)
        for step in self._steps:
            step.lengths.pop(sequence, None)

    def forget_all(self) -> None:
        self._asked.clear()
        self._steps.clear()

    def collect(self) -> Iterator[Metric]:
        proposers = self._proposers
        for name, description, read in _BY_DRAFTER:
            family = CounterMetricFamily(name, description, labels=[MODEL_LABEL, DRAFTER_LABEL])
            for drafter, counters in proposers.by_source.items():
                family.add_metric([self._model, drafter], read(counters))
            yield family
        for name, description, read in _OF_DRAFT_WORKERS:
            family = CounterMetricFamily(name, description, labels=[MODEL_LABEL])
            family.add_metric([self._model], read(proposers.drafts.counters))
            yield family
        yield from self._of_head()
        yield self._draft_models()
        for name, description, count in _OF_STEPS:
            family = CounterMetricFamily(name, description, labels=[MODEL_LABEL])
            family.add_metric([self._model], count(proposers))
            yield family
        limit = GaugeMetricFamily(
            "penstock_speculation_max_tokens",
            "Proposed tokens of one sequence that a step verifies at most; 0: speculation is off",
            labels=[MODEL_LABEL],
        )
        limit.add_metric([self._model], proposers.policy.max_tokens)
        yield limit
        yield self._by_position(
            "penstock_speculation_verified_tokens_per_pos", "Tokens verified at a place of a proposal", verified
        )
        yield self._by_position(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Tokens accepted at a place of a proposal, 0 first",
            lambda counters: counters.accepted_per_position,
        )

    def _of_head(self) -> Iterator[Metric]:
        """What the head took, if there is one; it is part of the steps' time."""
        head = self._proposers.any_head
        if head is None:
            return
        for name, description, value in (
            ("penstock_speculation_head_seconds", "Time in which the head drafted, within steps", head.seconds),
            ("penstock_speculation_head_tokens", "Tokens that the head drafted, verified or not", head.num_drafted),
            (
                "penstock_speculation_head_probes",
                "Drafts of the head made to see whether drafting pays by now",
                head.num_probes,
            ),
            (
                "penstock_speculation_head_invalid_logits",
                "Drafts of the head that ended early, since its logits were not finite",
                head.num_invalid,
            ),
        ):
            family = CounterMetricFamily(name, description, labels=[MODEL_LABEL])
            family.add_metric([self._model], value)
            yield family

    def _draft_models(self) -> GaugeMetricFamily:
        family = GaugeMetricFamily(
            "penstock_speculation_draft_workers",
            "Draft workers that may draft for this worker, by what they draft with",
            labels=[MODEL_LABEL, "draft_model"],
        )
        for draft_model, count in Counter(one.drafting.model or NGRAMS for one in self.draft_workers).items():
            family.add_metric([self._model, draft_model], count)
        return family

    def _by_position(
        self, name: str, description: str, read: Callable[[SpeculationCounters], list[int]]
    ) -> CounterMetricFamily:
        family = CounterMetricFamily(name, description, labels=[MODEL_LABEL, DRAFTER_LABEL, "position"])
        for drafter, counters in self._proposers.by_source.items():
            for position, count in enumerate(read(counters)):
                family.add_metric([self._model, drafter, str(position)], count)
        return family


def verified(counters: SpeculationCounters) -> list[int]:
    """Return how many tokens were verified at each place: of the proposals that were at least as long."""
    longer = list(accumulate(reversed(counters.proposals_of_length)))
    return longer[::-1]
