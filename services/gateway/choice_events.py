"""One choice of an answer that may hold reasoning and calls of tools: tokens in, events out. Pure.

The twin of `choices.ChoiceText`, for models and requests that need a parser. Stop strings are looked for in the text that the
client sees: never in reasoning, and never in a call.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from common.protocol.messages import FinishReason, TokenLogprobs
from common.text.output.events import CallEnd, Event, Reasoning, Text, merged
from common.text.output.formats import Dialect
from common.text.output.parser import OutputParser
from common.text.output.tools import ToolSet
from services.gateway.choices import Choice, Delta, ScoredToken, StopStrings, TextSource


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
        parser: OutputParser,
        *,
        shows_reasoning: bool = True,
        stops: StopStrings | None = None,
        include_stop: bool = False,
        min_tokens: int = 0,
        stop_token_ids: Collection[int] = (),
        scored: bool = False,
    ) -> None:
        super().__init__(
            source,
            stops=stops,
            include_stop=include_stop,
            min_tokens=min_tokens,
            stop_token_ids=stop_token_ids,
            scored=scored,
        )
        self._parser = parser
        self._shows_reasoning = shows_reasoning
        self._fed = 0  # characters
        self._settled = 0  # characters of which is known what they are, and that were delivered or dropped
        self._events: list[Event] = []

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
        self._fed += len(text)
        self._deliver(parser.push(text))
        self.reasoning_count += reasoned or parser.in_reasoning
        if self.finish is None:
            self._settled = self._fed - parser.num_held - (0 if self._search is None else len(self._search.held))

    def _end(self, finish: FinishReason) -> None:
        """Deliver what was still held, by the detokenizer, the parser or here."""
        text = self._source.finish()
        self._fed += len(text)
        self._deliver([*self._parser.push(text), *self._parser.finish()])
        if self.finish is None:
            self._flush()
            self._settled = self._fed + 1
            self.finish = "tool_calls" if self._parser.num_calls and finish == "stop" else finish

    def _deliver(self, events: list[Event]) -> None:
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
        return taken
