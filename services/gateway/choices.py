"""One choice of an answer: tokens in, text out, with stop strings and log-probabilities. Pure.

What a client has seen is never taken back: text that may turn out to begin a stop string is held until the next characters
tell. A stop string ends the choice where its first complete match (the longest, if several end at the same character) begins,
wherever tokens, frames and chunks were cut.

    [0, emitted)        sent
    [emitted, length)   held: the longest suffix that begins a stop string
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Literal, Protocol

import msgspec

from common.protocol.messages import FinishReason, TokenLogprobs
from common.text.output.events import Event
from services.gateway.repeated import Repeated

Finish = FinishReason | Literal["tool_calls"]


class TextSource(Protocol):
    """An incremental detokenizer (`common.text.detokenize`): never splits a character."""

    def push(self, ids: Sequence[int], /) -> str: ...

    def finish(self) -> str: ...


class ScoredToken(msgspec.Struct, frozen=True, array_like=True):
    """A token that was sent, with its log-probabilities. `offset`: characters of the choice's text before it. `run`: which run
    of text it is in, where reasoning and calls stand between them; -1: in none."""

    token: int
    scores: TokenLogprobs
    offset: int
    run: int = 0


class Delta(msgspec.Struct):
    """What one `push` adds to a choice. The delta with `finish` set is the last. `events`: where it is more than text, all of
    it; `text` is empty then. `stopped_by`: the stop string that ended the choice. `prompt`: scored tokens of the prompt, for
    `prompt_logprobs`."""

    text: str
    scored: list[ScoredToken] | None = None
    finish: Finish | None = None
    events: list[Event] | None = None
    stopped_by: str | None = None
    prompt: list[ScoredToken] | None = None


class StopStrings:
    """Finds any of several strings in one pass (Aho and Corasick, 1975): the cost per character does not depend on how many.

    A state is the longest suffix of the text read so far that begins a stop string; `depth` is its length, and `match` the
    length of the longest stop string that ends here, 0 if none does.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.fail = [0]
        self.depth = [0]
        self.match = [0]
        for string in strings:
            state = 0
            for character in string:
                state = self.next[state].get(character) or self._add(state, character)
            self.match[state] = len(string)
        level = list(self.next[0].values())
        while level:
            below: list[int] = []
            for state in level:
                self.match[state] = self.match[state] or self.match[self.fail[state]]
                for character, child in self.next[state].items():
                    self.fail[child] = self.step(self.fail[state], character)
                    below.append(child)
            level = below

    def _add(self, state: int, character: str) -> int:
        child = len(self.next)
        self.next[state][character] = child
        self.next.append({})
        self.fail.append(0)
        self.depth.append(self.depth[state] + 1)
        self.match.append(0)
        return child

    def step(self, state: int, character: str) -> int:
        """The state after `character`."""
        while state and character not in self.next[state]:
            state = self.fail[state]
        return self.next[state].get(character, 0)


class StopSearch:
    """Looks for stop strings in a text that comes in pieces. `held`: what may begin one. `found`: the one that was found."""

    def __init__(self, stops: StopStrings, *, include: bool) -> None:
        self.held = ""
        self.found: str | None = None
        self._stops = stops
        self._include = include
        self._state = 0

    def push(self, text: str) -> str:
        """What can be sent now that `text` follows what is held. After a match, nothing may be pushed any more."""
        stops = self._stops
        held, state = self.held + text, self._state
        for index, character in enumerate(text, start=len(self.held) + 1):
            state = stops.step(state, character)
            if length := stops.match[state]:
                self.found = held[index - length : index]
                self.held = ""
                return held[: index if self._include else index - length]
        self._state = state
        keep = len(held) - stops.depth[state]
        self.held = held[keep:]
        return held[:keep]

    def flush(self) -> str:
        """What is held: the text ends here."""
        text, self.held, self._state = self.held, "", 0
        return text


class ChoiceRules(msgspec.Struct, frozen=True, kw_only=True):
    """What ends the choices of a request, and what of their tokens is told.

    `stop_token_ids`: a token of these that ended the choice counts but is not shown. `min_tokens`: stop strings are looked
    for only behind so many tokens. `scored`: with log-probabilities. `prediction`: what the choice is expected to repeat.
    """

    stops: StopStrings | None = None
    include_stop: bool = False
    min_tokens: int = 0
    stop_token_ids: Collection[int] = ()
    scored: bool = False
    prediction: Sequence[int] = ()


class Choice(ABC):
    """What every choice does with its tokens, whatever they are read as.

    `token_count` counts the tokens up to the end of the choice, shown or not; `reasoning_count` those of reasoning among them.
    `repeated`: those of the prediction.
    """

    def __init__(self, source: TextSource, rules: ChoiceRules) -> None:
        self._source = source
        self._search = None if rules.stops is None else StopSearch(rules.stops, include=rules.include_stop)
        self._min_tokens = rules.min_tokens
        self._stop_token_ids = rules.stop_token_ids
        self._scored = rules.scored
        self._unsent: list[ScoredToken] = []
        self.token_count = 0
        self.reasoning_count = 0
        self.repeated = Repeated(rules.prediction)
        self.finish: Finish | None = None

    def push(
        self, tokens: Sequence[int], scores: Sequence[TokenLogprobs] | None = None, finish: FinishReason | None = None
    ) -> Delta:
        """What `tokens` add. `finish` says that these are the last; a stop string or a last call may end the choice before.

        Once `self.finish` is set, the rest is ignored.
        """
        if self.finish is not None:
            return Delta("", finish=self.finish)
        hidden = finish == "stop" and bool(tokens) and tokens[-1] in self._stop_token_ids
        before = self.token_count
        self._read(tokens[:-1] if hidden else tokens, scores)
        self.repeated.push(tokens[: self.token_count - before])
        if self.finish is None and finish is not None:
            self.token_count += hidden
            self._end(finish)
        return self._delta()

    @abstractmethod
    def _read(self, tokens: Sequence[int], scores: Sequence[TokenLogprobs] | None) -> None:
        """Take tokens that are shown. Sets `finish` where they end the choice."""

    @abstractmethod
    def _end(self, finish: FinishReason) -> None:
        """Deliver what was still held. Sets `finish`."""

    @abstractmethod
    def _delta(self) -> Delta:
        """What has been delivered since the last call."""


class ChoiceText(Choice):
    """The text of one choice. `begins_at`: characters that stand before it."""

    def __init__(self, source: TextSource, rules: ChoiceRules, *, begins_at: int = 0) -> None:
        super().__init__(source, rules)
        self._emitted = begins_at  # characters
        self._pieces: list[str] = []  # emitted, and not in a delta yet
        self._cut = False  # ended by a stop string

    def _read(self, tokens: Sequence[int], scores: Sequence[TokenLogprobs] | None) -> None:
        if self._search is not None or self._scored:
            self._read_each(tokens, scores)
            return
        self.token_count += len(tokens)
        self._emit(self._source.push(tokens))

    def _read_each(self, tokens: Sequence[int], scores: Sequence[TokenLogprobs] | None) -> None:
        for index, token in enumerate(tokens):
            if self._scored and scores is not None and index < len(scores):
                held = 0 if self._search is None else len(self._search.held)
                self._unsent.append(ScoredToken(token, scores[index], self._emitted + held))
            self.token_count += 1
            text = self._source.push((token,))
            if self.token_count <= self._min_tokens:
                self._emit(text)
            else:
                self._release(text)
            if self.finish is not None:
                break

    def _release(self, text: str) -> None:
        """Emit what can be sent now that `text` follows what is held. Sets `finish` at a stop string."""
        search = self._search
        if search is not None:
            text = search.push(text)
            if search.found is not None:
                self.finish = "stop"
                self._cut = True
        self._emit(text)

    def _end(self, finish: FinishReason) -> None:
        """Deliver what was still held, by the detokenizer or here."""
        self._release(self._source.finish())
        if self.finish is None:
            self.finish = finish
            self._emit("" if self._search is None else self._search.flush())

    def _emit(self, text: str) -> None:
        self._emitted += len(text)
        self._pieces.append(text)

    def _delta(self) -> Delta:
        text, self._pieces = "".join(self._pieces), []
        delta = Delta(text, self._take_sent(), self.finish)
        if self._cut and self._search is not None:
            delta.stopped_by = self._search.found
        return delta

    def _take_sent(self) -> list[ScoredToken] | None:
        """The scored tokens whose text has been sent by now; after a stop string those behind the cut never are."""
        if not self._scored:
            return None
        whole = self.finish is not None and not self._cut
        count = len(self._unsent) if whole else sum(token.offset < self._emitted for token in self._unsent)
        taken, self._unsent = self._unsent[:count], self._unsent[count:]
        return taken


def choice_seed(seed: int, choice: int) -> int:
    """The seed of choice number `choice` of a prompt: the request's own for the first, SplitMix64 of both for the others.

    So the first of n choices is what n=1 gives, and each can be had again alone.
    """
    if choice == 0:
        return seed
    mask = 2**64 - 1
    mixed = (seed + choice * 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return (mixed ^ (mixed >> 31)) >> 1
