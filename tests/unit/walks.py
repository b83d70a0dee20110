"""Random walks through a grammar, as a model with no opinion takes them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher

from common.text.tokenizer import Tokenizer

HINT_CHANCE = 0.3


class Astray(Exception):
    """A walk came to a state in which no token is allowed, or an allowed token was refused."""


def walk(
    matcher: LLMatcher,
    tokenizer: Tokenizer,
    dice: random.Random,
    *,
    hints: Sequence[str] = (),
    endings: Sequence[str] = (),
    max_tokens: int = 300,
    end_chance: float = 0.5,
) -> str | None:
    """Return the text of a walk that came to its end, None for one that did not within three times `max_tokens`.

    `hints` and `endings`: texts that are tried now and then where they are allowed, since chance alone would hardly ever write
    a whole mark; after `max_tokens`, the endings are always tried first.

    :raises Astray: if the masks lead nowhere.
    """
    ends = [tokenizer.encode(ending, parse_special=True) for ending in endings]
    pieces = ends + [tokenizer.encode(hint, parse_special=True) for hint in hints]
    output: list[int] = []
    while len(output) < 3 * max_tokens:
        is_late = len(output) >= max_tokens
        if matcher.is_accepting() and (is_late or dice.random() < end_chance):
            return tokenizer.decode(output, skip_special=False)
        chosen = _hint(matcher, ends if is_late else pieces, dice) if is_late or dice.random() < HINT_CHANCE else []
        if not chosen:
            allowed = _allowed(matcher, tokenizer)
            if allowed.size == 0:
                if matcher.is_accepting():
                    return tokenizer.decode(output, skip_special=False)
                raise Astray(f"{tokenizer.decode(output, skip_special=False)!r}: {matcher.get_error()}")
            chosen = [int(dice.choice(allowed))]
        if not matcher.consume_tokens(chosen):
            raise Astray(f"{tokenizer.decode([*output, *chosen], skip_special=False)!r}: {matcher.get_error()}")
        output += chosen
    return None


def _hint(matcher: LLMatcher, pieces: list[list[int]], dice: random.Random) -> list[int]:
    for piece in dice.sample(pieces, len(pieces)):
        if matcher.validate_tokens(piece) == len(piece):
            return piece
    return []


def _allowed(matcher: LLMatcher, tokenizer: Tokenizer) -> np.ndarray:
    """The tokens that may come next, but for those that end the answer."""
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[: tokenizer.vocab_size]
    bits[tokenizer.eos_ids] = 0
    return np.flatnonzero(bits)
