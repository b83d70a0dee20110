"""Token ids to text, as they arrive: what a stream sends after each token.

A token may end in the middle of a character (an emoji is up to four tokens of a byte-level vocabulary). A detokenizer holds
such a part back until the character is whole, so that every piece it returns is valid text, and all pieces together are what
decoding everything at once gives.

`Detokenizer` is for vocabularies whose tokens stand for bytes: its whole state is at most three bytes, and a token costs a
list lookup and a share of one call to Python's incremental UTF-8 decoder, well under a microsecond. `WindowDetokenizer` is for
all others and asks the `tokenizers` library, about ten microseconds a token.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol

from common.text.token_bytes import Leading

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")
_REPLACEMENT = "\ufffd"
_MAX_HELD = 8
"""Tokens that are held back for a character's end: no character has more than four bytes."""
_MAX_SILENT = 64
"""Tokens without text that are kept for what they may say of the next one."""


class Vocabulary(Protocol):
    """What a detokenizer asks of a `tokenizer.Tokenizer`."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    @property
    def leading(self) -> Leading: ...

    @property
    def anchor_id(self) -> int | None: ...

    @property
    def has_byte_table(self) -> bool: ...

    def byte_table(self, *, skip_special: bool, shown: frozenset[int] = frozenset()) -> list[bytes]: ...

    def backend_text(self, ids: list[int], *, skip_special: bool = True) -> str: ...


def detokenizer(
    tokenizer: Vocabulary, *, skip_special: bool = True, continues: bool = False, shown: frozenset[int] = frozenset()
) -> Detokenizer | WindowDetokenizer:
    """Return what turns one sequence's tokens into text. Not thread-safe; one per choice.

    `continues`: the text follows other text (a completion's prompt), so a leading space is kept. Ids past the vocabulary
    (models pad their embedding) add nothing. `shown`: special tokens that `skip_special` does not skip.
    """
    kind = Detokenizer if tokenizer.has_byte_table else WindowDetokenizer
    return kind(tokenizer, skip_special=skip_special, continues=continues, shown=shown)


class Detokenizer:
    """For a tokenizer with a byte table.

    One difference to decoding at once exists, for SentencePiece vocabularies only: in a run of byte tokens that is not UTF-8,
    each wrong byte becomes U+FFFD, where the `tokenizers` library replaces every byte of the run, also the good ones it would
    have to take back.
    """

    __slots__ = ("_decoder", "_leading", "_size", "_table")

    def __init__(
        self,
        tokenizer: Vocabulary,
        *,
        skip_special: bool = True,
        continues: bool = False,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """See `detokenizer`, which knows whether there is a table."""
        self._table = tokenizer.byte_table(skip_special=skip_special, shown=shown)
        self._size = len(self._table)
        self._decoder = _Utf8Decoder(errors="replace")
        self._leading = "keep" if continues else tokenizer.leading

    def push(self, ids: Iterable[int], /) -> str:
        """The text that `ids` complete; may be empty, never ends inside a character."""
        table, size = self._table, self._size
        pieces = [table[index] for index in ids if 0 <= index < size]
        if self._leading != "keep":
            self._strip_leading(pieces)
        return self._decoder.decode(b"".join(pieces))

    def finish(self) -> str:
        """The end of the text: U+FFFD when the last character was cut, else nothing."""
        return self._decoder.decode(b"", final=True)

    def _strip_leading(self, pieces: list[bytes]) -> None:
        """Undoes the space that SentencePiece puts before the first word of a text."""
        for index, piece in enumerate(pieces):
            if piece:
                pieces[index] = piece.removeprefix(b" ") if self._leading == "strip_space" else piece.replace(b" ", b"")
                self._leading = "keep"
                return


class WindowDetokenizer:
    """For any decoder of the `tokenizers` library.

    What a token adds may depend on the tokens before it, so the last ones that added text are decoded again with it, and the
    difference is what is new. That is what the library's own `DecodeStream` does, which has no way to tell the end of a text,
    and raises where the window's text is not what it was.

    [0, context)          their text has been returned
    [context, window)     held: nothing new yet, or their text ends inside a character
    """

    __slots__ = ("_context", "_hidden", "_shown", "_tokenizer", "_window")

    def __init__(
        self,
        tokenizer: Vocabulary,
        *,
        skip_special: bool = True,
        continues: bool = False,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids - shown if skip_special else frozenset[int]()
        self._window = [tokenizer.anchor_id] if continues and tokenizer.anchor_id is not None else []
        self._context = len(self._window)
        self._shown = self._decode(self._window)

    def push(self, ids: Iterable[int], /) -> str:
        """The text that `ids` complete; may be empty, never ends inside a character."""
        pieces: list[str] = []
        for index in ids:
            if not 0 <= index < self._tokenizer.vocab_size or index in self._hidden:
                continue
            self._window.append(index)
            text = self._decode(self._window)
            if text.endswith(_REPLACEMENT) and len(self._window) - self._context <= _MAX_HELD:
                continue
            if len(text) > len(self._shown):
                pieces.append(text[len(self._shown) :])
                del self._window[: self._context]
                self._context = len(self._window)
                self._shown = self._decode(self._window)
            elif len(self._window) - self._context > _MAX_SILENT:
                del self._window[self._context : -_MAX_HELD]
        return "".join(pieces)

    def finish(self) -> str:
        """The end of the text, where the last character was cut."""
        rest = self._decode(self._window)[len(self._shown) :]
        self._window, self._context, self._shown = [], 0, ""
        return rest

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.backend_text(ids, skip_special=False) if ids else ""
