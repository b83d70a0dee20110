"""What speculation gives, by who proposed: for a decode worker's `/metrics`. Read when it is scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from common.protocol.draft_messages import DraftUpdate, Proposals
from common.runtime.metrics import MODEL_LABEL, Metrics
from services.decode.proposers import Proposers
from services.decode.speculation import SpeculationCounters

DRAFTER_LABEL = "drafter"
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


class _Asked(NamedTuple):
    """length: tokens of the sequence that were said. at: when."""

    length: int
    at: float


class SpeculationTelemetry(Collector):
    """model: its name for clients."""

    def __init__(self, metrics: Metrics, model: str, proposers: Proposers) -> None:
        self._model = model
        self._proposers = proposers
        self._asked: dict[str, _Asked] = {}
        self._round_trip = metrics.histogram(
            "speculation_round_trip_seconds",
            "From what a step told a draft worker to the proposal that answers it",
            _ROUND_TRIP_S,
            [MODEL_LABEL],
        ).labels(model)
        metrics.registry.register(self)

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

    def forget(self, sequence: str) -> None:
        """That sequence is over, or nobody drafts for it any more."""
        self._asked.pop(sequence, None)

    def forget_all(self) -> None:
        self._asked.clear()

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
        quiet = CounterMetricFamily(
            "penstock_speculation_quiet_steps",
            "Steps in which draft workers were told nothing: it was faster, or was tried",
            labels=[MODEL_LABEL],
        )
        quiet.add_metric([self._model], proposers.drafts.trial.num_quiet)
        yield quiet
        yield self._by_position(
            "penstock_speculation_verified_tokens_per_pos", "Tokens verified at a place of a proposal", verified
        )
        yield self._by_position(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Tokens accepted at a place of a proposal, 0 first",
            lambda counters: counters.accepted_per_position,
        )

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
