"""The tokens that a step's row is penalised for: a view of its sequence's own list, so that no step copies it. Pure."""

from __future__ import annotations

from typing import overload


class History:
    """A sequence's tokens up to one step. Its list only grows, so other threads may read what was there.

    key: names the sequence, among all of this process. tokens: the sequence's list, of which the first `known` count; tail:
    what follows them in this step, proposed tokens or `plan.UNKNOWN`.
    """

    __slots__ = ("_known", "_tail", "_tokens", "key")

    def __init__(self, key: int, tokens: list[int], known: int, tail: list[int]) -> None:
        self.key = key
        self._tokens = tokens
        self._known = known
        self._tail = tail

    def __len__(self) -> int:
        return self._known + len(self._tail)

    @overload
    def __getitem__(self, place: slice) -> list[int]: ...
    @overload
    def __getitem__(self, place: int) -> int: ...
    def __getitem__(self, place: slice | int) -> list[int] | int:
        if isinstance(place, int):
            return self[range(len(self))[place] : range(len(self))[place] + 1][0]
        start, end, _ = place.indices(len(self))
        known = self._tokens[start : min(end, self._known)]
        return known + self._tail[max(0, start - self._known) : max(0, end - self._known)]

    def settle(self, token: int) -> None:
        """Put in the last token, which was `plan.UNKNOWN`."""
        self._tail[-1] = token
