"""The `penstock` command: one file per sub-command beside this one.

An error that a user can cause ends with one line on stderr that says what to do, and a status that is not zero. Modules
that are slow to import (numpy, nats) are imported by the command that needs them, so that `--help` stays quick.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.markup import escape
from typer.core import TyperGroup

from common.cli import bench, chat, demo, doctor, explain, generate, keys, pull, status, up
from common.cli.console import err, out
from common.cli.up_command import SettingsCommand
from common.protocol.errors import ConfigError, PenstockError
from common.protocol.handles import Role
from common.runtime.config import check_variables


class Commands(TyperGroup):
    """The commands; of a service's name, which is none, it says how a service is started."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if not ctx.resilient_parsing and (service := self._service_meant(args[0])):
            ctx.fail(
                f"No such command {args[0]!r}. `python -m services.{service}` starts that service alone, on a bus that runs; "
                f"`penstock up --{service} 1` starts it with the others."
            )
        return super().resolve_command(ctx, args)

    def _service_meant(self, word: str) -> str:
        """Return the service that a word names, or is nearest to; empty where it is a command, or nearer to one."""
        nearest = difflib.get_close_matches(word, [*self.commands, *get_args(Role)], n=1, cutoff=0.55)
        return "".join(nearest) if word not in self.commands and nearest and nearest[0] not in self.commands else ""


app = typer.Typer(
    cls=Commands,
    name="penstock",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # defaults stand in brackets
)


def _print_version(wanted: bool) -> None:
    if wanted:
        out.print(importlib.metadata.version("penstock"))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Serve open language models from pools of separate prefill, decode, draft and KV-store workers."""
    try:
        Path.cwd()
    except OSError as error:
        raise ConfigError("the working directory is gone: change to another one") from error
    if "doctor" not in sys.argv[1:2] and not {"-h", "--help"} & set(sys.argv):
        check_variables(os.environ, {})


app.command("pull")(pull.command)
app.command("up", cls=SettingsCommand, add_help_option=False)(up.command)
app.command("generate")(generate.command)
app.command("chat")(chat.command)
app.command("status")(status.command)
app.command("explain")(explain.command)
app.command("bench")(bench.command)
app.command("doctor")(doctor.command)
app.command("demo")(demo.command)
app.add_typer(keys.app, name="keys")


def run_command() -> None:
    """Run the command that `sys.argv` names. The status: 1 for an error, 2 for a wrong command line."""
    try:
        app(prog_name="penstock")
    except PenstockError as error:
        err.print(f"[bold red]error[/] {error.code}: ", end="")
        err.print(str(error), markup=False)
        sys.exit(1)
    except OSError as error:  # most often: the disk that stdout goes to is full
        where = f"{error.filename}: " if error.filename else ""
        err.print(f"[bold red]error[/]: {escape(where + (error.strerror or str(error)))}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what could not be written is not tried again at exit
        sys.exit(1)
