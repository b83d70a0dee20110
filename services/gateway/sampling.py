"""From a request's arguments, and what a model's authors recommend, to how its answers are sampled."""

from __future__ import annotations

import os
from typing import TypeVar, cast

from common.protocol.errors import InvalidParameter
from common.protocol.messages import SamplingParams
from common.text.bundle import TextBundle
from services.gateway import openai
from services.gateway.openai import Arguments

_T = TypeVar("_T")


def sampling_params(bundle: TextBundle, request: Arguments, *, max_tokens: int, logprobs: int, grammar: str) -> SamplingParams:
    """How the answers of a request are sampled.

    :raises InvalidParameter: a token id past the vocabulary, or more `min_tokens` than can come.
    """
    bias = request.logit_bias or {}
    stop_ids = request.stop_token_ids or []
    bundle.check_ids(list(bias), "logit_bias")
    # one that the tokenizer alone has never comes
    bundle.check_ids([token for token in stop_ids if not 0 <= token < bundle.tokenizer.vocab_size], "stop_token_ids")
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidParameter(f"min_tokens is {min_tokens}, but at most {max_tokens} can come", param="min_tokens")
    default = bundle.sampling
    top_p = _given(request.top_p, default.top_p, 1.0)
    top_k = max(_given(request.top_k, default.top_k, 0), 0)
    is_seeded = request.seed not in (None, openai.RANDOM_SEED)
    return SamplingParams(
        seed=cast(int, request.seed) if is_seeded else int.from_bytes(os.urandom(8), "little") >> 1,
        temperature=_given(request.temperature, default.temperature, 1.0),
        # OpenAI allows top_p 0, which keeps the likeliest token alone
        top_k=1 if top_p == 0 else min(top_k, bundle.num_ids),
        top_p=top_p or 1.0,
        min_p=_given(request.min_p, default.min_p, 0.0),
        presence_penalty=_given(request.presence_penalty, None, 0.0),
        frequency_penalty=_given(request.frequency_penalty, None, 0.0),
        repetition_penalty=_given(request.repetition_penalty, default.repetition_penalty, 1.0),
        logit_bias=bias,
        logprobs=logprobs,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=sorted({*stop_ids, *(() if request.ignore_eos else bundle.eos_ids)}),
        grammar=grammar,
    )


def _given(value: _T | None, recommended: _T | None, otherwise: _T) -> _T:
    """What the client says, else what the model's authors do, else what OpenAI does."""
    if value is not None:
        return value
    return otherwise if recommended is None else recommended
