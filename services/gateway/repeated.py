"""How much of what a client predicted an answer has repeated, for `usage`: by its tokens, whoever proposed them. Pure.

    prediction   a b c d e f g
    answer       a b x d e y g     counted: a b, d e

Where a token differs, the answer goes on in the prediction at the next place that has its last two tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

_WINDOW = 256
"""Tokens of the prediction that an answer may leave out at once."""


class Repeated:
    """`count`: tokens of `prediction` that the answer has, in their order."""

    def __init__(self, prediction: Sequence[int]) -> None:
        self._prediction = prediction
        self._at = 0
        self._last = -1
        self._has_last = True  # the last token of the answer was counted
        self.count = 0

    def push(self, tokens: Sequence[int]) -> None:
        """The answer goes on with `tokens`."""
        for token in tokens:
            if self._at == len(self._prediction):
                return
            if self._prediction[self._at] == token:
                self.count, self._at, self._has_last = self.count + 1, self._at + 1, True
            elif place := self._found(token):
                self.count += 1 if self._has_last else 2
                self._at, self._has_last = place + 1, True
            else:
                self._has_last = False
            self._last = token

    def _found(self, token: int) -> int:
        """Return the next place of `token` behind the last one of the answer; 0: there is none."""
        end = min(len(self._prediction), self._at + _WINDOW)
        place = self._at
        while place + 1 < end:
            try:
                place = self._prediction.index(token, place + 1, end)
            except ValueError:
                return 0
            if self._prediction[place - 1] == self._last:
                return place
        return 0
