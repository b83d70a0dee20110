"""One choice of an answer that may hold reasoning and calls of tools: tokens in, events out. Pure.

The twin of `choices.ChoiceText`, for models and requests that need a parser. Stop strings are looked for in the text that the
client sees: never in reasoning, and never in a call.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from common.protocol.messages import FinishReason, TokenLogprobs
from common.text.output.events import CallEnd, Event, Reasoning, Text, merged
from common.text.output.formats import Dialect
from common.text.output.parser import OutputParser
from common.text.output.tools import ToolSet
from services.gateway.choices import Choice, ChoiceRules, Delta, ScoredToken, TextSource


class AnswerFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How a request's answers are read. `tools`: those that may be called. `is_open`: the prompt ended inside reasoning.

    `shown`: special tokens that the parser must see. `max_calls`: after so many, an answer ends; None: any number.
    """

    dialect: Dialect
    tools: ToolSet | None = None
    is_open: bool = False
    shows_reasoning: bool = True
    max_calls: int | None = None
    shown: frozenset[int] = frozenset()

    @property
    def reasons(self) -> bool:
        return self.dialect.reasoning != "none"


class ChoiceEvents(Choice):
    """The events of one choice. `reasoning_count` counts the marks of reasoning too."""

    def __init__(
        self,
        source: TextSource,
        rules: ChoiceRules,
        parser: OutputParser,
        *,
        shows_reasoning: bool = True,
    ) -> None:
        super().__init__(source, rules)
        self._parser = parser
        self._shows_reasoning = shows_reasoning
        self._fed = 0  # characters
        self._settled = 0  # characters of which is known what they are, and that were delivered or dropped
        self._events: list[Event] = []
        self._runs: list[tuple[int, int, int]] = []  # texts whose tokens were not taken: first character, end, run
        self._num_runs = 0
        self._in_text = False

    def _read(self, tokens: Sequence[int], scores: Sequence[TokenLogprobs] | None) -> None:
        for index, token in enumerate(tokens):
            if self._scored and scores is not None and index < len(scores):
                self._unsent.append(ScoredToken(token, scores[index], self._fed))
            self._push_token(token)
            if self.finish is not None:
                break

    def _delta(self) -> Delta:
        events, self._events = merged(self._events), []
        scored = self._take_scored() if self._scored else None
        stopped_by = None if self._search is None else self._search.found
        if not events or (len(events) == 1 and isinstance(events[0], Text)):
            text = "".join(event.text for event in events if isinstance(event, Text))
            return Delta(text, scored, self.finish, stopped_by=stopped_by)
        return Delta("", scored, self.finish, events, stopped_by)

    def _push_token(self, token: int) -> None:
        parser = self._parser
        self.token_count += 1
        reasoned = parser.in_reasoning
        text = self._source.push((token,))
        known = self._fed - parser.num_held
        self._fed += len(text)
        self._deliver(parser.push(text), known)
        self.reasoning_count += reasoned or parser.in_reasoning
        if self.finish is None:
            self._settled = self._fed - parser.num_held - (0 if self._search is None else len(self._search.held))

    def _end(self, finish: FinishReason) -> None:
        """Deliver what was still held, by the detokenizer, the parser or here."""
        text = self._source.finish()
        known = self._fed - self._parser.num_held
        self._fed += len(text)
        self._deliver([*self._parser.push(text), *self._parser.finish()], known)
        if self.finish is None:
            self._flush()
            self._settled = self._fed + 1
            self.finish = "tool_calls" if self._parser.num_calls and finish == "stop" else finish

    def _deliver(self, events: list[Event], known: int) -> None:
        """`events` are what the characters from `known` on have turned out to be."""
        if self._scored:
            self._note_runs(events, known)
        for event in events:
            match event:
                case Text():
                    self._deliver_text(event.text)
                case Reasoning():
                    self._flush()
                    if self._shows_reasoning:
                        self._events.append(event)
                case _:
                    self._flush()
                    self._events.append(event)
                    if isinstance(event, CallEnd) and self._parser.is_full:
                        self.finish = "tool_calls"
                        self._settled = self._fed - self._parser.num_held
            if self.finish is not None:
                return

    def _note_runs(self, events: list[Event], known: int) -> None:
        """Remember which characters are text. Marks between events have characters too, so a text is placed from the side at
        which nothing else stands."""
        end = self._fed - self._parser.num_held
        for index, event in enumerate(events):
            if not isinstance(event, Text):
                self._in_text = self._in_text and isinstance(event, Reasoning) and not self._shows_reasoning
                continue
            self._num_runs += not self._in_text
            self._in_text = True
            begin = known if index == 0 and len(events) > 1 else max(known, end - len(event.text))
            self._runs.append((begin, begin + len(event.text), self._num_runs - 1))

    def _deliver_text(self, text: str) -> None:
        search = self._search
        if search is not None and self.token_count > self._min_tokens:
            size = len(search.held) + len(text)
            text = search.push(text)
            if search.found is not None:
                self.finish = "tool_calls" if self._parser.num_calls else "stop"
                self._settled = self._fed - self._parser.num_held - (size - len(text))
        if text:
            self._events.append(Text(text))

    def _flush(self) -> None:
        """The text before something else ends here."""
        if self._search is not None and (text := self._search.flush()):
            self._events.append(Text(text))

    def _take_scored(self) -> list[ScoredToken]:
        """The scored tokens of what was delivered by now."""
        count = sum(token.offset < self._settled for token in self._unsent)
        taken, self._unsent = self._unsent[:count], self._unsent[count:]
        placed = [msgspec.structs.replace(token, run=self._run_of(token.offset)) for token in taken]
        if taken:
            self._runs = [run for run in self._runs if run[1] > taken[-1].offset]
        return placed

    def _run_of(self, offset: int) -> int:
        return next((run for begin, end, run in self._runs if begin <= offset < end), -1)
