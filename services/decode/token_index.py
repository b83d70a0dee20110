"""Where the end of a text occurred before, in this text or another. Pure.

Each position is linked to the one before it that ends with the same two tokens (the hash chains of LZ77): adding a token costs
O(1), and a search walks a bounded number of links, from the latest occurrence back.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

SEPARATOR = 0xFFFFFFFF
"""Between texts of one index: no token has this id, so that no match and no copy goes across."""
MIN_MATCH = 2
MAX_MATCH = 32
"""Tokens of a context that are compared."""
NONE = -1
"""No position."""


class Match(NamedTuple):
    """A context's last `length` tokens occur `num_found` times; behind `num_agreeing` of these comes the same token, the most
    frequent one, latest at `position`. other: the latest occurrence before a different token; -1: there is none."""

    position: int
    length: int
    num_agreeing: int = 1
    num_found: int = 1
    other: int = NONE


class TokenIndex:
    """The last `max_tokens` tokens at most of what was added, at least half as many; about 80 bytes a token.

    max_candidates: occurrences that one search compares.
    """

    def __init__(self, *, max_tokens: int, max_candidates: int = 8) -> None:
        self.max_tokens = max_tokens
        self.max_candidates = max_candidates
        self._offset = 0  # tokens added before the first one kept
        self._tokens = array("I")
        self._previous = array("i")  # [i]: the last index before i that ends the same pair
        self._latest: dict[int, int] = {}  # pair → the last index that ends it

    def __len__(self) -> int:
        """Tokens added so far."""
        return self._offset + len(self._tokens)

    @property
    def num_kept(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """tokens: below 2**32."""
        fresh = tokens
        if len(self._tokens) + len(fresh) > self.max_tokens:
            # half at a time, so that what is kept is indexed again only once per max_tokens / 2 new tokens
            whole = self._tokens + array("I", fresh)
            kept = whole[len(whole) - max(1, self.max_tokens // 2) :]
            self._offset += len(whole) - len(kept)
            self._tokens, self._previous, fresh = array("I"), array("i"), kept
            self._latest.clear()
        position = len(self._tokens)
        latest, previous = self._latest, self._previous
        last = self._tokens[-1] if position else SEPARATOR
        for token in fresh:
            pair = last << 32 | token
            previous.append(latest.get(pair, NONE))
            latest[pair] = position
            last = token
            position += 1
        self._tokens.extend(fresh)

    def has(self, first: int, second: int) -> bool:
        """Whether these two tokens occur with one behind them: without, nothing that ends with them is found."""
        position, last = self._latest.get(first << 32 | second, NONE), len(self._tokens) - 1
        return position != NONE and (position != last or self._previous[position] != NONE)

    def find(self, context: Sequence[int], hint: int = NONE) -> Match | None:
        """Return the longest match of the end of `context`; None if its last two tokens occur nowhere with one behind them.

        context: the last tokens of a text, `MAX_MATCH` suffice; that text may be the one that was added here. hint: a position
        that may match, wherever the links lead.
        """
        tokens, size = self._tokens, len(context)
        if size < MIN_MATCH:
            return None
        last = len(tokens) - 1
        chain = self._latest.get(context[-2] << 32 | context[-1], NONE)
        if chain == last != NONE:
            chain = self._previous[chain]
        hint = hint - self._offset if 0 < hint - self._offset < last else NONE
        longest, found = MIN_MATCH, list[int]()
        for at in islice(self._candidates(chain, hint), self.max_candidates):
            length, most = 0, min(size, at + 1, MAX_MATCH)
            while length < most and tokens[at - length] == context[-1 - length]:
                length += 1
            if length >= longest and tokens[at + 1] != SEPARATOR:
                if length > longest:
                    longest, found = length, []
                found.append(at)
        return self._vote(found, longest) if found else None

    def follow(self, position: int, num_tokens: int, tail: Sequence[int] | None = None) -> list[int]:
        """Return at most `num_tokens` tokens from behind `position`, up to the end of its text.

        tail: what comes behind this index in the text that is continued, if that is the one indexed: the copy then goes on with
        `tail` and with itself, so that a loop is guessed to go on for ever.
        """
        index = position - self._offset
        guess = self._tokens[index + 1 : index + 1 + num_tokens].tolist()
        if SEPARATOR in guess:
            return guess[: guess.index(SEPARATOR)]
        if tail is None:
            return guess
        guess += tail[: num_tokens - len(guess)]
        period = len(self._tokens) + len(tail) - 1 - index
        while len(guess) < num_tokens:
            guess.append(guess[len(guess) - period])
        return guess

    def _candidates(self, chain: int, hint: int) -> Iterator[int]:
        if hint != NONE:
            yield hint
        while chain != NONE:
            if chain != hint:
                yield chain
            chain = self._previous[chain]

    def _vote(self, found: list[int], length: int) -> Match:
        if len(found) == 1:
            return Match(self._offset + found[0], length)
        behind = [self._tokens[at + 1] for at in found]
        token, votes = Counter(behind).most_common(1)[0]  # of equals the one met first: the latest, or where the hint leads
        other = next((at for at, next_token in zip(found, behind, strict=True) if next_token != token), NONE)
        return Match(
            self._offset + found[behind.index(token)],
            length,
            votes,
            len(found),
            NONE if other == NONE else self._offset + other,
        )
