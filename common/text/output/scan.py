"""Reading text that arrives in pieces, as if all of it were there.

A parser is a generator. It reads through the methods of a `Scan`, which are generators too, and yields when it needs text that
has not come yet; `Scan.ended` says that none will. No method's result depends on how the text was cut, so neither does the
parser's. What a method has read is not kept, except between `keep` and `kept`: so a parser can look ahead and, if it was wrong,
deliver what it has read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""Yields when it needs more text; its value is what was read."""

MAX_AHEAD = 64 * 1024
"""Characters that a parser may look ahead for one thing. What is longer is no call."""
_MAX_SPACE = 1024


class Markers:
    """Several literals that are looked for together. Where two begin at the same place, the one named first is found."""

    def __init__(self, *literals: str) -> None:
        self.literals = literals
        self.pattern = re.compile("|".join(map(re.escape, literals)))
        self._firsts = re.compile("[" + re.escape("".join({literal[0] for literal in literals})) + "]")
        self._longest = max(map(len, literals))

    def partial(self, text: str, at: int) -> int:
        """Return where the longest suffix of `text[at:]` begins that a literal may begin with: len(text) if there is none."""
        size = len(text)
        for match in self._firsts.finditer(text, max(at, size - self._longest + 1)):
            suffix = text[match.start() :]
            if any(literal.startswith(suffix) for literal in self.literals):
                return match.start()
        return size


class Scan:
    """The text that has come and was not read yet is `text[at:]`."""

    __slots__ = ("_kept", "_kept_size", "at", "ended", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self._kept: list[str] | None = None
        self._kept_size = 0

    def put(self, text: str) -> None:
        """Add text behind what there is."""
        self.text = self.text[self.at :] + text if self.at < len(self.text) else text
        self.at = 0

    @property
    def num_held(self) -> int:
        """Characters that have come and are neither delivered nor dropped."""
        return len(self.text) - self.at + self._kept_size

    # ── looking ahead ────────────────────────────────────────────────────────────────────────────────────────────────────

    def keep(self, read: str = "") -> None:
        """Keep what is read from now on, behind `read`."""
        self._kept, self._kept_size = [read], len(read)

    def kept(self) -> str:
        """Return what was read since `keep`, which is not kept any more."""
        text = "".join(self._kept or ())
        self._kept, self._kept_size = None, 0
        return text

    def is_cut(self, *literals: str) -> bool:
        """Return whether the text ended where one of `literals` was to come; what has come of it is read."""
        rest = self.text[self.at :]
        if not self.ended or not any(literal.startswith(rest) for literal in literals):
            return False
        self.take(len(self.text))
        return True

    @property
    def looks_too_far(self) -> bool:
        """Whether more was kept than may be looked ahead."""
        return self._kept_size > MAX_AHEAD

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def take(self, end: int) -> str:
        """Read up to index `end` of the text that is there."""
        piece = self.text[self.at : end]
        self.at = end
        if self._kept is not None:
            self._kept.append(piece)
            self._kept_size += len(piece)
        return piece

    def peek(self) -> Reading[str]:
        """Return the next character without reading it; empty at the end."""
        while self.at >= len(self.text):
            if self.ended:
                return ""
            yield
        return self.text[self.at]

    def skip_space(self) -> Reading[str]:
        """Read white space, 1,024 characters at most, and return the next character without reading it; empty at the end."""
        for _ in range(_MAX_SPACE):
            character = yield from self.peek()
            if not character.isspace():
                return character
            self.take(self.at + 1)
        return (yield from self.peek())

    def accept(self, literal: str) -> Reading[bool]:
        """Read `literal` if it comes next. If not, what it has in common with the text is not read either."""
        while True:
            there = self.text[self.at : self.at + len(literal)]
            if there == literal:
                self.take(self.at + len(literal))
                return True
            if self.ended or not literal.startswith(there):
                return False
            yield

    def accept_any(self, literals: Sequence[str]) -> Reading[str]:
        """Read and return that one of `literals` which comes next, the first named of several; empty if none does."""
        for literal in literals:
            if (yield from self.accept(literal)):
                return literal
        return ""

    def match(self, characters: re.Pattern[str], limit: int) -> Reading[str]:
        """Read and return what comes next of `characters`, a pattern for one; at most `limit` of them."""
        pieces: list[str] = []
        size = 0
        while size < limit:
            character = yield from self.peek()
            if not character or not characters.match(character):
                break
            pieces.append(self.take(self.at + 1))
            size += 1
        return "".join(pieces)

    def until(self, markers: Markers, deliver: Callable[[str], None]) -> Reading[str]:
        """Deliver text up to the first of `markers`, which is read and returned; empty if the text ends before."""
        while True:
            found = markers.pattern.search(self.text, self.at)
            if found is not None:
                if found.start() > self.at:
                    deliver(self.take(found.start()))
                self.take(found.end())
                return found[0]
            end = len(self.text) if self.ended else markers.partial(self.text, self.at)
            if end > self.at:
                deliver(self.take(end))
            if self.ended:
                return ""
            yield

    def read_until(self, markers: Markers, limit: int = MAX_AHEAD) -> Reading[tuple[str, str]]:
        """Return the text before the first of `markers`, and the marker, which is empty if there are more than `limit`
        characters before it."""
        pieces: list[str] = []
        room = limit
        while True:
            found = markers.pattern.search(self.text, self.at)
            if found is not None and found.start() - self.at <= room:
                pieces.append(self.take(found.start()))
                self.take(found.end())
                return "".join(pieces), found[0]
            end = len(self.text) if self.ended else markers.partial(self.text, self.at)
            end = min(end, self.at + room)
            room -= end - self.at
            pieces.append(self.take(end))
            if room == 0:
                return "".join(pieces), (yield from self.accept_any(markers.literals))
            if self.ended:
                return "".join(pieces), ""
            yield
