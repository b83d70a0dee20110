"""What a request has generated so far, over all its attempts, and how much of that its reader has taken. Pure.

[0, taken)             the reader has it
[taken, len(tokens))   unread
"""

from __future__ import annotations

import msgspec

from common.protocol.errors import PenstockError
from common.protocol.messages import FinishReason, SamplingParams, TokenLogprobs

UNKNOWN_LOGPROBS = TokenLogprobs(-9999.0)
"""Stands for log-probabilities that were lost with their worker; the value is OpenAI's for 'not likely at all'."""


class Output(msgspec.Struct):
    """Everything new since the last one. The one with `finish` or `error` set is the last; an error has no `finish`.
    `of_prompt`: tokens of the prompt, with their scores (see `prompt_scores.py`)."""

    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish: FinishReason | None = None
    error: PenstockError | None = None
    cached_tokens: int = 0
    embedding: bytes = b""
    of_prompt: bool = False


class Transcript:
    """Bounded by `max_tokens`. `cached_tokens`: prompt tokens that the first worker to say so had cached, -1 before.
    `embedding`: see `TokenFrame`."""

    def __init__(self, sampling: SamplingParams) -> None:
        self.sampling = sampling
        self.tokens: list[int] = []
        self.cached_tokens = -1
        self.embedding = b""
        self.ended = False
        self.finish: FinishReason | None = None
        self.error: PenstockError | None = None
        self._logprobs: list[TokenLogprobs] | None = [] if sampling.logprobs >= 0 else None
        self._taken = 0
        self._end_taken = False
        self._unread_since = 0.0

    @property
    def full(self) -> bool:
        return len(self.tokens) >= self.sampling.max_tokens

    @property
    def unread(self) -> bool:
        return len(self.tokens) > self._taken or (self.ended and not self._end_taken)

    def append(self, fresh: list[int], logprobs: list[TokenLogprobs] | None) -> None:
        """`logprobs` belong to `fresh`, when they are known."""
        room = self.sampling.max_tokens - len(self.tokens)
        if len(fresh) > room:
            fresh = fresh[:room]
        self.tokens += fresh
        if self._logprobs is not None:
            news = (logprobs or [])[: len(fresh)]
            self._logprobs += news
            self._logprobs += [UNKNOWN_LOGPROBS] * (len(fresh) - len(news))

    def end(self, finish: FinishReason | None, error: PenstockError | None) -> None:
        self.ended, self.finish, self.error = True, finish, error

    def take(self) -> Output:
        """Everything since the last call."""
        tokens = self.tokens[self._taken :]
        self._taken = len(self.tokens)
        self._unread_since = 0.0
        self._end_taken = self.ended
        logprobs = None
        if self._logprobs is not None:
            logprobs, self._logprobs = self._logprobs, []
        return Output(tokens, logprobs, self.finish, self.error, max(self.cached_tokens, 0), self.embedding)

    def unread_for(self, now: float) -> float:
        """Seconds since something has waited for the reader, as far as earlier calls could see."""
        if not self.unread:
            return 0.0
        if self._unread_since == 0.0:
            self._unread_since = now
        return now - self._unread_since

    def away(self) -> None:
        """Nobody could read until now."""
        self._unread_since = 0.0

    def complete(self) -> FinishReason | None:
        """How the tokens so far end the request, should the frame that said so have been lost with its worker."""
        if not self.tokens:
            return None
        if self.tokens[-1] in self.sampling.stop_token_ids and len(self.tokens) >= self.sampling.min_tokens:
            return "stop"
        return "length" if self.full else None
