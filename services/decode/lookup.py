"""Proposals by lookup: what came the last time the text ended like this, in the request or in recent answers. Pure.

The text that a client expects the answer to repeat (`Generation.prediction`) is indexed before the prompt.

A guess takes the longest match of the text's end (`token_index`), of several occurrences the most frequent continuation, and
copies what followed. How likely that is to hold is measured by the length of the match (`hit_rates`), so each token of each
guess has a chance of its own. A hypothetical text can be looked up as well: what follows a step in flight costs no round trip.
"""

from __future__ import annotations

from collections.abc import Sequence as Sized
from dataclasses import dataclass, field
from typing import NamedTuple

from common.engine.outcomes import Outcome
from common.engine.plan import Drafted
from common.engine.sequence import Sequence
from common.protocol import tokens as token_bytes
from services.decode.drafter import NO_GUESS, NOTHING_FORESEEN, Foreseen, Guess
from services.decode.hit_rates import HitRates, Record
from services.decode.recent_texts import RecentTexts
from services.decode.token_index import MAX_MATCH, NONE, SEPARATOR, Match, TokenIndex

TIDY_TOKENS = 4096
"""Tokens of prompts that are indexed while one step runs: about a millisecond's work."""
_MAX_LAG = 64
"""A text that lacks more tokens in its index is not looked up yet."""
_SURE_LENGTH = 8
"""Behind a longer match in the request itself, other texts are not searched."""
_MIN_OUTPUT = 8
"""Shorter answers are not kept."""
_OTHERS_SHARE = 0.5
"""Chance of the second most frequent continuation if the first is wrong."""
_UNKNOWN_CHANCE = 0.7
"""Of a token that somebody else proposed."""
_MAX_PENDING = 4
"""Guesses of a sequence that were not compared yet: one for each step in flight, and those of steps that failed."""


class _Option(NamedTuple):
    """A copy from behind `position`. chances[k]: that all tokens up to number k hold; buckets: of each, in the table."""

    tokens: list[int]
    chances: list[float]
    buckets: list[int]
    position: int
    is_shared: bool


class _Pending(NamedTuple):
    """What was guessed for the first `base` tokens, if these end with `path`."""

    base: int
    path: list[int]
    option: _Option


@dataclass(slots=True)
class _Text:
    """before: what stands before the sequence's tokens in the index. position, length: where the last guess was copied from,
    and for how many tokens of the sequence."""

    index: TokenIndex
    before: list[int]
    record: Record = field(default_factory=Record)
    pending: list[_Pending] = field(default_factory=list)
    position: int = NONE
    is_shared: bool = False
    length: int = 0

    def num_missing(self, tokens: Sized[int]) -> int:
        """Return how many of the sequence's tokens, and of those before them, the index lacks."""
        return len(self.before) + len(tokens) - len(self.index)

    def extend(self, tokens: Sized[int], limit: int) -> int:
        """Add up to `limit` tokens that the index lacks. Return how many."""
        begin = len(self.index)
        part = [*self.before[begin : begin + limit]]
        begin = max(0, begin - len(self.before))
        part += tokens[begin : begin + limit - len(part)]
        self.index.extend(part)
        return len(part)

    def hint(self, length: int, *, shared: bool) -> int:
        """Return where a copy of the same text would have got to."""
        return self.position + length - self.length if self.position != NONE and self.is_shared == shared else NONE

    def made(self, option: _Option, tokens: Sized[int], more: list[int]) -> None:
        """A guess for `tokens` and `more` is made: it is compared later, and where it was copied from is looked at first."""
        base = len(tokens) + len(more)
        if len(self.pending) == _MAX_PENDING:
            del self.pending[0]
        self.pending.append(_Pending(base, more, option))
        self.position, self.is_shared, self.length = option.position, option.is_shared, base


class Lookup:
    """max_tokens: of a sequence that are searched, the last ones. max_recent_tokens: of ended answers; 0: none is kept."""

    name = "lookup"

    def __init__(self, *, max_tokens: int, max_recent_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.recent = RecentTexts(max_tokens=max_recent_tokens) if max_recent_tokens else None
        self.rates = HitRates()
        self._texts: dict[str, _Text] = {}
        self._behind: dict[str, Sequence] = {}  # whose prompts are not indexed to their end

    def __len__(self) -> int:
        return len(self._texts)

    def open(self, sequence: Sequence) -> None:
        prediction = token_bytes.unpack(sequence.generation.prediction)
        before = [*prediction, SEPARATOR] if prediction else []
        self._texts[sequence.request] = _Text(TokenIndex(max_tokens=self.max_tokens), before)
        self._behind[sequence.request] = sequence

    def guess(self, sequence: Sequence, limit: int) -> Guess:
        text = self._caught_up(sequence)
        if text is None:
            return NO_GUESS
        options = self._options(sequence, text, [], limit, most=1)
        if not options:
            return NO_GUESS
        text.made(options[0], sequence.tokens, [])
        return Guess(options[0].tokens, options[0].chances)

    def foresee(self, sequence: Sequence, limit: int) -> Foreseen:
        """What follows if all is accepted that is being verified; and if its first token is not."""
        text, verifying = self._caught_up(sequence), sequence.verifying
        if text is None:
            return NOTHING_FORESEEN
        behind = self._options(sequence, text, verifying, limit + 1)
        before = self._options(sequence, text, [], max(limit + 1, len(verifying))) if verifying else []
        if behind:
            text.made(behind[0], sequence.tokens, verifying)
        all_hold = _UNKNOWN_CHANCE ** len(verifying)
        if before and before[0].tokens[: len(verifying)] == verifying:
            all_hold = before[0].chances[len(verifying) - 1]
        expected = [(len(verifying), all_hold, option) for option in behind]
        expected += [(0, 1.0, option) for option in before if option.tokens[0] != verifying[0]]
        outcomes: list[Outcome] = []
        chances = [0.0] * limit
        for accepted, reached, option in expected:
            if proposal := option.tokens[1 : limit + 1]:
                outcomes.append(Outcome(accepted, option.tokens[0], proposal))
                for index, chance in enumerate(option.chances[1 : limit + 1]):
                    chances[index] += reached * chance
        return Foreseen(outcomes, [min(1.0, chance) for chance in chances if chance])

    def record(self, sequence: Sequence, drafted: Drafted | None = None) -> None:
        text = self._texts.get(sequence.request)
        if text is None:
            return
        tokens = sequence.tokens
        while text.pending and text.pending[0].base < len(tokens):
            base, path, option = text.pending.pop(0)
            if path and tokens[base - len(path) : base] != path:
                continue
            for token, bucket, came in zip(option.tokens, option.buckets, tokens[base:], strict=False):
                self.rates.record(bucket, token == came, text.record)
                if token != came:
                    break

    def close(self, sequence: Sequence) -> None:
        self._behind.pop(sequence.request, None)
        text = self._texts.pop(sequence.request, None)
        if text is not None and self.recent is not None and sequence.finish is not None and sequence.num_outputs >= _MIN_OUTPUT:
            self.recent.add(sequence.generation.salt, sequence.output)

    def tidy(self) -> None:
        left = TIDY_TOKENS
        for request, sequence in list(self._behind.items()):
            text = self._texts[request]
            left -= text.extend(sequence.tokens, left)
            if not text.num_missing(sequence.tokens):
                del self._behind[request]
            if left <= 0:
                return

    def reset(self) -> None:
        self._texts.clear()
        self._behind.clear()
        if self.recent is not None:
            self.recent.clear()

    def _caught_up(self, sequence: Sequence) -> _Text | None:
        """Return the text with all tokens of the sequence; None if too many are missing to add them now."""
        text = self._texts.get(sequence.request)
        if text is None:
            return None
        if (num_missing := text.num_missing(sequence.tokens)) > _MAX_LAG:
            return None
        if num_missing:
            text.extend(sequence.tokens, num_missing)
        if self._behind:
            self._behind.pop(sequence.request, None)
        return text

    def _options(self, sequence: Sequence, text: _Text, more: list[int], num_tokens: int, *, most: int = 2) -> list[_Option]:
        """Return what may follow the sequence's tokens and `more`: the best copy, and perhaps one that begins otherwise."""
        ending = [*sequence.tokens[-2:], *more][-2:]
        recent = self.recent.of(sequence.generation.salt) if self.recent is not None else None
        is_own = len(ending) == 2 and text.index.has(*ending)
        is_shared = len(ending) == 2 and recent is not None and recent.has(*ending)
        if not is_own and not is_shared:
            return []
        context = [*sequence.tokens[-MAX_MATCH:], *more][-MAX_MATCH:]
        length = len(sequence.tokens) + len(more)
        options: list[_Option] = []
        if is_own and (match := text.index.find(context, text.hint(length, shared=False))) is not None:
            options = self._copies(text, text.index, match, num_tokens, more, most)
            is_shared = is_shared and match.length < _SURE_LENGTH
        if is_shared and recent is not None and (match := recent.find(context, text.hint(length, shared=True))) is not None:
            others = self._copies(text, recent, match, num_tokens, None, most)
            options = max(options, others, key=lambda found: found[0].chances[0] if found else 0.0)
        return options

    def _copies(
        self, text: _Text, index: TokenIndex, match: Match, num_tokens: int, tail: list[int] | None, most: int
    ) -> list[_Option]:
        """tail: as of `TokenIndex.follow`."""
        found, agreeing, shared = match.num_found, match.num_agreeing, tail is None
        bucket = self.rates.bucket(match.length, agreeing, found, shared=shared)
        chance = self.rates.chance(bucket, text.record)
        copies = [(match.position, chance, agreeing if agreeing == found else 1)]
        if most > 1 and match.other != NONE:
            copies.append((match.other, _OTHERS_SHARE * (1 - chance), 1))
        options: list[_Option] = []
        for position, first_chance, agreed in copies:
            tokens = index.follow(position, num_tokens, tail)
            buckets, chances = [bucket], [first_chance]
            for length in range(match.length + 1, match.length + len(tokens)):
                buckets.append(self.rates.bucket(length, agreed, agreed, shared=shared))
                chances.append(chances[-1] * self.rates.chance(buckets[-1], text.record))
            options.append(_Option(tokens, chances, buckets, position, shared))
        return options
