"""`penstock up`: nats-server and all five services as supervised processes of this machine.

pull what is missing ─► start everything ─► /ready answers 200 ─► table, "ready"
SIGINT or SIGTERM ─► gateway drains ─► workers drain ─► nats-server ends ─► shared memory swept; again: at once
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import anyio
import msgspec
import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.table import Table

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
from common.runtime.config import load
from common.runtime.nats_server import find_binary

GATEWAY_STAGE, WORKER_STAGE, BUS_STAGE = range(3)
POLL_S = 0.1
REMIND_S = 30.0
BUS_START_TIMEOUT_S = 30.0
DRAIN_MARGIN_S = 5.0
MAX_PAYLOAD_BYTES = 8 << 20
"""Prompts travel as token ids, four bytes each: two million of them."""
MAX_PENDING_BYTES = 256 << 20


def command(
    model: Annotated[str | None, typer.Option(help="The default model's name, a folder, a .gguf file or a hub id.")] = None,
    device: Annotated[str | None, typer.Option(help="auto: GPUs if there are any; cpu, cuda or cuda:N. [auto]")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    quantization: Annotated[str | None, typer.Option(help="auto, none, int8 (CPU) or fp8 (GPU).")] = None,
    kv_cache_dtype: Annotated[str | None, typer.Option(help="auto, or fp8 on a GPU.")] = None,
    gateway: Annotated[int | None, typer.Option(help="Gateways; several share the HTTP port. [1]")] = None,
    prefill: Annotated[int | None, typer.Option(help="Prefill workers. [1; 0 on a machine of one GPU]")] = None,
    decode: Annotated[int | None, typer.Option(help="Decode workers. [1]")] = None,
    draft: Annotated[int | None, typer.Option(help="Draft workers; 0 turns speculation off. [1]")] = None,
    kvstore: Annotated[int | None, typer.Option(help="KV stores; 0 turns the host cache off. [1; 0 with GPUs]")] = None,
    http_host: Annotated[str | None, typer.Option(help="Address of the OpenAI API. [127.0.0.1]")] = None,
    http_port: Annotated[int | None, typer.Option(help="Port of the OpenAI API; 0: any free one. [8000]")] = None,
    nats_url: Annotated[str | None, typer.Option(help="Join this bus instead of starting a nats-server.")] = None,
    nats_port: Annotated[int | None, typer.Option(help="Port of the nats-server; 0: any free one. [4222]")] = None,
    kv_cache_mb: Annotated[int | None, typer.Option(help="KV blocks of each prefill and decode worker, MiB.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of each prefill and decode worker.")] = None,
    shm_dir: Annotated[str | None, typer.Option(help="Folder for shared memory. [/dev/shm]")] = None,
    log_dir: Annotated[str | None, typer.Option(help="Keep the processes' logs here. [a folder of /tmp]")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error. [info]")] = None,
    config: Annotated[str | None, typer.Option(help="TOML file: [common], [up], and a table per service.")] = None,
) -> None:
    """Start everything on this machine; Ctrl-C drains and stops it."""
    given = {name: value for name, value in locals().items() if value is not None and name != "config"}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    config_file = str(Path(config).resolve()) if config else ""
    settings = load(UpConfig, section="up", argv=flags, environ=os.environ, path=Path(config_file) if config_file else None)
    gpus = visible_gpus(settings.device)
    settings = settled(settings, len(gpus))
    ensure(settings.model)

    starts_bus = not settings.nats_url
    if starts_bus and not settings.decode:
        raise ConfigError("--decode 0: nobody would write answers; start at least one, or join workers with --nats-url")
    http = claim_port(settings.http_port, "--http-port", host=settings.http_host)
    if starts_bus:
        hint = "; if a nats-server is there, join it with --nats-url"
        port = claim_port(settings.nats_port, "--nats-port", hint=hint)
        settings = msgspec.structs.replace(settings, nats_url=f"nats://127.0.0.1:{port}")
    settings = msgspec.structs.replace(settings, http_port=http)
    run(lambda: serve(settings, starts_bus=starts_bus, gpus=gpus, config_file=config_file))


async def serve(config: UpConfig, *, starts_bus: bool, gpus: Sequence[int] = (), config_file: str = "") -> None:
    """Run the whole, with engines on `gpus`, until SIGINT or SIGTERM. `config` is `settled`.

    :raises ChildFailed: (in a group) if a process keeps crashing before everything was ready once.
    """
    specs = processes(config, cores=usable_cores(), gpus=gpus, config_file=config_file)
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
    return Command(name=spec.name, argv=python_module(spec.module, spec.arguments), stage=stage)


def _bus_command(config: UpConfig, folder: Path) -> Command:
    """nats-server on the port of `config.nats_url`; supervised like the rest, so that it returns after a crash."""
    settings = folder / "nats-server.conf"
    address = config.nats_url.removeprefix("nats://")
    settings.write_text(f"listen: {address}\nmax_payload: {MAX_PAYLOAD_BYTES}\nmax_pending: {MAX_PENDING_BYTES}\n")
    argv = python_module("common.runtime.parent_death", ["SIGKILL", str(find_binary()), "-c", str(settings)])
    return Command(name="nats-server", argv=argv, stage=BUS_STAGE)


def _sweep(shm_dir: str) -> list[str]:
    from common.transfer.segment_file import sweep

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
