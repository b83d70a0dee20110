"""The command-line side of `penstock up`: its words are settings, read as every service reads its own, and completed in a shell
from the same definitions."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from typing import Any

import msgspec
from typer.core import TyperCommand

from common.cli.model_names import local_models
from common.runtime.fields import Field


class Candidate(msgspec.Struct, frozen=True):
    """One word that a shell may put in place of what is typed, with the attributes that the shells' formats ask for."""

    value: str
    help: str = ""
    type: str = "plain"


class SettingsCommand(TyperCommand):
    """A command without parameters of its own: its words stay in `ctx.args` (see `common.runtime.config.parse_flags`)."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = args
        return []

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        from common.cli.up_settings import offered  # imports the settings of every service

        return complete(ctx.args, incomplete, offered().values())


def complete(words: Sequence[str], incomplete: str, fields: typing.Iterable[Field]) -> list[Candidate]:
    """What `incomplete`, the word after `words`, may become. Nothing where a file or any text is meant: then a shell offers
    files."""
    by_flag = {field.flag: field for field in fields}
    has_value = bool(words) and words[-1] == "="  # bash takes --flag=value for three words
    before = words[-2:-1] if has_value else words[-1:]
    flag = before[0].replace("_", "-") if before else ""
    if flag == "--config" or (flag in by_flag and (has_value or not by_flag[flag].is_bool)):
        return [value for value in _values(by_flag.get(flag), incomplete) if value.value.startswith(incomplete)]
    flags = [Candidate("--config", "TOML file with settings"), Candidate("--help", "show every setting")]
    flags += [Candidate(flag, _plain(field.description)) for flag, field in by_flag.items()]
    if incomplete.startswith("--no"):
        negated = [field for field in by_flag.values() if field.is_bool]
        flags += [Candidate("--no-" + field.flag[2:], "not: " + _plain(field.description)) for field in negated]
    return [flag for flag in flags if flag.value.startswith(incomplete)]


def _values(field: Field | None, incomplete: str) -> list[Candidate]:
    if field is None:
        return []
    if field.choices:
        return [Candidate(choice) for choice in field.choices]
    if field.is_bool:
        return [Candidate("true"), Candidate("false")]
    return [Candidate(name) for name in local_models(incomplete)] if field.name == "model" else []


def _plain(text: str) -> str:
    """Without the brackets that would be taken for colours."""
    return text.replace("[", "(").replace("]", ")")
