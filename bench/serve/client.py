"""What a client notes of an answer: when each piece of text came. And what that says of requests. Pure but for the clock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec

from bench.common.sse import Answer, HttpStream
from bench.common.stats import Percentiles


class TimedStream(HttpStream):
    """Also keeps when events came: `times` (`perf_counter` seconds), one entry per event of the running answer."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(host, port)
        self.times: list[float] = []

    def saw(self, num_events: int, answer: Answer) -> None:
        answer.events += num_events
        if num_events:
            self.times += [time.perf_counter()] * num_events


@dataclass(slots=True)
class Outcome:
    """One request. Times are `perf_counter` seconds; `times`: of the events that carried text, at most one per token."""

    sent_at: float
    done_at: float
    prompt_tokens: int
    tokens: int = 0
    error: str = ""
    times: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, answer: Answer, times: Sequence[float], prompt_tokens: int) -> Outcome:
        # the first event may say the role alone, the last ones the end and the usage
        text = [at for at in times if answer.first_at and at >= answer.first_at - 1e-4][: answer.tokens]
        error = answer.error or ("" if text else "no text came")
        return cls(answer.sent_at, answer.done_at, prompt_tokens, answer.tokens, error, text)

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.sent_at

    @property
    def tpot_s(self) -> float:
        """Mean time of a token after the first; 0 for a single one."""
        return (self.times[-1] - self.times[0]) / (self.tokens - 1) if self.tokens > 1 else 0.0


class Objective(msgspec.Struct, frozen=True):
    """What makes a request good: both within their times, milliseconds."""

    ttft_ms: float
    tpot_ms: float

    def met_by(self, outcome: Outcome) -> bool:
        return not outcome.error and outcome.ttft_s * 1e3 <= self.ttft_ms and outcome.tpot_s * 1e3 <= self.tpot_ms


class Point(msgspec.Struct, kw_only=True):
    """One load. `window`: seconds since 1970. Latencies are of the requests sent within it, all of them waited for.

    `tokens_per_s`, `requests_per_s`: generated and completed within the window. `itl_ms`: between pieces of text, each one
    token as a rule; `tpot_ms`: a request's mean. `good`: requests per second sent in the window that met the objective.
    """

    name: str
    seconds: float
    window: tuple[float, float]
    sent: int
    failed: int
    errors: dict[str, int]
    tokens_per_s: float
    prompt_tokens_per_s: float
    requests_per_s: float
    good: float
    good_share: float
    ttft_ms: Percentiles
    itl_ms: Percentiles
    tpot_ms: Percentiles
    whole_ms: Percentiles


def summarise(name: str, outcomes: Sequence[Outcome], *, begin: float, end: float, wall: float, objective: Objective) -> Point:
    """`begin`, `end`: `perf_counter` seconds of the window; `wall`: its beginning since 1970."""
    seconds = end - begin
    sent = [outcome for outcome in outcomes if begin <= outcome.sent_at < end]
    well = [outcome for outcome in sent if not outcome.error]
    errors: dict[str, int] = {}
    for outcome in sent:
        if outcome.error:
            errors[outcome.error[:200]] = errors.get(outcome.error[:200], 0) + 1
    good = sum(map(objective.met_by, sent))
    return Point(
        name=name,
        seconds=seconds,
        window=(wall, wall + seconds),
        sent=len(sent),
        failed=len(sent) - len(well),
        errors=errors,
        tokens_per_s=sum(_tokens_within(outcome, begin, end) for outcome in outcomes) / seconds,
        prompt_tokens_per_s=sum(outcome.prompt_tokens for outcome in well) / seconds,
        requests_per_s=sum(begin <= outcome.done_at < end and not outcome.error for outcome in outcomes) / seconds,
        good=good / seconds,
        good_share=good / len(sent) if sent else 0.0,
        ttft_ms=Percentiles.of_seconds([outcome.ttft_s for outcome in well]),
        itl_ms=Percentiles.of_seconds([b - a for outcome in well for a, b in pairwise(outcome.times)]),
        tpot_ms=Percentiles.of_seconds([outcome.tpot_s for outcome in well if outcome.tokens > 1]),
        whole_ms=Percentiles.of_seconds([outcome.done_at - outcome.sent_at for outcome in well]),
    )


def _tokens_within(outcome: Outcome, begin: float, end: float) -> float:
    """The share of its text that came within the window, in tokens."""
    if not outcome.times:
        return 0.0
    return outcome.tokens * sum(begin <= at < end for at in outcome.times) / len(outcome.times)
