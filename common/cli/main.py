"""The `penstock` command: one file per sub-command beside this one.

An error that a user can cause ends with one line on stderr that says what to do, and a status that is not zero. Modules
that are slow to import (numpy, nats) are imported by the command that needs them, so that `--help` stays quick.
"""

from __future__ import annotations

import sys

import typer

from common.cli import bench, chat, demo, doctor, generate, pull, status, up
from common.cli.console import err
from common.protocol.errors import PenstockError

app = typer.Typer(
    name="penstock",
    help="Serve open language models from pools of separate prefill, decode, draft and KV-store workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command("pull")(pull.command)
app.command("up")(up.command)
app.command("generate")(generate.command)
app.command("chat")(chat.command)
app.command("status")(status.command)
app.command("bench")(bench.command)
app.command("doctor")(doctor.command)
app.command("demo")(demo.command)


def main() -> None:
    try:
        app()
    except PenstockError as error:
        err.print(f"[bold red]error[/] {error.code}: ", end="")
        err.print(str(error), markup=False)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
