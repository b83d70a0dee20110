"""Writes docs/protocol.md from the definitions beside this file: `python -m common.protocol.document > docs/protocol.md`.

A test compares the two, so that the page can't fall behind the code.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
from types import ModuleType
from typing import Literal, get_args, get_origin

import msgspec

from common.protocol import (
    cache_messages,
    capacity,
    draft_messages,
    errors,
    explain_messages,
    handles,
    headers,
    kv_events,
    kv_messages,
    messages,
    presence,
    stream_messages,
    subjects,
    transfer_messages,
)

_INTRODUCTION = """\
# The protocol

This page is generated from `common/protocol/` by `make docs`; edit the docstrings there, not this page.

Clients speak JSON in OpenAI's shapes, or Anthropic's. Everything between services is msgpack: each message is a map with its
`type` first, and the small structures marked *array* are arrays in field order. A field is only ever added, with a default: a
reader skips what it does not know and fills in what it was not sent.
"""


def document() -> str:
    """The page, as Markdown."""
    parts = [
        _INTRODUCTION,
        "## Subjects\n",
        _code(_docstring(subjects)),
        "## Headers of the public subjects\n",
        _docstring(headers) + "\n",
        _constants(headers),
        "## Errors and their codes\n",
        _code(_docstring(errors)),
        "## Who a worker is, and what a handle says\n",
        _docstring(handles) + "\n",
        *map(_struct, _structs(handles)),
        "## Messages\n",
        _docstring(messages) + "\n",
        _aliases(messages),
        *map(_struct, _structs(messages)),
        "## Who is there\n",
        _docstring(presence) + "\n",
        *map(_struct, _structs(presence)),
        *map(_struct, _structs(capacity)),
        "## Messages of the kvstore\n",
        _docstring(cache_messages) + "\n",
        *map(_struct, _structs(cache_messages)),
        "## KV of prompts that are still computed\n",
        _docstring(stream_messages) + "\n",
        *map(_struct, _structs(stream_messages)),
        "## KV between hosts\n",
        _docstring(transfer_messages) + "\n",
        *map(_struct, _structs(transfer_messages)),
        "## Messages of the draft pool\n",
        _docstring(draft_messages) + "\n",
        *map(_struct, _structs(draft_messages)),
        "## What is told of prefix caches\n",
        _docstring(kv_events) + "\n",
        *map(_struct, _structs(kv_events)),
        "## What heartbeats say of KV\n",
        _docstring(kv_messages) + "\n",
        *map(_struct, _structs(kv_messages)),
        "## What is told of a request\n",
        _docstring(explain_messages) + "\n",
        *map(_struct, _structs(explain_messages)),
    ]
    return "\n".join(parts)


def _docstring(module: ModuleType) -> str:
    return inspect.getdoc(module) or ""


def _code(text: str) -> str:
    return f"```text\n{text}\n```\n"


def _structs(module: ModuleType) -> list[type[msgspec.Struct]]:
    """The structures that `module` itself defines, in the order of the file."""
    return [
        member
        for member in vars(module).values()
        if inspect.isclass(member) and issubclass(member, msgspec.Struct) and member.__module__ == module.__name__
    ]


def _aliases(module: ModuleType) -> str:
    """The values behind each literal type that fields of `module` name."""
    literals = {name: get_args(member) for name, member in vars(module).items() if get_origin(member) is Literal}
    literals["Role"] = get_args(handles.Role)
    return "\n".join(
        f"`{name}` is one of {', '.join(f'`{value}`' for value in values)}.\n" for name, values in literals.items()
    )


def _struct(struct: type[msgspec.Struct]) -> str:
    config = struct.__struct_config__
    form = " *(array)*" if config.array_like else ""
    lines = [f"### {struct.__name__}{form}\n", (inspect.getdoc(struct) or "") + "\n"]
    fields = msgspec.structs.fields(struct)
    if fields:
        lines += ["| field | type | default |", "|---|---|---|"]
        annotations = {name: text for kind in reversed(struct.__mro__) for name, text in _annotations(kind).items()}
        lines += [f"| `{field.name}` | {_cell(annotations[field.name])} | {_default(field)} |" for field in fields]
    return "\n".join(lines) + "\n"


def _annotations(kind: type) -> dict[str, str]:
    """Annotations as they are written in the file."""
    return {name: str(text) for name, text in inspect.get_annotations(kind).items()}


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default is not msgspec.NODEFAULT:
        return _cell(repr(field.default))
    if field.default_factory is not msgspec.NODEFAULT:
        return _cell(repr(field.default_factory()))
    return "required"


def _cell(text: str) -> str:
    return "`" + text.replace("|", "\\|") + "`"


def _constants(module: ModuleType) -> str:
    """Each constant of `module` with the docstring under it."""
    body = ast.parse(inspect.getsource(module)).body
    rows = ["| header | meaning |", "|---|---|"]
    for statement, following in itertools.pairwise(body):
        if (
            isinstance(statement, ast.Assign)
            and isinstance(statement.value, ast.Constant)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            meaning = " ".join(str(following.value.value).split())
            rows.append(f"| `{statement.value.value}` | {meaning} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.stdout.write(document())
