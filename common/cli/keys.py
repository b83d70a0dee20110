"""`penstock keys`: API keys of tenants, for the file that gateways are given with `--api-keys`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from common.cli.console import err, out
from common.protocol.errors import ConfigError
from common.runtime import api_keys

PRIVATE_FILE = 0o600

app = typer.Typer(no_args_is_help=True, help="Make API keys of tenants.", rich_markup_mode=None)


@app.callback()
def _group() -> None:
    """Make API keys of tenants."""


@app.command()
def add(
    tenant: Annotated[str, typer.Argument(help="Whose key it is: letters, digits, - and _.")],
    file: Annotated[Path | None, typer.Option("--file", help="The file of --api-keys to add it to.")] = None,
    note: Annotated[str, typer.Option("--note", help="What to remember about the key.")] = "",
) -> None:
    """Draw a key and print it: nothing else has it. Its digest goes to the file, or without one to stderr."""
    key = api_keys.new_key()
    if file is None:
        lines = api_keys.lines_for(key, tenant, known=[tenant], note=note)
        err.print(lines.strip(), markup=False, highlight=False, soft_wrap=True)
    else:
        append(file, key, tenant, note)
        err.print(f"added to {file}: gateways take it within seconds", markup=False, soft_wrap=True)
    out.print(key, markup=False, highlight=False, soft_wrap=True)


@app.command("id")
def show_id(tenants: Annotated[list[str], typer.Argument(metavar="TENANT…", help="Names of tenants.")]) -> None:
    """Print what kvstores' metrics call a tenant: they don't know names."""
    from common.cache.prefix import owner_of  # imports NumPy, which no other command needs

    for tenant in tenants:
        out.print(f"{owner_of(api_keys.check_tenant(tenant)).hex()} {tenant}", markup=False, highlight=False, soft_wrap=True)


def append(path: Path, key: str, tenant: str, note: str = "") -> None:
    """Put `key` into a key file, in one step: a gateway sees it as it was or with the key. A new file is only its owner's.

    :raises ConfigError: there is another kind of file, or it can't be written.
    """
    try:
        text = path.read_text(encoding="utf-8-sig") if path.exists() else ""
        known = api_keys.parse(text, str(path)).tenants if text.strip() else {}
        added = text + api_keys.lines_for(key, tenant, known=known, note=note)
        api_keys.parse(added, str(path))
        mode = path.stat().st_mode & 0o777 if path.exists() else PRIVATE_FILE
        new = path.with_name(f".{path.name}.{os.getpid()}")
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, PRIVATE_FILE), "w") as file:
            os.fchmod(file.fileno(), mode)
            file.write(added.lstrip("\n"))
        new.replace(path)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text", param="api_keys") from error
    except OSError as error:
        raise ConfigError(f"can't write {path}: {error.strerror}", param="api_keys") from error
