"""Prompt lookup: what followed the last few tokens the last time they occurred in the same sequence. Pure.

Each position is linked to the one before it that ends with the same two tokens (the hash chains of LZ77), so an update
costs O(new tokens) however long the sequence is. A guess walks a few links back from the end, takes the occurrence whose
context agrees furthest, the latest of equals, and copies what came after it; a copy that runs into the end goes on with
what it copied, so that a loop is guessed to go on for ever.

Sequences never see each other's tokens: a guess taken from another tenant's text would show in the timing.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from common.protocol.draft_messages import DraftBranch, DraftSampling
from common.protocol.errors import ProtocolError
from common.protocol.handles import WorkerRef
from services.draft.proposer import MirrorKey

_NONE = -1


class NgramIndex:
    """The tokens of one sequence, or its last `max_tokens` at most, and where each pair of tokens ended last.

    About 80 bytes a token, most of them for pairs that occur once.
    """

    def __init__(self, *, min_match: int, max_match: int, max_tokens: int, max_candidates: int = 16) -> None:
        self.min_match = min_match
        self.max_match = max_match
        self.max_tokens = max_tokens
        self.max_candidates = max_candidates
        self._offset = 0  # index in the sequence of the first token kept
        self._tokens = array("I")
        self._previous = array("i")  # [i]: the last position before i that ends the same pair
        self._latest: dict[int, int] = {}  # pair → the last position that ends it

    def __len__(self) -> int:
        return self._offset + len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """:raises ProtocolError: if one is not a uint32; nothing has changed then."""
        try:
            fresh = array("I", tokens)
        except (OverflowError, TypeError) as error:
            raise ProtocolError("token ids must be between 0 and 4294967295") from error
        if len(self._tokens) + len(fresh) > self.max_tokens:
            # half at a time, so that what is kept is indexed again only once per max_tokens / 2 new tokens
            whole = self._tokens + fresh
            kept = whole[-max(1, self.max_tokens // 2) :]
            self._offset += len(whole) - len(kept)
            self._tokens, self._previous, fresh = array("I"), array("i"), kept
            self._latest.clear()
        self._append(fresh)

    def truncate(self, length: int) -> bool:
        """Forget the tokens from index `length` on. False: not even their beginning is kept any more."""
        keep = length - self._offset
        if keep < 0 or length > len(self):
            return False
        while len(self._tokens) > keep:
            end = len(self._tokens) - 1
            if end:
                pair = self._tokens[end - 1] << 32 | self._tokens[end]
                before = self._previous[end]
                if before == _NONE:
                    del self._latest[pair]
                else:
                    self._latest[pair] = before
            self._tokens.pop()
            self._previous.pop()
        return True

    def propose(self, num_tokens: int) -> list[int]:
        """At most `num_tokens` tokens that may come next; [] when the last `min_match` tokens are new."""
        tokens = self._tokens
        end = len(tokens) - 1
        best, best_match = _NONE, self.min_match - 1
        candidate = self._previous[end] if end > 0 else _NONE
        for _ in range(self.max_candidates):
            if candidate == _NONE or best_match == self.max_match:
                break
            match = 2  # the pair that links them
            while match < self.max_match and match <= candidate and tokens[candidate - match] == tokens[end - match]:
                match += 1
            if match > best_match:
                best, best_match = candidate, match
            candidate = self._previous[candidate]
        if best == _NONE:
            return []
        guess = tokens[best + 1 : best + 1 + num_tokens].tolist()
        period = end - best
        while len(guess) < num_tokens:
            guess.append(guess[len(guess) - period])
        return guess

    def _append(self, tokens: array[int]) -> None:
        position = len(self._tokens)
        latest, previous = self._latest, self._previous
        last = self._tokens[-1] if position else _NONE
        for token in tokens:
            if last == _NONE:
                previous.append(_NONE)
            else:
                pair = last << 32 | token
                previous.append(latest.get(pair, _NONE))
                latest[pair] = position
            last = token
            position += 1
        self._tokens.extend(tokens)


class NgramProposer:
    """`Proposer` by n-grams; bounded by `max_sequences` mirrors of `max_tokens` tokens each."""

    def __init__(self, *, max_sequences: int, max_tokens: int, min_match: int, max_match: int) -> None:
        self.max_sequences = max_sequences
        self.max_tokens = max_tokens
        self.min_match = min_match
        self.max_match = max_match
        self._mirrors: dict[MirrorKey, NgramIndex] = {}  # least recently updated first

    def __len__(self) -> int:
        return len(self._mirrors)

    def update(self, key: MirrorKey, base: int, tokens: Sequence[int], sampling: DraftSampling | None = None) -> bool:
        mirror = self._mirrors.pop(key, None)
        if base == 0:
            mirror = NgramIndex(min_match=self.min_match, max_match=self.max_match, max_tokens=self.max_tokens)
        elif mirror is None or not mirror.truncate(base):
            return False
        mirror.extend(tokens)
        while len(self._mirrors) >= self.max_sequences:
            del self._mirrors[next(iter(self._mirrors))]
        self._mirrors[key] = mirror
        return True

    def propose(self, keys: Sequence[MirrorKey], num_tokens: int) -> list[list[int]]:
        mirrors = (self._mirrors.get(key) for key in keys)
        return [[] if mirror is None else mirror.propose(num_tokens) for mirror in mirrors]

    def table(self, key: MirrorKey) -> list[DraftBranch]:
        return []

    def length(self, key: MirrorKey) -> int:
        mirror = self._mirrors.get(key)
        return 0 if mirror is None else len(mirror)

    def close(self, key: MirrorKey) -> None:
        self._mirrors.pop(key, None)

    def close_worker(self, decode: WorkerRef) -> int:
        keys = [key for key in self._mirrors if key[0] == decode]
        for key in keys:
            del self._mirrors[key]
        return len(keys)

    def clear(self) -> None:
        self._mirrors.clear()
