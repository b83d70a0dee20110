"""The settings of a configuration Struct: one `Field` each, with its flag, its variable and its description.

The fields of a nested Struct are reached by their own names, as if they were written into the outer one.
"""

from __future__ import annotations

import functools
import typing
from types import UnionType
from typing import Annotated, Any

import msgspec

ENV_PREFIX = "PENSTOCK_"
SECRET = {"secret": True}
"""`Meta(…, extra=SECRET)` marks a setting that may hold a password."""
PER_MODEL = {"per_model": True}
"""`Meta(…, extra=PER_MODEL)` marks a gateway's setting that each of its models may have for itself."""
DERIVED = {"derived": True}
"""`Meta(…, extra=DERIVED)` marks a field that is no setting: what reads the settings fills it in."""


class Field(msgspec.Struct, frozen=True):
    """One setting. `path` leads through nested Structs to it; `owner` is the Struct that declares it.

    `secret`: the value may hold a password, so it is handed on by environment and never on a command line. `per_model`: each
    model of a gateway may have its own.
    """

    path: tuple[str, ...]
    type: Any
    default: Any
    description: str
    owner: type[msgspec.Struct]
    secret: bool = False
    per_model: bool = False

    @property
    def name(self) -> str:
        return self.path[-1]

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def is_bool(self) -> bool:
        return bare(self.type) is bool

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that it may have, if they are a few words; an empty one aside."""
        kind = bare(self.type)
        return tuple(map(str, filter(None, typing.get_args(kind)))) if typing.get_origin(kind) is typing.Literal else ()

    @property
    def is_collection(self) -> bool:
        return typing.get_origin(bare(self.type)) in (list, tuple, set, frozenset)


def fields_of(kind: type[msgspec.Struct], path: tuple[str, ...] = ()) -> dict[str, Field]:
    """Every setting of `kind` by name, in the order of declaration."""
    hints = typing.get_type_hints(kind, include_extras=True)
    found: dict[str, Field] = {}
    for field in msgspec.structs.fields(kind):
        if field.name in derived(kind):
            continue
        hint = hints[field.name]
        inside = bare(hint)
        if isinstance(inside, type) and issubclass(inside, msgspec.Struct):
            inner = fields_of(inside, (*path, field.name))
        else:
            default = field.default
            if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
                default = field.default_factory()
            meta = _meta(hint)
            inner = {
                field.name: Field(
                    (*path, field.name),
                    hint,
                    default,
                    meta.description or "",
                    owner=_owner(kind, field.name),
                    secret=bool((meta.extra or {}).get("secret")),
                    per_model=bool((meta.extra or {}).get("per_model")),
                )
            }
        if twice := found.keys() & inner.keys():
            raise TypeError(f"{kind.__name__} has two settings named {sorted(twice)}")
        found |= inner
    return found


@functools.cache
def derived(kind: type[msgspec.Struct]) -> frozenset[str]:
    """The fields of `kind` that are marked DERIVED."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return frozenset(name for name, hint in hints.items() if _is_derived(hint))


def _is_derived(hint: Any) -> bool:
    """A derived field has no description, so `_meta` does not find its mark."""
    extras = typing.get_args(hint)[1:] if typing.get_origin(hint) is Annotated else ()
    return any(isinstance(extra, msgspec.Meta) and (extra.extra or {}).get("derived") for extra in extras)


def bare(kind: Any) -> Any:
    """Without `Annotated` and `| None`."""
    if typing.get_origin(kind) is Annotated:
        return bare(typing.get_args(kind)[0])
    if typing.get_origin(kind) in (typing.Union, UnionType):
        rest = [member for member in typing.get_args(kind) if member is not type(None)]
        if len(rest) == 1:
            return bare(rest[0])
    return kind


def as_text(value: Any) -> str:
    """A value as it is written in a flag or a variable."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple | set | frozenset):
        return ",".join(as_text(item) for item in value)
    return str(value)


def _meta(hint: Any) -> msgspec.Meta:
    """What the outermost annotation with a description says."""
    if typing.get_origin(hint) is Annotated:
        for extra in typing.get_args(hint)[1:]:
            if isinstance(extra, msgspec.Meta) and extra.description:
                return extra
    return msgspec.Meta()


def _owner(kind: type[msgspec.Struct], name: str) -> type[msgspec.Struct]:
    """The first class that declares a field which `kind` has, or has redefined."""
    for base in kind.__mro__:
        if name in vars(base).get("__annotations__", {}):
            return base
    return kind
