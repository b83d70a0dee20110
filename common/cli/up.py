"""`penstock up`: nats-server and all five services as supervised processes of this machine.

pull what is missing ─► start everything ─► /ready answers 200 ─► table, "ready"
SIGINT or SIGTERM ─► gateway drains ─► workers drain ─► nats-server ends ─► shared memory swept; again: at once
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import anyio
import click
import msgspec
import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table
from typer.core import TyperCommand

from common.cli import up_settings
from common.cli.client import connected, decode_presence
from common.cli.console import err, out, run, usable_cores
from common.cli.fleet import ProcessSpec, UpConfig, processes, settled
from common.cli.gpus import visible_gpus
from common.cli.net import claim_port, http_status
from common.cli.pull import ensure
from common.cli.supervisor import Command, Supervisor, python_module
from common.protocol import subjects
from common.protocol.errors import ConfigError
from common.runtime.bus import BusMessage
from common.runtime.nats_server import find_binary

GATEWAY_STAGE, WORKER_STAGE, BUS_STAGE = range(3)
POLL_S = 0.1
REMIND_S = 30.0
BUS_START_TIMEOUT_S = 30.0
DRAIN_MARGIN_S = 5.0
MAX_PAYLOAD_BYTES = 8 << 20
"""Prompts travel as token ids, four bytes each: two million of them."""
MAX_PENDING_BYTES = 256 << 20


class RawCommand(TyperCommand):
    """A command whose words are settings, parsed as every service parses its own (see `common.runtime.config`)."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.args = args
        return []


def command(ctx: typer.Context) -> None:
    """Start everything on this machine; Ctrl-C drains and stops it."""
    asked = up_settings.read(ctx.args, os.environ)
    if asked is None:
        sys.stdout.write(up_settings.help_text())
        return
    gpus = visible_gpus(asked.config.device)
    config = settled(asked.config, len(gpus))
    ensure(config.model)

    starts_bus = not config.nats_url
    if starts_bus and not config.decode:
        raise ConfigError("--decode 0: nobody would write answers; start at least one, or join workers with --nats-url")
    http = claim_port(config.http_port, "--http-port", host=config.http_host)
    if starts_bus:
        hint = "; if a nats-server is there, join it with --nats-url"
        port = claim_port(config.nats_port, "--nats-port", hint=hint)
        config = msgspec.structs.replace(config, nats_url=f"nats://127.0.0.1:{port}")
    config = msgspec.structs.replace(config, http_port=http)
    specs = processes(
        config,
        cores=usable_cores(),
        gpus=gpus,
        passed=asked.passed,
        services=asked.services,
        config_file=asked.config_file,
    )
    run(lambda: serve(config, specs, starts_bus=starts_bus))


async def serve(config: UpConfig, specs: Sequence[ProcessSpec], *, starts_bus: bool) -> None:
    """Run `specs`, and a bus for them if `starts_bus`, until SIGINT or SIGTERM. Addresses in `config` are real ones by now.

    :raises ChildFailed: (in a group) if a process keeps crashing before everything was ready once.
    """
    if not starts_bus:
        async with connected(config.nats_url, "up", advice="start one there, or leave --nats-url out: then `up` starts one"):
            pass  # better said now than by five processes that wait
    _sweep(config.shm_dir)
    log_dir = _log_dir(config)
    commands = [_command(spec) for spec in specs]
    if starts_bus:
        commands.insert(0, _bus_command(config, log_dir))
    supervisor = Supervisor(
        commands,
        log_dir=log_dir,
        report=lambda line: err.print(line, markup=False, style="yellow"),
        drain_timeout_s=config.drain_timeout_s + DRAIN_MARGIN_S,
    )
    succeeded = False
    try:
        async with anyio.create_task_group() as watchers:
            body = anyio.CancelScope()
            await watchers.start(_watch_signals, body, supervisor)
            with body:
                async with supervisor.running():
                    await _wait_ready(config, specs)
                    supervisor.started_once = True
                    _announce(config, specs, supervisor, log_dir)
                    await anyio.sleep_forever()
            watchers.cancel_scope.cancel()
        succeeded = True
    finally:
        swept = _sweep(config.shm_dir)
        if swept:
            err.print(f"swept {len(swept)} shared-memory segments of workers that did not end by themselves")
        if supervisor.crashed or not succeeded:
            err.print(f"logs: {log_dir}")
        elif not config.log_dir:
            shutil.rmtree(log_dir, ignore_errors=True)
    err.print("stopped")


async def _watch_signals(
    body: anyio.CancelScope, supervisor: Supervisor, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED
) -> None:
    """The first signal ends the body, which drains; the second one kills."""
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        task_status.started()
        async for _ in signals:
            if body.cancel_called:
                err.print("killing everything")
                supervisor.kill()
            else:
                err.print("draining; once more to stop at once")
                body.cancel()


def _log_dir(config: UpConfig) -> Path:
    if not config.log_dir:
        return Path(tempfile.mkdtemp(prefix="penstock-logs-"))
    folder = Path(config.log_dir).expanduser().resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"can't write logs to {folder}: {error.strerror}", param="log_dir") from error
    return folder


def _command(spec: ProcessSpec) -> Command:
    stage = GATEWAY_STAGE if spec.role == "gateway" else WORKER_STAGE
    argv = python_module(spec.module, spec.arguments)
    return Command(name=spec.name, argv=argv, environment=spec.environment, stage=stage)


def _bus_command(config: UpConfig, folder: Path) -> Command:
    """nats-server on the port of `config.nats_url`; supervised like the rest, so that it returns after a crash."""
    settings = folder / "nats-server.conf"
    address = config.nats_url.removeprefix("nats://")
    settings.write_text(f"listen: {address}\nmax_payload: {MAX_PAYLOAD_BYTES}\nmax_pending: {MAX_PENDING_BYTES}\n")
    argv = python_module("common.runtime.parent_death", ["SIGKILL", str(find_binary()), "-c", str(settings)])
    return Command(name="nats-server", argv=argv, stage=BUS_STAGE)


def _sweep(shm_dir: str) -> list[str]:
    from common.transfer.shm import sweep

    if not Path(shm_dir).is_dir():
        raise ConfigError(f"{shm_dir} is no folder: make it (a tmpfs is best) or choose another with --shm-dir")
    return sweep(shm_dir)


async def _wait_ready(config: UpConfig, specs: Sequence[ProcessSpec]) -> None:
    """Returns once the gateway's canary went through. Shows how much has been loaded."""
    ready: set[str] = set()
    unready: set[str] = set()
    loaded: dict[str, float] = {}

    def heard(message: BusMessage) -> None:
        presence = decode_presence(message)
        if presence is not None:
            (ready if presence.state == "ready" else unready).add(presence.worker.id)
            loaded[presence.worker.id] = 0.9 * presence.loaded if presence.state == "starting" else 1.0

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task(f"loading {config.model}", total=len(specs))
        async with connected(config.nats_url, "up", timeout_s=BUS_START_TIMEOUT_S) as bus:
            await bus.subscribe(subjects.any_presence(), heard)
            waited_s = 0.0
            while (
                sum(name.startswith("gateway") for name in ready) < config.gateway
                or await http_status(config.http_port, "/ready", host=_reachable(config.http_host)) != 200
            ):
                bar.update(task, completed=min(sum(loaded.values()), len(specs)))
                await anyio.sleep(POLL_S)
                waited_s += POLL_S
                if waited_s >= REMIND_S:
                    waited_s = 0.0
                    waiting = ", ".join(sorted(unready - ready)) or "the gateway's canary"
                    err.print(f"still waiting for {waiting}")


def _reachable(host: str) -> str:
    """An address under which this machine reaches a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _announce(config: UpConfig, specs: Sequence[ProcessSpec], supervisor: Supervisor, log_dir: Path) -> None:
    threads = {spec.name: str(spec.threads) for spec in specs if spec.threads}
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("process", "pid", "threads"):
        shown.add_column(title, justify="left" if title == "process" else "right")
    for child in supervisor.children:
        shown.add_row(child.command.name, str(child.pid or "-"), threads.get(child.command.name, "-"))
    out.print(shown)
    out.print(f"\nOpenAI API  http://{_reachable(config.http_host)}:{config.http_port}/v1")
    out.print(f"NATS        {config.nats_url}, subject {subjects.any_chat()}")
    out.print(f"logs        {log_dir}")
    out.print("[bold green]ready[/]")
