"""The tokens that a step's row is penalised for, or that are looked up for it: a view of its sequence's own list, so that no
step copies it. Pure."""

from __future__ import annotations

from typing import overload

from common.cache.prefix import TOKEN_BYTES
from common.protocol import tokens as token_bytes


class History:
    """A sequence's tokens up to one step. Its list only grows, so other threads may read what was there.

    key: names the sequence, among all of this process. tokens: the sequence's list, of which the first `known` count; tail:
    what follows them in this step, proposed tokens or `plan.UNKNOWN`. before: packed tokens of another text, which stand before
    all of these.
    """

    __slots__ = ("_before", "_known", "_tail", "_tokens", "key")

    def __init__(self, key: int, tokens: list[int], known: int, tail: list[int], before: bytes = b"") -> None:
        self.key = key
        self._before = before
        self._tokens = tokens
        self._known = known
        self._tail = tail

    def __len__(self) -> int:
        return len(self._before) // TOKEN_BYTES + self._known + len(self._tail)

    @overload
    def __getitem__(self, place: slice) -> list[int]: ...
    @overload
    def __getitem__(self, place: int) -> int: ...
    def __getitem__(self, place: slice | int) -> list[int] | int:
        if isinstance(place, int):
            return self[range(len(self))[place] : range(len(self))[place] + 1][0]
        start, end, _ = place.indices(len(self))
        if not self._before:
            return self._own(start, end)
        num_before = len(self._before) // TOKEN_BYTES
        before = token_bytes.unpack(self._before[TOKEN_BYTES * start : TOKEN_BYTES * max(start, end)])
        return before + self._own(max(0, start - num_before), max(0, end - num_before))

    def _own(self, start: int, end: int) -> list[int]:
        """Return a part of the sequence's tokens and what follows them."""
        known = self._tokens[start : min(end, self._known)]
        return known + self._tail[max(0, start - self._known) : max(0, end - self._known)]

    def settle(self, token: int) -> None:
        """Put in the last token, which was `plan.UNKNOWN`."""
        self._tail[-1] = token
