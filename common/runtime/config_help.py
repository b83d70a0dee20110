"""What `--help` of a service and of `penstock up` prints: every setting with its default, grouped by who declares it."""

from __future__ import annotations

import inspect
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping

import msgspec

from common.runtime.fields import ENV_PREFIX, Field, as_text

FLAG_COLUMNS = 30
MIN_COLUMNS = 80
MAX_COLUMNS = 128


def help_text(fields: Mapping[str, Field], *, section: str) -> str:
    """The settings of one section."""
    lines = [
        f"usage: {_program(section)} [--field VALUE ...]",
        "",
        f"Settings of penstock's {section}: --field VALUE, {ENV_PREFIX}FIELD, or [{section}] of a TOML file.",
        "A switch is --name or --no-name.",
    ]
    groups: dict[str, list[Field]] = {}
    for field in fields.values():
        groups.setdefault(title(field.owner), []).append(field)
    lines += ["", row("--config FILE", f"TOML file with [common] and [{section}]")]
    for heading, members in groups.items():
        lines += group(heading, members, default="(default: {})")
    return "\n".join(lines) + "\n"


def _program(section: str) -> str:
    """The command that was given, as far as Python knows it; the service's own otherwise."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    module = spec.name.removesuffix(".__main__") if spec is not None else f"services.{section}"
    return f"python -m {module}"


def group(heading: str, fields: Iterable[Field], *, default: str) -> list[str]:
    """Lines of one group. `default` is how a default value is written."""
    lines = ["", f"{heading}:"]
    for field in fields:
        shown = "(required)" if field.default is msgspec.NODEFAULT else default.format(as_text(field.default))
        text = "; ".join(filter(None, (field.description, f"one of {', '.join(field.choices)}" if field.choices else "")))
        lines.append(row(field.flag, text if field.default in ("", None) else f"{text} {shown}"))
    return lines


def row(flag: str, text: str) -> str:
    """A flag and what it means, wrapped to the terminal."""
    columns = min(max(shutil.get_terminal_size().columns, MIN_COLUMNS), MAX_COLUMNS)
    indent = " " * (FLAG_COLUMNS + 2)
    wrapped = textwrap.wrap(text, columns - len(indent), break_long_words=False, break_on_hyphens=False) or [""]
    if len(flag) >= FLAG_COLUMNS - 1:
        return "\n".join([f"  {flag}", *(indent + line for line in wrapped)])
    return "\n".join([f"  {flag:{FLAG_COLUMNS}}{wrapped[0]}", *(indent + line for line in wrapped[1:])])


def title(owner: type[msgspec.Struct]) -> str:
    """The first sentence of a Struct's docstring, as a heading."""
    text = inspect.getdoc(owner) or owner.__name__
    return text.split(".")[0].split("\n\n")[0].replace("\n", " ")
