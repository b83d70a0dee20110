"""Token ids to text, as they arrive: what a stream sends after each token.

A token may end in the middle of a character (an emoji is up to four tokens of a byte-level vocabulary). `Detokenizer` holds
such bytes back until the character is whole, so that every piece it returns is valid text, and all pieces together are what
decoding everything at once gives. Its whole state is at most three bytes.

Per token it costs a list lookup and a share of one call to Python's incremental UTF-8 decoder: well under a microsecond.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.text.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Turns one sequence's tokens into text. Not thread-safe; one per choice.

    Ids past the vocabulary (models pad their embedding) add nothing. One difference to decoding at once exists, for
    SentencePiece vocabularies only: in a run of byte tokens that is not UTF-8, each wrong byte becomes U+FFFD, where the
    `tokenizers` library replaces every byte of the run, also the good ones it would have to take back.
    """

    __slots__ = ("_decoder", "_leading", "_size", "_table")

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, continues: bool = False) -> None:
        """`continues`: the text follows other text (a completion's prompt), so a leading space is kept."""
        self._table = tokenizer.byte_table(skip_special=skip_special)
        self._size = len(self._table)
        self._decoder = _Utf8Decoder(errors="replace")
        self._leading = "keep" if continues else tokenizer.leading

    def push(self, ids: Iterable[int]) -> str:
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
