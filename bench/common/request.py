"""What a benchmark's child process is asked to do: JSON on its command line, written by the benchmark that starts it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser that shows `doc`, the module's docstring, as its help."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def request(kind: type[T], module: str, doc: str | None, argv: Sequence[str] | None = None, **choices: Any) -> tuple[Any, T]:
    """The arguments, and the last of them decoded as a `kind`. `choices`: what each argument before it may be.

    :raises SystemExit: after `--help`, or where they are something else.
    """
    accepted = parser(module, doc)
    for name, values in choices.items():
        accepted.add_argument(name, choices=values)
    accepted.add_argument("request", help=f"{kind.__name__} as JSON: " + ", ".join(kind.__annotations__))
    given = accepted.parse_args(argv)
    try:
        return given, msgspec.json.decode(given.request, type=kind)
    except msgspec.MsgspecError as error:
        accepted.error(f"not a {kind.__name__}: {error}")
