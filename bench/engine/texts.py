"""Real text of several kinds that is on this machine."""

from __future__ import annotations

import os
import pydoc_data.topics
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.common.machine import ROOT
from common.text.tokenizer import Tokenizer

DOCUMENTS = ("README.md", "docs/architecture.md", "docs/operations.md", "CONTRIBUTING.md", "LICENSE", "CHANGELOG.md")
LICENCES = Path("/usr/share/common-licenses")
MAX_CHARACTERS = 1_000_000


def sources() -> dict[str, tuple[str, str]]:
    """By name: where it is from, and the text."""
    standard = Path(os.__file__).parent.glob("[a-z]*.py")
    found = {
        "documents": ("the project's documents", _read(ROOT / name for name in DOCUMENTS)),
        "reference": ("Python's language reference, pydoc_data.topics", "\n\n".join(pydoc_data.topics.topics.values())),
        "code": ("Python's standard library", _read(sorted(standard))),
        "licences": (str(LICENCES), _read(sorted({file.resolve() for file in LICENCES.glob("*")}))),
    }
    return {name: (about, text[:MAX_CHARACTERS]) for name, (about, text) in found.items() if text}


def _read(files: Iterable[Path]) -> str:
    return "\n\n".join(file.read_text(errors="ignore") for file in files if file.is_file())


def spread(tokens: Sequence[int], count: int, length: int) -> list[list[int]]:
    """At most `count` pieces of `length`, evenly over the text and none over another."""
    count = min(count, len(tokens) // length)
    stride = len(tokens) / max(1, count)
    return [list(tokens[int(i * stride) : int(i * stride) + length]) for i in range(count)]


def real_text(tokenizer: Tokenizer, count: int, length: int) -> list[list[int]]:
    """`count` pieces of `length` tokens, as many from one kind as from another, as far as they go."""
    texts = [tokenizer.encode(text) for _, text in sources().values()]
    taken = [spread(tokens, -(-count // len(texts)), length) for tokens in texts]
    return [piece for pieces in taken for piece in pieces][:count]
