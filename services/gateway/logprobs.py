"""Log-probabilities in OpenAI's JSON. Pure.

With 20 alternatives a token's log-probabilities are 2 kB of JSON, nearly all of it the names and bytes of tokens, which are the
same each time. `TokenNames` keeps them encoded, so that a token costs a few microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple, Protocol
from weakref import WeakKeyDictionary, proxy

import msgspec

from services.gateway.choices import ScoredToken

LOWEST_LOGPROB = -9999.0
"""What OpenAI sends for minus infinity, which JSON can't say."""

BUFFER_BYTES = 64 * 1024

_MAX_NAMES = 1 << 18
_encode = msgspec.json.Encoder().encode


class Vocabulary(Protocol):
    """What a tokenizer must tell about single tokens."""

    def token_text(self, token: int, /) -> str: ...

    def token_bytes(self, token: int, /) -> bytes: ...


class _Name(NamedTuple):
    """JSON of a token: its text, and what stands before and behind its log-probability in a chat's entry."""

    text: bytes
    before: bytes
    behind: bytes


class TokenNames:
    """The tokens of one vocabulary, encoded. About 200 bytes for each token that was ever named."""

    _known: ClassVar[WeakKeyDictionary[Vocabulary, TokenNames]] = WeakKeyDictionary()

    @classmethod
    def of(cls, vocabulary: Vocabulary) -> TokenNames:
        """The one instance for `vocabulary`, whatever edge asks."""
        if vocabulary not in cls._known:
            cls._known[vocabulary] = cls(vocabulary)
        return cls._known[vocabulary]

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = proxy(vocabulary)  # or it would never be forgotten
        self._names: dict[int, _Name] = {}

    def __getitem__(self, token: int) -> _Name:
        name = self._names.get(token)
        if name is None:
            text = _encode(self._vocabulary.token_text(token))
            own = _encode(list(self._vocabulary.token_bytes(token)))
            name = _Name(text, b'{"token":' + text + b',"logprob":', b',"bytes":' + own)
            if len(self._names) < _MAX_NAMES:
                self._names[token] = name
        return name


class Sink:
    """Bytes that are only ever added to, in buffers of about BUFFER_BYTES."""

    __slots__ = ("buffers",)

    def __init__(self) -> None:
        self.buffers: list[bytearray] = []

    def add(self, data: bytes) -> None:
        if self.buffers and len(self.buffers[-1]) < BUFFER_BYTES:
            self.buffers[-1] += data
        else:
            self.buffers.append(bytearray(data))


def chat_entries(scored: Sequence[ScoredToken], names: TokenNames, top: int) -> bytes:
    """Entries as chats and responses list them, with commas between them. `top`: alternatives that each token lists."""
    entries: list[bytes] = []
    for item in scored:
        scores = item.scores
        tokens = scores.top_tokens[:top]
        first, *numbers = _numbers([scores.logprob, *scores.top_logprobs[: len(tokens)]])
        _, before, behind = names[item.token]
        others: list[bytes] = []
        for token, number in zip(tokens, numbers, strict=False):
            name = names[token]
            others.append(name.before + number + name.behind)
        listed = b"},".join(others) + (b"}" if others else b"")
        entries.append(b"".join((before, first, behind, b',"top_logprobs":[', listed, b"]}")))
    return b",".join(entries)


class Columns:
    """The log-probabilities of one choice or one chunk, encoded as they come. `top`: alternatives that each token lists.

    A chat's are one list of entries; a completion's are four lists of equal length.
    """

    __slots__ = ("_chat", "_names", "_sinks", "_top")

    def __init__(self, kind: Literal["chat", "completion"], names: TokenNames, top: int) -> None:
        self._chat = kind == "chat"
        self._names = names
        self._top = top
        self._sinks = [Sink() for _ in range(1 if self._chat else 4)]

    def add(self, scored: Sequence[ScoredToken]) -> int:
        """Returns how many bytes it added."""
        if not scored:
            return 0
        added = (chat_entries(scored, self._names, self._top),) if self._chat else self._completion_columns(scored)
        for sink, more in zip(self._sinks, added, strict=True):
            sink.add(b"," + more if sink.buffers else more)
        return sum(map(len, added)) + len(added)

    def body(self) -> list[bytes | bytearray]:
        """The `logprobs` object, in pieces."""
        columns = [sink.buffers for sink in self._sinks]
        if self._chat:
            return [b'{"content":[', *columns[0], b'],"refusal":null}']
        tokens, logprobs, alternatives, offsets = columns
        head, middle = [b'{"tokens":[', *tokens, b'],"token_logprobs":['], [*logprobs, b'],"top_logprobs":']
        top = [b"[", *alternatives, b"]"] if self._top else [b"null"]
        return [*head, *middle, *top, b',"text_offset":[', *offsets, b"]}"]

    def _completion_columns(self, scored: Sequence[ScoredToken]) -> tuple[bytes, bytes, bytes, bytes]:
        names, top = self._names, self._top
        alternatives: list[bytes] = []
        for item in scored if top else ():
            scores = item.scores
            if scores.logprob != scores.logprob:  # the first token of a prompt
                alternatives.append(b"null")
                continue
            tokens = scores.top_tokens[:top]
            first, *numbers = _numbers([scores.logprob, *scores.top_logprobs[: len(tokens)]])
            listed = {names[token].text: number for token, number in zip(tokens, numbers, strict=False)}
            listed.setdefault(names[item.token].text, first)  # always listed, so there may be top + 1
            alternatives.append(b"{" + b",".join([text + b":" + number for text, number in listed.items()]) + b"}")
        return (
            b",".join([names[item.token].text for item in scored]),
            b",".join(_numbers([item.scores.logprob for item in scored])),
            b",".join(alternatives),
            _encode([item.offset for item in scored])[1:-1],
        )


def _numbers(logprobs: list[float]) -> list[bytes]:
    return _encode([max(logprob, LOWEST_LOGPROB) for logprob in logprobs])[1:-1].split(b",")
