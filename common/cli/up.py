"""`penstock up`: nats-server and the services as supervised processes of this machine.

settings ─► pull what is missing ─► can it be served? ─► start everything ─► /ready answers 200 ─► table, "ready"
SIGINT, SIGTERM or SIGHUP ─► gateway drains ─► workers drain ─► nats-server ends ─► shared memory swept; again: at once
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import anyio
import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from common.cli import own_bus, owned_folder, up_settings
from common.cli.client import connected
from common.cli.console import err, out, run
from common.cli.fleet import ModelFleet, ProcessSpec, check_disk, processes, settled
from common.cli.gpus import visible_gpus
from common.cli.net import claimed_port, reachable
from common.cli.pull import ensure
from common.cli.starting import Starting, wait_ready
from common.cli.supervisor import Command, Supervisor
from common.cli.up_config import UpConfig
from common.cli.up_settings import UpSettings
from common.engine.settings import check_objectives
from common.models.naming import expanded
from common.ops.kept import not_kept
from common.protocol.errors import ConfigError
from common.protocol.handles import Role
from common.protocol.messages import ServedModel
from common.runtime.cores import usable_cores
from common.runtime.http_access import is_loopback
from common.runtime.nats_server import find_binary
from common.runtime.nats_url import redacted
from common.runtime.python_module import python_module
from common.transfer.store_capacity import store_capacity_bytes

GATEWAY_STAGE, WORKER_STAGE, BUS_STAGE = range(3)
LOG_PREFIX = "penstock-logs-"
LOGS_KEPT_S = 7 * 86400.0
"""Seconds for which the logs of an `up` that crashed or was killed are kept in /tmp."""


def command(ctx: typer.Context) -> None:
    """Start everything on this machine; Ctrl-C drains and stops it."""
    asked = up_settings.read(ctx.args, os.environ)
    if asked is None:
        sys.stdout.write(up_settings.help_text())
        return
    asked = _sized(asked)
    starts_bus = not asked.config.nats_url
    for fleet in asked.fleets:
        if starts_bus and not fleet.config.decode:
            of_it = f" of {fleet.config.served_name}" if len(asked.fleets) > 1 else ""
            raise ConfigError(
                f"--decode 0: nobody would write answers{of_it}; start at least one, or join workers with --nats-url"
            )
    own_bus.check_login(asked.config)
    _ = getattr(asked.services["gateway"], "key", "")  # a file that can't be read is said now
    check_disk(asked.config, asked.services)
    for fleet in asked.fleets:
        check_objectives(fleet.services.get("decode"))
    asked, warnings = _checked(asked)
    config = asked.config
    with contextlib.ExitStack() as stack:
        http = stack.enter_context(claimed_port(config.http_port, "--http-port", host=config.http_host))
        credentials: Path | None = None
        if starts_bus:
            hint = "; if a nats-server is there, join it with --nats-url"
            port = stack.enter_context(claimed_port(config.nats_port, "--nats-port", hint=hint))
            config = msgspec.structs.replace(config, nats_url=f"nats://127.0.0.1:{port}")
            prefixes = getattr(asked.services["gateway"], "reply_prefixes", ())
            tenants = own_bus.tenants_of(getattr(asked.services["gateway"], "api_keys", ""))
            data = stack.enter_context(own_bus.data_folder(config, port))
            bus = own_bus.prepared(port, clients=config.nats_clients, reply_prefixes=prefixes, tenants=tenants, data=data)
            credentials = stack.enter_context(bus)
            config = msgspec.structs.replace(config, data_dir=str(data or ""))
            if not config.zero_retention:
                warnings += own_bus.lack_of_room(data or credentials, getattr(asked.services["gateway"], "batch_storage_mb", 0))
        config = msgspec.structs.replace(config, http_port=http)
        specs = processes(
            config,
            cores=usable_cores(),
            passed=asked.passed,
            services=asked.services,
            fleets=asked.fleets,
            config_file=asked.config_file,
            run_id=os.urandom(3).hex(),
            credentials=credentials,
        )
        for warning in [*_open_api(asked), *warnings]:
            err.print(f"[bold yellow]warning[/] {warning}")
        served = [ServedModel(fleet.config.served_name, list(fleet.aliases)) for fleet in asked.fleets]
        log_dir = stack.enter_context(_log_dir(config))
        run(lambda: serve(config, specs, served, log_dir=log_dir, credentials=credentials))


def _sized(asked: UpSettings) -> UpSettings:
    """The same with the size of each pool, and with each model's GPUs. Models share the machine's cores and GPUs.

    :raises ConfigError: a device that is not here.
    """
    number, cores = len(asked.fleets), usable_cores()
    fleets: list[ModelFleet] = []
    for fleet in asked.fleets:
        gpus = visible_gpus(fleet.config.device)
        config = settled(fleet.config, len(gpus) if number == 1 else len(gpus) // number, cores // number)
        fleets.append(msgspec.structs.replace(fleet, config=config, gpus=gpus))
    config = settled(asked.config, max(len(fleet.gpus) for fleet in fleets), cores)
    return msgspec.structs.replace(asked, config=config, fleets=tuple(fleets))


def _checked(asked: UpSettings) -> tuple[UpSettings, list[str]]:
    """Check that the models can be served so. Return the settings with the contexts that the KV pools hold, and warnings.

    :raises UnknownModel, ConfigError: why one can't be served.
    """
    from common.cli.draft_check import check_draft_model
    from common.cli.head_check import check_fleet_head
    from common.cli.preflight import Servable, check_machine, check_model  # slow to import
    from common.engine.load.layout import EngineConfig

    _sweep(asked.config.shm_dir)
    needed: list[tuple[Servable, int]] = []
    warnings: dict[str, None] = {}
    for fleet in asked.fleets:
        config = fleet.config
        ensure(config.model)
        engines: dict[Role, int] = {"prefill": config.prefill or 0, "decode": config.decode}
        limits: list[int] = []
        known: dict[EngineConfig, Servable] = {}
        for role, count in engines.items():
            if not count and fleet.num_engines:
                continue
            on_gpu = bool(fleet.gpus) and getattr(fleet.services[role], "engine", "torch") != "simulated"
            settings = EngineConfig.of(fleet.services[role], on_gpu=on_gpu)
            if settings not in known:
                servable = known[settings] = check_model(config.model, settings, "cuda" if on_gpu else "cpu")
                if servable.longest < servable.model.max_context:
                    limits.append(servable.longest)
                warnings |= dict.fromkeys(servable.warnings)
            needed.append((known[settings], count))
        if limits:
            asked = asked.with_context(config.served_name, min(limits))
        drafts = check_draft_model(fleet)
        if drafts.servable is not None:
            needed.append((drafts.servable, config.draft))
        if drafts.reason:
            warnings[f"nothing is drafted: {drafts.reason}"] = None
            asked = asked.without_drafts(config.served_name)
        if reason := check_fleet_head(fleet).reason:
            warnings[f"no head drafts: {reason}"] = None
            asked = asked.without_head(config.served_name)
    capacity_mb = getattr(asked.services["kvstore"], "capacity_mb", 0)
    store_bytes = (asked.config.kvstore or 0) * store_capacity_bytes(capacity_mb, asked.config.shm_dir)
    tight = check_machine(needed, Path(asked.config.shm_dir), store_bytes=store_bytes)
    computes = any(getattr(service, "engine", "") == "torch" for fleet in asked.fleets for service in fleet.services.values())
    kept = [reason] if computes and (reason := not_kept()) else []
    return asked, [*warnings, *tight, *kept]


def _open_api(asked: UpSettings) -> list[str]:
    """Return a warning if everyone on the network may use the model."""
    host, gateway = asked.config.http_host, asked.services["gateway"]
    if is_loopback(host) or any(getattr(gateway, name, "") for name in ("api_key", "api_key_file", "api_keys")):
        return []
    return [
        f"the API listens on {host} without a key: whoever reaches this machine may use it. "
        "Set PENSTOCK_API_KEY or --api-key-file, or keep to 127.0.0.1"
    ]


async def serve(
    config: UpConfig,
    specs: Sequence[ProcessSpec],
    models: Sequence[ServedModel],
    *,
    log_dir: Path,
    credentials: Path | None,
) -> None:
    """Run `specs`, which serve `models`, until a signal ends it, with a bus for them if there is a folder with `credentials`
    for one. Addresses in `config` are real ones by now.

    :raises ChildFailed: (in a group) if a process keeps crashing before everything was ready once.
    """
    if credentials is None:
        advice = "start one there, or leave --nats-url out: then `up` starts one"
        async with connected(config.nats_url, "up", login=config.bus_login, advice=advice):
            pass  # better said now than by processes that wait
    _sweep(config.shm_dir)
    commands = [_command(spec) for spec in specs]
    if credentials is not None:
        commands.insert(0, _bus_command(credentials))
    supervisor = Supervisor(
        commands,
        log_dir=log_dir,
        report=lambda line: err.print(line, markup=False, style="yellow"),
        drain_timeout_s=config.drain_timeout_s,
    )
    succeeded = False
    try:
        async with anyio.create_task_group() as watchers:
            body = anyio.CancelScope()
            await watchers.start(_watch_signals, body, supervisor)
            with body:
                async with supervisor.running():
                    starting = await wait_ready(config, specs, models)
                    supervisor.started_once = True
                    for problem in starting.problems:
                        err.print(f"[bold yellow]warning[/] {escape(problem)}")
                    _announce(config, specs, supervisor, log_dir, starting, credentials)
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
    """The first signal ends the body, which drains; the second one kills. SIGHUP, of a terminal that was closed, is one of
    them, but where `nohup` has turned it off."""
    hang_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, *hang_up) as signals:
        task_status.started()
        async for number in signals:
            if number == signal.SIGHUP:
                _leave_terminal()
            if body.cancel_called:
                err.print("killing everything")
                supervisor.kill()
            else:
                err.print("draining; once more to stop at once")
                body.cancel()


def _leave_terminal() -> None:
    """Send what would go to a terminal to nowhere: one that was closed takes nothing, and the error would end the drain."""
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


@contextlib.contextmanager
def _log_dir(config: UpConfig) -> Iterator[Path]:
    """:raises ConfigError: the folder that is asked for can't be made."""
    if config.log_dir:
        folder = expanded(config.log_dir, "log_dir").resolve()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"can't write logs to {folder}: {error.strerror}", param="log_dir") from error
        yield folder
        return
    owned_folder.sweep(Path(tempfile.gettempdir()).glob(f"{LOG_PREFIX}*"), idle_s=LOGS_KEPT_S)
    folder = Path(tempfile.mkdtemp(prefix=LOG_PREFIX))
    with owned_folder.owned(folder):
        try:
            yield folder
        finally:
            if not any(folder.glob("*.log")):  # nothing was started
                owned_folder.remove(folder)


def _command(spec: ProcessSpec) -> Command:
    stage = GATEWAY_STAGE if spec.role == "gateway" else WORKER_STAGE
    argv = python_module(spec.module, spec.arguments)
    return Command(name=spec.name, argv=argv, environment=spec.environment, stage=stage)


def _bus_command(folder: Path) -> Command:
    """nats-server; supervised like the rest, so that it returns after a crash."""
    settings = str(own_bus.config_path(folder))
    argv = python_module("common.runtime.parent_death", ["SIGKILL", str(find_binary()), "-c", settings])
    return Command(name="nats-server", argv=argv, stage=BUS_STAGE)


def _sweep(shm_dir: str) -> list[str]:
    from common.transfer.segment_file import sweep

    if not Path(shm_dir).is_dir():
        raise ConfigError(f"{shm_dir} is no folder: make it (a tmpfs is best) or choose another with --shm-dir")
    if not os.access(shm_dir, os.W_OK | os.X_OK):
        raise ConfigError(f"{shm_dir} can't be written: choose another with --shm-dir")
    return sweep(shm_dir)


def _announce(
    config: UpConfig,
    specs: Sequence[ProcessSpec],
    supervisor: Supervisor,
    log_dir: Path,
    starting: Starting,
    credentials: Path | None,
) -> None:
    threads = {spec.name: str(spec.threads) for spec in specs if spec.threads}
    shown = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("process", "pid", "threads"):
        shown.add_column(title, justify="left" if title == "process" else "right")
    for child in supervisor.children:
        shown.add_row(child.command.name, str(child.pid or "-"), threads.get(child.command.name, "-"))
    out.print(shown)
    host = reachable(config.http_host)
    out.print()
    for model in starting.models:
        also = f", also called {', '.join(model.aliases)}" if model.aliases else ""
        context = starting.context_of(model.name)
        out.print(f"model       {model.name}{also}, context {context:,} tokens", markup=False)
    out.print(f"OpenAI API  http://{f'[{host}]' if ':' in host else host}:{config.http_port}/v1", markup=False)
    out.print(f"NATS        {redacted(config.nats_url)}, subject {starting.subjects[0]}", markup=False)
    for subject in starting.subjects[1:]:
        out.print(f"            {subject}", markup=False)
    if credentials is not None:
        out.print(f"            with the credentials in {credentials / 'client.json'}", markup=False)
        if place := own_bus.place_of_batches(config):
            out.print(f"batches     in {place}", markup=False)
    out.print(f"logs        {log_dir}", markup=False)
    out.print("[bold green]ready[/]")
