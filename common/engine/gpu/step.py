"""A step that is on its way on a GPU, and what comes of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from common.engine.gpu.board import TakenReport
from common.engine.gpu.head import DraftTimes
from common.engine.gpu.logprobs import Logprobs
from common.engine.gpu.lookup import LookupReport
from common.engine.gpu.reading import Reading, put_readings
from common.engine.plan import RowSamples, RunnerLost, StepResult, StepRow
from common.protocol.messages import TokenLogprobs


class DeviceStep:
    """A submitted step; see `plan.PendingStep`."""

    def __init__(
        self,
        rows: Sequence[StepRow],
        begun: float,
        tokens: torch.Tensor | None = None,
        logprobs: Logprobs | None = None,
        event: torch.cuda.Event | None = None,
        readings: Sequence[Reading] = (),
        reports: Sequence[LookupReport | TakenReport] = (),
        drafted: DraftTimes | None = None,
    ) -> None:
        """drafted: when a head drafted behind the step before, which this one waited for."""
        self._drafted = drafted
        self._reports = reports
        self._readings = readings
        self._rows = rows
        self._begun = begun
        self._tokens = tokens
        self._logprobs = logprobs
        self._event = event

    def has_run(self) -> bool:
        """See `plan.PendingStep`."""
        try:
            return self._event is None or self._event.query()
        except torch.AcceleratorError:
            return True

    def sampled(self) -> list[int]:
        """All samples in order, once the step has run; `NO_TOKEN` for those without finite logits.

        :raises RunnerLost: if it can't any more.
        """
        if self._event is not None:
            # this thread's device, too: a call from a thread without one may set up the first GPU, which is another worker's
            with lost_if_broken(), torch.cuda.device(self._event.device):
                self._event.synchronize()
        return [] if self._tokens is None else self._tokens.tolist()

    def result(self) -> StepResult:
        tokens = self.sampled()
        logprobs = _logprobs_of(self._logprobs)
        rows: list[RowSamples] = []
        at = 0
        for row in self._rows:
            span = range(at, at + row.num_samples)
            wanted = row.sampling.logprobs
            found = None if wanted < 0 else [_cut(logprobs[index], wanted) for index in span]
            rows.append(RowSamples(tokens=tokens[at : at + row.num_samples], logprobs=found))
            at += row.num_samples
        put_readings(self._readings, rows)
        for report in self._reports:
            report.put_into(rows)
        passes = [] if self._drafted is None else self._drafted.passes()
        return StepResult(rows=rows, elapsed_s=time.perf_counter() - self._begun, passes=passes)


@contextlib.contextmanager
def lost_if_broken() -> Iterator[None]:
    """:raises RunnerLost: for an error after which CUDA gives every call the same error."""
    try:
        yield
    except torch.AcceleratorError as error:
        raise RunnerLost(str(error)) from error


def _logprobs_of(logprobs: Logprobs | None) -> dict[int, TokenLogprobs]:
    if logprobs is None:
        return {}
    columns = (logprobs.asking, logprobs.chosen, logprobs.ids, logprobs.values)
    return {
        index: TokenLogprobs(logprob=chosen, top_tokens=tuple(ids), top_logprobs=tuple(values))
        for index, chosen, ids, values in zip(*(np.asarray(column).tolist() for column in columns), strict=True)
    }


def _cut(found: TokenLogprobs, num_top: int) -> TokenLogprobs:
    if len(found.top_tokens) <= num_top:
        return found
    return TokenLogprobs(found.logprob, found.top_tokens[:num_top], found.top_logprobs[:num_top])
