"""Decoding JSON of clients, and what they are told when it can't be. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from common.protocol.errors import InvalidParameter
from services.gateway import openai

_T = TypeVar("_T")


def decode(decoder: msgspec.json.Decoder[_T], raw: bytes | Raw, *, place: str = "", first: int = 0) -> _T:
    """:raises InvalidParameter: for whatever is wrong with `raw`, which stands at `place`."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise openai.explain(error, place=place, first=first) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise malformed(error) from error


def malformed(error: Exception) -> InvalidParameter:
    match error:
        case UnicodeDecodeError():
            return InvalidParameter("the body is not valid UTF-8")
        case RecursionError():
            return InvalidParameter("the body is nested too deeply")
        case msgspec.DecodeError():
            return InvalidParameter(f"the body is not valid JSON: {error}")
        case _:
            raise error


def joined(fields: Mapping[str, Any]) -> bytes:
    """An object of members that are JSON already."""
    return b"{" + b",".join([msgspec.json.encode(name) + b":" + bytes(raw) for name, raw in fields.items()]) + b"}"
