"""Decoding JSON of clients, and what they are told when it can't be. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, inspect

from common.protocol.errors import InvalidParameter
from services.gateway import openai

_T = TypeVar("_T")
_shallow = msgspec.json.Decoder(dict[str, Raw])


def decode(decoder: msgspec.json.Decoder[_T], raw: bytes | Raw, *, place: str = "", first: int = 0) -> _T:
    """Decode `raw`, which stands at `place`. 8.0 is taken where an integer is wanted, as JSON Schema and vLLM do.

    :raises InvalidParameter: for whatever is wrong with it.
    """
    try:
        try:
            return decoder.decode(raw)
        except msgspec.ValidationError as error:
            if not openai.is_float_for_integer(error):
                raise
            return decoder.decode(_with_integers(raw, decoder.type))
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


def _with_integers(raw: bytes | Raw, kind: Any) -> bytes:
    """Rewrite floats without a fraction as integers, in `raw` or the members of an object that hold no other numbers."""
    names = _integer_members(kind)
    if names is None:
        return msgspec.json.encode(_wholes.decode(raw))
    members = _shallow.decode(raw) if names else {}
    if not members.keys() & names:
        return bytes(raw)
    return joined({name: _with_integers(value, int) if name in names else value for name, value in members.items()})


def _integer(number: str) -> int | Raw:
    value = float(number)
    return int(value) if value.is_integer() else Raw(number.encode())


_wholes = msgspec.json.Decoder(float_hook=_integer)


@cache
def _integer_members(kind: type) -> frozenset[str] | None:
    """Return which members of a struct hold integers and no other numbers; None where the type itself is of that sort."""
    info = inspect.type_info(kind)
    if isinstance(info, inspect.StructType):
        return frozenset(field.encode_name for field in info.fields if _is_integral(field.type))
    return None if _is_integral(info) else frozenset()


def _is_integral(info: inspect.Type) -> bool:
    kinds = set(map(type, _leaves(info)))
    return inspect.IntType in kinds and not kinds & {inspect.FloatType, inspect.AnyType, inspect.RawType}


def _leaves(info: inspect.Type) -> list[inspect.Type]:
    match info:
        case inspect.UnionType():
            inner = list(info.types)
        case inspect.ListType():
            inner = [info.item_type]
        case inspect.DictType():
            inner = [info.value_type]
        case inspect.StructType():
            inner = [field.type for field in info.fields]
        case _:
            return [info]
    return [leaf for part in inner for leaf in _leaves(part)]
