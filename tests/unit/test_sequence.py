"""What a worker refuses before it takes anything: a row that can't be run would fail everyone's step."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from common.engine.sequence import Sequence
from common.protocol import tokens as token_bytes
from common.protocol.errors import ContextLengthExceeded, EmptyPrompt, PenstockError, ProtocolError
from common.protocol.messages import SamplingParams
from tests.unit.scheduling import MAX_CONTEXT, VOCAB, generation

OUT_OF_RANGE: list[dict[str, Any]] = [
    {"temperature": math.nan},
    {"temperature": math.inf},
    {"top_p": math.nan},
    {"min_p": 1.5},
    {"min_p": -0.5},
    {"min_p": math.nan},
    {"repetition_penalty": 0.0},
    {"repetition_penalty": math.inf},
    {"frequency_penalty": 1e308},
    {"logit_bias": {3: math.nan}},
    {"max_tokens": 0},
]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"tokens": b""}, EmptyPrompt),
        ({"prompt_tokens": 0}, EmptyPrompt),
        ({"prompt_tokens": 4}, ProtocolError),
        ({"tokens": b"\x01\x00\x00"}, ProtocolError),
        ({"tokens": token_bytes.pack([VOCAB])}, ProtocolError),
        ({"tokens": token_bytes.pack([1] * (MAX_CONTEXT + 1))}, ContextLengthExceeded),
        ({"given": token_bytes.pack([4, 5]), "pooling": "mean"}, ProtocolError),
        *(({"weight": weight}, ProtocolError) for weight in (0.0, -1.0, math.nan, math.inf)),
        *(({"sampling": SamplingParams(**params)}, ProtocolError) for params in OUT_OF_RANGE),
    ],
)
def test_what_could_not_be_run_is_refused(change: dict[str, Any], error: type[PenstockError]) -> None:
    wanted = msgspec.structs.replace(generation("r", [1, 2, 3]), **change)
    with pytest.raises(error):
        Sequence.of(wanted, vocab_size=VOCAB, max_context=MAX_CONTEXT)
