"""What a GPU runner runs once before any request, so that no request waits for a kernel to be compiled."""

from __future__ import annotations

from collections.abc import Sequence

from common.engine.history import History
from common.engine.plan import Constraint, Masks, StepRow
from common.protocol.messages import SamplingParams


class _Anything:
    """A `plan.Constraint` that allows all tokens."""

    def fill(self, output: Sequence[int], proposal: Sequence[int], out: Masks, *, start: int = 0) -> None:
        out[:] = -1


_TOP = SamplingParams(temperature=1.0, top_k=8, top_p=0.5, logprobs=1)
_TOP_MANY = SamplingParams(temperature=1.0, top_k=8, top_p=0.5, logprobs=20)
_PENALISED = SamplingParams(temperature=1.0, top_p=0.5, presence_penalty=0.5, logit_bias={0: 1.0})
_BIASED = SamplingParams(temperature=1.0, logit_bias={0: 1.0}, logprobs=0)
_AT_LEAST = SamplingParams(min_tokens=2, stop_token_ids=[0])
_FREE = SamplingParams(temperature=1.0)

WARM_UP: tuple[tuple[tuple[SamplingParams, Constraint | None], ...], ...] = (
    ((_TOP, None), (_PENALISED, None), (_FREE, _Anything())),
    ((_BIASED, None), (_AT_LEAST, None), (_FREE, None)),
    ((_TOP_MANY, _Anything()), (_FREE, _Anything()), (_FREE, None)),
    ((_BIASED, _Anything()), (_FREE, None), (_FREE, None)),
)
"""The samples of steps that need every build of the kernels behind a graph: with filters, penalties and masks, and without;
with log-probabilities of few tokens, of as many as there may be, and of the drawn one alone."""


def warm_up_rows(samples: Sequence[tuple[SamplingParams, Constraint | None]]) -> list[StepRow]:
    """Return rows of one token each, of a sequence that comes again, and is counted by what is new of it."""
    return [StepRow([0], 0, [], 1, params, 0, History(-1, [0], 1, []), constraint=one) for params, one in samples]
