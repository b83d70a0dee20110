"""Errors about the shared request, in a view's names for arguments. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from common.protocol.errors import RequestError


class Term(NamedTuple):
    """`pattern` in an error's text and argument becomes `name`."""

    pattern: re.Pattern[str]
    name: str


def terms(*pairs: tuple[str, str]) -> tuple[Term, ...]:
    return tuple(Term(re.compile(pattern), name) for pattern, name in pairs)


def renamed(text: str, names: Sequence[Term]) -> str:
    """Return `text` with other names."""
    for pattern, name in names:
        text = pattern.sub(name, text)
    return text


def in_terms(error: RequestError, names: Sequence[Term]) -> RequestError:
    """Return `error` with other names; one that is about no argument stays as it is."""
    if error.param is None:
        return error
    message, param = renamed(str(error), names), renamed(error.param, names)
    return error if (message, param) == (str(error), error.param) else type(error)(message, param=param)
