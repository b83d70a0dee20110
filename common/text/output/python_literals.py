"""Values as Python writes them, turned into JSON text: `{'a': True}` is `{"a": true}`.

Of Python's literals: strings, numbers, True, False, None, lists, tuples, and dicts with strings as keys. JSON's words as well.
"""

from __future__ import annotations

import re

from common.text.output.json_text import is_json, quoted

MAX_CHARS = 64 * 1024
"""Longer texts are taken for no literal: a megabyte would take the event loop seconds."""
_MAX_DEPTH = 32
_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"[A-Za-z]+")
_NUMBER = re.compile(r"[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_STRING = {
    '"': re.compile(r'"((?:[^"\\\n]|\\.)*)"', re.DOTALL),
    "'": re.compile(r"'((?:[^'\\\n]|\\.)*)'", re.DOTALL),
}
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_PLAIN = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"', "0": "\0", "/": "/", "\n": ""}
_WORDS = {"True": "true", "true": "true", "False": "false", "false": "false", "None": "null", "null": "null"}
_CLOSING = {"[": "]", "(": ")", "{": "}"}


def to_json(text: str) -> str | None:
    """Return the JSON text of the value that `text` is; None if it is none, or longer than `MAX_CHARS`."""
    if len(text) > MAX_CHARS:
        return None
    try:
        value, end = _value(text, _SPACE.match(text).end(), 0)  # type: ignore[union-attr]
    except (ValueError, OverflowError):
        return None
    return value if text[end:].strip() == "" else None


def _value(text: str, at: int, depth: int) -> tuple[str, int]:
    """Return the JSON of the value at `at`, and where it ends.

    :raises ValueError: if there is none.
    """
    first = text[at : at + 1]
    if first in _STRING:
        return _string(text, at, first)
    if first in _CLOSING:
        return _container(text, at, first, depth)
    if word := _WORD.match(text, at):
        if word[0] not in _WORDS:
            raise ValueError(word[0])
        return _WORDS[word[0]], word.end()
    number = _NUMBER.match(text, at)
    if number is None:
        raise ValueError("no value")
    return _number(number[0].replace("_", "").removeprefix("+")), number.end()


def _number(text: str) -> str:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(text)
    return text if is_json(text) else repr(value)


def _string(text: str, at: int, quote: str) -> tuple[str, int]:
    found = _STRING[quote].match(text, at)
    if found is None:
        raise ValueError("a string without an end")
    value = _ESCAPE.sub(_unescaped, found[1])
    # two escapes of a surrogate pair are one character, a lone one is none
    return quoted(value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")), found.end()


def _unescaped(match: re.Match[str]) -> str:
    code = match[1] or match[2] or match[3]
    if code:
        return chr(int(code, 16))
    return _PLAIN.get(match[4], match[0])


def _container(text: str, at: int, opening: str, depth: int) -> tuple[str, int]:
    if depth >= _MAX_DEPTH:
        raise ValueError("too deep")
    closing, items = _CLOSING[opening], list[str]()
    at = _space(text, at + 1)
    while text[at : at + 1] != closing:
        item, at = _value(text, at, depth + 1)
        at = _space(text, at)
        if opening == "{":
            if not item.startswith('"') or text[at : at + 1] != ":":
                raise ValueError("no key")
            value, at = _value(text, _space(text, at + 1), depth + 1)
            item, at = f"{item}: {value}", _space(text, at)
        items.append(item)
        if text[at : at + 1] == ",":
            at = _space(text, at + 1)
        elif text[at : at + 1] != closing:
            raise ValueError("no end")
    joined = ", ".join(items)
    return (f"{{{joined}}}" if opening == "{" else f"[{joined}]"), at + 1


def _space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return at if match is None else match.end()
