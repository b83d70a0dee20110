"""What one more prompt token adds to a step of decoding rows. Pure.

Parts of prompts that follow one another are compared: their rows and contexts are nearly the same, so how they differ in size
and in time says what a token costs. The latest such differences are fitted by least squares and drawn toward an estimate that
does not depend on them: what a token costs in long prompts that are computed alone, by the same kernels. Until there was
one, it is what a token of short prompts costs, or of parts on average.

A single measurement must not decide. A worker that takes tokens to be expensive says that it computes few, and is sent no
prompt whose time would correct that. The end of a prompt is often a few tokens long: one of 2, which took
1.7 ms longer than rows alone, once made a token of 25 µs look like one of 215, and the worker was sent no further prompt.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import NamedTuple

from common.engine.speeds import TokenRate

_SHORT_TOKENS = 512
"""A prompt with fewer tokens is short: reading the weights, as in a step of rows alone, is a large share of its step."""
_HORIZON_TOKENS = 4096
_LEAST_SHARE = 0.25
"""The share of a short prompt's step that its tokens are taken to cost at least."""
_ALONE_STEPS = 5
"""The latest steps with longer prompts alone, whose median counts: something else may have held up one of them."""
_MOST_TIMES_SHORT = 4.0
"""How many times a token of a short prompt one of a longer prompt is taken to cost at most: the only longer one may have been
held up."""
_PART_SHARE = 0.7
"""Of what a token of a part takes on average, what a further one is taken to cost until a prompt has been computed alone."""
_LEAST_PART = 64
"""Smaller parts are not compared: other kernels compute them."""
_SCALE = 128.0
"""Tokens by which sizes typically differ."""
_KEPT = 0.9
"""Of the weight of earlier differences, with each new one of `_SCALE` tokens or more: about the latest ten count."""


class _Trust(NamedTuple):
    """How far an estimate of a token's cost is trusted. weight: it counts as so many differences of `_SCALE` tokens. least,
    most: a token is taken to cost between these times the estimate."""

    weight: float
    least: float
    most: float


_ALONE, _SHORT, _PARTS = _Trust(4.0, 1.0, 2.0), _Trust(0.2, 1.0, 4.0), _Trust(0.2, 0.25, 4.0)
"""Estimates by long prompts computed alone, by short ones, and by parts on average. The first two are the least that a token is
taken to cost: small parts are computed while weights are read and differ by less, which larger ones would not."""


class FurtherCost:
    """Of one decode worker. Times are seconds."""

    def __init__(self) -> None:
        self.short = TokenRate(_HORIZON_TOKENS)
        """Of steps that compute short prompts and no rows, without what reading the weights takes."""
        self.beside = TokenRate(_HORIZON_TOKENS)
        """Of what parts add to steps of rows."""
        self._alone: deque[float] = deque(maxlen=_ALONE_STEPS)
        self._first_s = 0.0
        self._last: tuple[int, float] | None = None
        self._squares = self._products = 0.0

    @property
    def alone_s(self) -> float:
        """Seconds a token of prompts that are computed alone, and are not short; 0: unknown."""
        if not self._alone:
            return 0.0
        typical_s, short_s = median(self._alone), self.short.token_s
        return min(typical_s, _MOST_TIMES_SHORT * short_s) if short_s else typical_s

    @property
    def token_s(self) -> float:
        """Seconds; 0: unknown."""
        if estimate_s := self.alone_s:
            trust = _ALONE
        elif estimate_s := self.short.token_s:
            trust = _SHORT
        else:
            estimate_s, trust = _PART_SHARE * (self.beside.token_s or self._first_s), _PARTS
        fitted_s = (self._products + trust.weight * estimate_s) / (self._squares + trust.weight)
        return min(max(fitted_s, trust.least * estimate_s), trust.most * estimate_s)

    def observe_alone(self, tokens: int, seconds: float, rows_s: float) -> None:
        """A step computed so many tokens of prompts and no rows. rows_s: what a step of rows alone takes."""
        if tokens < _SHORT_TOKENS:
            self.short.measure(tokens, max(seconds - rows_s, _LEAST_SHARE * seconds))
        else:
            self._alone.append(seconds / tokens)

    def observe_part(self, tokens: int, added_s: float, *, is_likely: bool) -> None:
        """A part of so many tokens made a step of rows so much longer. is_likely: what a step of rows takes is known, and this
        one took about what was predicted."""
        self.beside.measure(tokens, max(0.0, added_s))
        self._first_s = self._first_s or max(0.0, added_s) / tokens
        if not is_likely or tokens < _LEAST_PART:
            self._last = None
            return
        if self._last:
            more, took_s = (tokens - self._last[0]) / _SCALE, added_s - self._last[1]
            kept = _KEPT ** min(1.0, more**2)
            self._squares = kept * self._squares + more**2
            self._products = kept * self._products + more * took_s / _SCALE
        self._last = tokens, added_s
