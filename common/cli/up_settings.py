"""The settings of `penstock up` and of the services it starts, from one command line, one environment and one file.

    flag of `penstock up` ─► environment ─► [[models]] ─► [<role>] ─► [up] ─► [common] ─► the default

A flag that is not `up`'s own belongs to the services that have such a setting: it goes to each of their processes as a flag.
What the environment and the tables of the file say, a service finds there by itself, so it is not handed on; [up] is, because
only `up` reads it. Of several models each has workers of its own, which are handed what its [[models]] table says; gateways and
KV stores, which serve all models, read these tables themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from common.cli.fleet import ModelFleet, Passed, Services
from common.cli.up_config import UpConfig
from common.protocol.errors import ConfigError
from common.protocol.handles import Role
from common.runtime import config as configuration
from common.runtime import model_tables
from common.runtime.config import Given
from common.runtime.config_help import group, row, title
from common.runtime.fields import ENV_PREFIX, Field, as_text
from common.runtime.model_tables import ModelTable
from common.runtime.sections import ROLES, UP, WORKERS_OF_A_MODEL, config_type, service_fields, up_fields
from common.runtime.settings import ModelSettings, ServiceConfig

NOT_OFFERED = frozenset({"worker_id", "http_reuse_port"})
"""Settings of one process, which `up` sees to itself."""
OF_EACH_PROCESS = frozenset({"device", "http_host", "http_port", "nats_url"})
"""What `up` reads under these names is not what a service does."""
OF_THE_MODEL = ("model", "served_model_name", "max_model_len")
"""All processes must agree on them: what one role is told, all are."""


class UpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`config` is `up`'s own. `passed`: what the processes of each role are given as flags. `services`: the settings that each
    role's processes will have, less what `up` decides when it starts them. `fleets`: of each model the same for its workers; of
    an only model all three are one."""

    config: UpConfig
    passed: Passed
    services: Services
    fleets: tuple[ModelFleet, ...]
    config_file: str = ""

    def with_context(self, model: str, max_model_len: int) -> UpSettings:
        """The same with another limit of the context of `model`, for its engines, and for gateways that serve nothing else."""
        fleets = tuple(
            msgspec.structs.replace(fleet, passed=_with_context(fleet.passed, max_model_len))
            if fleet.config.served_name == model
            else fleet
            for fleet in self.fleets
        )
        passed = _with_context(self.passed, max_model_len) if len(fleets) == 1 else self.passed
        return msgspec.structs.replace(self, passed=passed, fleets=fleets)

    def without_drafts(self, model: str) -> UpSettings:
        """The same without draft workers of `model`."""
        fleets = tuple(
            msgspec.structs.replace(fleet, config=msgspec.structs.replace(fleet.config, draft=0))
            if fleet.config.served_name == model
            else fleet
            for fleet in self.fleets
        )
        config = fleets[0].config if len(fleets) == 1 else self.config
        return msgspec.structs.replace(self, config=config, fleets=fleets)

    def without_head(self, model: str) -> UpSettings:
        """The same with decode workers of `model` that have no head."""
        fleets = tuple(
            msgspec.structs.replace(fleet, passed={**fleet.passed, "decode": {**fleet.passed.get("decode", {}), "head": "off"}})
            if fleet.config.served_name == model
            else fleet
            for fleet in self.fleets
        )
        passed = fleets[0].passed if len(fleets) == 1 else self.passed
        return msgspec.structs.replace(self, passed=passed, fleets=fleets)


def _with_context(passed: Passed, max_model_len: int) -> Passed:
    return {role: {**given, "max_model_len": str(max_model_len)} for role, given in passed.items()}


def offered() -> dict[str, Field]:
    """Every setting that is a flag of `penstock up`: its own first, then the services', each once."""
    fields = dict(up_fields())
    for role in ROLES:
        for name, field in service_fields(role).items():
            fields.setdefault(name, field)
    return {name: field for name, field in fields.items() if name not in NOT_OFFERED}


def read(argv: Sequence[str], environ: Mapping[str, str]) -> UpSettings | None:
    """None: help is wanted.

    :raises ConfigError: for anything unknown or wrong in any of the three, whichever process it is meant for.
    """
    fields = offered()
    flags = configuration.parse_flags(argv, fields)
    if flags.wants_help:
        return None
    path = configuration.config_path(flags, environ)
    tables = {} if path is None else configuration.read_tables(path, UP)
    configuration.check_variables(environ, fields)
    table = configuration.from_table(tables, UP, fields, path)
    for name, given in {**table, **flags.given}.items():
        configuration.convert(fields[name], given)

    read = _Read(tables, table, flags.given, environ, path)
    models = model_tables.read(path)
    if models:
        model_tables.check_no_other(name for section in tables.values() for name in section)
        models = model_tables.choose(models, configuration.from_environment(environ, up_fields()) | flags.given, path)
    file = str(path.resolve()) if path else ""
    if len(models) < 2:
        only = _fleet(read, ROLES, models[0] if models else None)
        return UpSettings(config=only.config, passed=only.passed, services=only.services, fleets=(only,), config_file=file)
    shared = _fleet(read, ("gateway", "kvstore"), models[0], of_all=True)
    fleets = tuple(_fleet(read, WORKERS_OF_A_MODEL, model) for model in models)
    return UpSettings(config=shared.config, passed=shared.passed, services=shared.services, fleets=fleets, config_file=file)


class _Read(msgspec.Struct, frozen=True):
    """What was said, and where: the tables of the file `path`, `[up]` among them, flags, and the environment."""

    tables: configuration.Tables
    up: Mapping[str, Given]
    flags: Mapping[str, Given]
    environ: Mapping[str, str]
    path: Path | None


def _fleet(read: _Read, roles: Sequence[Role], model: ModelTable | None, *, of_all: bool = False) -> ModelFleet:
    """The settings of `up` and of `roles`, for one model. `of_all`: the processes of these roles serve others, too.

    :raises ConfigError: for a wrong value, or two opinions of the model.
    """
    own, environ, flags = up_fields(), read.environ, dict(read.flags)
    said: dict[str, Given] = {}
    if model is not None:
        strong = configuration.from_environment(environ, own) | flags
        chosen = model_tables.given_by(model, strong)
        for name in model_tables.CHOICE:
            flags[name] = chosen[name]
        said = {} if of_all else model.settings
    layers = [
        configuration.from_table(read.tables, "common", own, read.path),
        *({name: given for name, given in layer.items() if name in own} for layer in (read.up, said)),
        configuration.from_environment(environ, own),
        {name: given for name, given in flags.items() if name in own},
    ]
    config = configuration.build(UpConfig, own, {name: given for layer in layers for name, given in layer.items()})
    config = _bus_of(config, layers)

    left_out = OF_EACH_PROCESS | set(model_tables.CHOICE) if of_all else OF_EACH_PROCESS
    passed: dict[Role, dict[str, str]] = {}
    services: dict[Role, ServiceConfig] = {}
    for role in roles:
        theirs = service_fields(role)
        variables = configuration.from_environment(environ, theirs)
        stronger = {*variables, *read.tables.get(role, {})}
        given = {name: value for name, value in read.up.items() if name not in stronger}
        given |= {name: value for name, value in said.items() if name not in variables}
        passed[role] = {
            name: as_text(configuration.convert(theirs[name], value))
            for name, value in (given | flags).items()
            if name in theirs and name not in left_out
        }
        argv = [f"--{name}={value}" for name, value in passed[role].items()]
        services[role] = model_tables.load(config_type(role), section=role, argv=argv, environ=environ, path=read.path)
    if not of_all:
        agreed = _agreed({UP: config, **services})
        for role in roles:
            passed[role] |= {name: as_text(value) for name, value in agreed.items()}
            services[role] = msgspec.structs.replace(services[role], **agreed)
        config = msgspec.structs.replace(config, **agreed)
    if "gateway" in services:
        config = msgspec.structs.replace(config, **_address(services["gateway"], read.tables, environ, read.flags))
    aliases = model.names[1:] if model is not None else getattr(services.get("gateway"), "aliases", ())
    return ModelFleet(config=config, aliases=aliases, passed=passed, services=services)


def help_text() -> str:
    """Every flag, grouped by whose setting it is."""
    lines = [
        "Usage: penstock up [--setting VALUE]...",
        "",
        "Start everything on this machine; Ctrl-C drains and stops it.",
        "",
        f"A setting is a flag, a variable ({ENV_PREFIX}KV_CACHE_MB for --kv-cache-mb) or",
        "a key of a TOML file, the stronger first. A switch is --name or --no-name.",
        "In brackets: the default. A command line can be read by everyone on the",
        f"machine: give passwords as variables, {ENV_PREFIX}API_KEY and {ENV_PREFIX}NATS_URL.",
        "",
        row("--config FILE", "TOML file: [common], [up], a table per service, and [[models]]: one for each of several models"),
        row("--help", "show this and end"),
    ]
    groups: dict[str, list[Field]] = {}
    order = {UpConfig: 0, ModelSettings: 1, ServiceConfig: 3}
    for field in sorted(offered().values(), key=lambda field: order.get(field.owner, 2)):
        groups.setdefault(title(field.owner), []).append(field)
    for heading, members in groups.items():
        lines += group(heading, members, default="[{}]")
    return "\n".join(lines) + "\n"


def _bus_of(config: UpConfig, layers: Sequence[Mapping[str, Given]]) -> UpConfig:
    """Which of `nats_url` and `nats_port` is meant: what was said in the stronger of `layers`, the weakest of which is first.

    :raises ConfigError: if both are flags.
    """

    def rank(name: str) -> int:
        return max((index for index, layer in enumerate(layers) if name in layer), default=-1)

    if "nats_url" in layers[-1] and "nats_port" in layers[-1] and config.nats_url:
        raise ConfigError("--nats-url joins a bus, --nats-port starts one: give one of them", param="nats_port")
    return msgspec.structs.replace(config, nats_url="") if rank("nats_port") > rank("nats_url") else config


def _agreed(said: Mapping[str, ServiceConfig]) -> dict[str, Any]:
    """What is said of the model by `up` or for any role, as all of them are to be told.

    :raises ConfigError: if two say different things.
    """
    found: dict[str, Any] = {}
    for name in OF_THE_MODEL:
        default = up_fields()[name].default
        values = {section: getattr(config, name) for section, config in said.items() if getattr(config, name) != default}
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{value!r} in [{section}]" for section, value in values.items())
            raise ConfigError(f"{name} must be one for all that `penstock up` starts, not {listed}", param=name)
        if values:
            found[name] = next(iter(values.values()))
    return found


def _address(
    gateway: ServiceConfig, tables: configuration.Tables, environ: Mapping[str, str], flags: Mapping[str, Given]
) -> dict[str, Any]:
    """Where the API is served, as far as the gateway's own table says it and nothing stronger does.

    :raises ConfigError: if that table turns HTTP off.
    """
    found: dict[str, Any] = {}
    for name in ("http_host", "http_port"):
        if name in tables.get("gateway", {}) and name not in flags and up_fields()[name].variable not in environ:
            found[name] = getattr(gateway, name)
    if found.get("http_port", 0) < 0:
        raise ConfigError("http_port -1 in [gateway]: `penstock up` needs the gateway's HTTP to know when it is ready")
    return found
