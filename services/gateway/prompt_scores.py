"""The scores of a choice's prompt: asked for before the answer is generated, told as `echo` with `logprobs` or as vLLM's
`prompt_logprobs`.

    ScoredStream:  the prompt is read ─► outputs `of_prompt` ─► the generation, if there is one ─► its outputs

The generation begins when the last score is there, so it finds the prompt's KV in the prefix cache. That is not told as cached:
the reading has computed it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from common.protocol.errors import PenstockError
from common.protocol.messages import SamplingParams, TokenLogprobs
from services.gateway.choices import ScoredToken, TextSource
from services.gateway.generation import READING, GenerationRequest
from services.gateway.logprobs import LOWEST_LOGPROB, TokenNames
from services.gateway.transcript import Output

UNSCORED = TokenLogprobs(float("nan"))
"""A prompt's first token follows nothing."""

MIN_DEADLINE_S = 0.001
"""A request whose time is over ends as any other does whose deadline passes."""

_encode = msgspec.json.Encoder().encode


class OutputStream(Protocol):
    async def next(self) -> Output: ...

    def cancel(self) -> None: ...


Generate = Callable[[GenerationRequest], OutputStream]
"""Raises Overloaded, ShuttingDown, GatewayBusy or DuplicateRequest, and has then taken nothing."""


class ScoredStream:
    """`generates`: whether anything is generated behind the prompt. `top`: how many alternatives the prompt's tokens list; -1:
    its scores are not asked for. Reading and generating share the deadline of `request`.

    :raises PenstockError: as `Generate`; nothing has been taken then.
    """

    def __init__(
        self,
        generate: Generate,
        request: GenerationRequest,
        *,
        top: int,
        generates: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._generate = generate
        self._clock = clock
        self._deadline = clock() + request.deadline_s
        self._generation = request if generates else None
        self._stream: OutputStream | None = None
        self._reads = self._has_read = top >= 0 and len(request.prompt) > 1
        if self._reads:
            self._stream = generate(scoring_of(request, top))
        elif generates:
            self._stream = generate(request)

    async def next(self) -> Output:
        """Everything since the last call."""
        if self._stream is None:
            return Output([], finish="length")
        output = await self._stream.next()
        if not self._reads:
            return msgspec.structs.replace(output, cached_tokens=0) if self._has_read else output
        if output.error is not None or output.finish in ("cancelled", "error"):
            return output
        if output.finish is not None:
            self._reads = False
            self._stream.cancel()
            self._stream = None
            try:
                if self._generation is not None:
                    left_s = max(self._deadline - self._clock(), MIN_DEADLINE_S)
                    self._stream = self._generate(msgspec.structs.replace(self._generation, deadline_s=left_s))
            except PenstockError as error:
                return Output([], error=error)
        return Output(output.tokens, output.logprobs, of_prompt=True)

    def cancel(self) -> None:
        if self._stream is not None:
            self._stream.cancel()


def scoring_of(request: GenerationRequest, top: int) -> GenerationRequest:
    """The reading of a prompt of two tokens at least, in which each but the first is scored, with `top` alternatives."""
    prompt = request.prompt
    return msgspec.structs.replace(
        request,
        id=f"{request.id}{READING}",
        prompt=prompt[:1],
        given=prompt[1:],
        sampling=SamplingParams(temperature=0.0, max_tokens=len(prompt) - 1, logprobs=top),
    )


class PromptText:
    """Where the tokens of a prompt stand in its text. `first`: the prompt's first token; `length`: characters of the text."""

    def __init__(self, source: TextSource, first: int, length: int) -> None:
        self._source = source
        self._length = length
        self._emitted = 0
        self._waiting = [self._placed(first, UNSCORED)]

    def push(self, tokens: Sequence[int], scores: Sequence[TokenLogprobs] | None) -> list[ScoredToken]:
        """The tokens with their scores, behind the first one at the first call."""
        found, self._waiting = self._waiting, []
        for token, score in zip(tokens, scores or [UNSCORED] * len(tokens), strict=True):
            found.append(self._placed(token, score))
        return found

    def _placed(self, token: int, score: TokenLogprobs) -> ScoredToken:
        placed = ScoredToken(token, score, min(self._emitted, self._length))
        self._emitted += len(self._source.push((token,)))
        return placed


def encoded_scores(scored: Sequence[ScoredToken], names: TokenNames, top: int) -> bytes:
    """Entries of vLLM's `prompt_logprobs`, with commas between them: the token itself, then the `top` likeliest."""
    return b",".join([_entry(item, names, top) for item in scored])


def _entry(item: ScoredToken, names: TokenNames, top: int) -> bytes:
    scores = item.scores
    if scores.logprob != scores.logprob:
        return b"null"
    found = {item.token: (scores.logprob, scores.rank)}
    likeliest = zip(scores.top_tokens[:top], scores.top_logprobs[:top], strict=True)
    for rank, (token, logprob) in enumerate(likeliest, start=1):
        found.setdefault(token, (logprob, rank))
    members = [
        b'"%d":{"logprob":%b,"rank":%d,"decoded_token":%b}'
        % (token, _encode(max(logprob, LOWEST_LOGPROB)), rank, names[token].text)
        for token, (logprob, rank) in found.items()
    ]
    return b"{" + b",".join(members) + b"}"
