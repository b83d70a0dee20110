"""The settings of `penstock up` and of the services it starts, from one command line, one environment and one file.

    flag of `penstock up` ─► environment ─► [<role>] ─► [up] ─► [common] ─► the default

A flag that is not `up`'s own belongs to the services that have such a setting: it goes to each of their processes as a flag.
What the environment and the tables of the file say, a service finds there by itself, so it is not handed on; [up] is, because
only `up` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from common.cli.fleet import Passed, UpConfig
from common.protocol.errors import ConfigError
from common.protocol.handles import Role
from common.runtime import config as configuration
from common.runtime.config import Given
from common.runtime.config_help import group, row, title
from common.runtime.fields import ENV_PREFIX, Field, as_text
from common.runtime.sections import ROLES, UP, config_type, service_fields, up_fields
from common.runtime.settings import ModelSettings, ServiceConfig

NOT_OFFERED = frozenset({"worker_id", "http_reuse_port"})
"""Settings of one process, which `up` sees to itself."""
OF_EACH_PROCESS = frozenset({"device", "http_host", "http_port", "nats_url"})
"""What `up` reads under these names is not what a service does."""
OF_THE_MODEL = ("model", "served_model_name", "max_model_len")
"""All processes must agree on them: what one role is told, all are."""


class UpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`config` is `up`'s own. `passed`: what the processes of each role are given as flags. `services`: the settings that each
    role's processes will have, less what `up` decides when it starts them."""

    config: UpConfig
    passed: Passed
    services: dict[Role, ServiceConfig]
    config_file: str = ""

    def with_context(self, max_model_len: int) -> UpSettings:
        """The same with another limit of the context, for gateways and engines alike."""
        text = str(max_model_len)
        return msgspec.structs.replace(
            self, passed={role: {**given, "max_model_len": text} for role, given in self.passed.items()}
        )


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

    own = up_fields()
    layers = [
        configuration.from_table(tables, "common", own, path),
        {name: given for name, given in table.items() if name in own},
        configuration.from_environment(environ, own),
        {name: given for name, given in flags.given.items() if name in own},
    ]
    config = configuration.build(UpConfig, own, {name: given for layer in layers for name, given in layer.items()})
    config = _bus_of(config, layers)

    passed: dict[Role, dict[str, str]] = {}
    services: dict[Role, ServiceConfig] = {}
    for role in ROLES:
        theirs = service_fields(role)
        stronger = {*configuration.from_environment(environ, theirs), *tables.get(role, {})}
        chosen = {name: given for name, given in table.items() if name not in stronger} | flags.given
        passed[role] = {
            name: as_text(configuration.convert(theirs[name], given))
            for name, given in chosen.items()
            if name in theirs and name not in OF_EACH_PROCESS
        }
        argv_of_role = [f"--{name}={value}" for name, value in passed[role].items()]
        services[role] = configuration.load(config_type(role), section=role, argv=argv_of_role, environ=environ, path=path)
    agreed = _agreed({UP: config, **services})
    for role in ROLES:
        passed[role] |= {name: as_text(value) for name, value in agreed.items()}
        services[role] = msgspec.structs.replace(services[role], **agreed)
    config = msgspec.structs.replace(config, **agreed, **_address(services["gateway"], tables, environ, flags.given))
    return UpSettings(config=config, passed=passed, services=services, config_file=str(path.resolve()) if path else "")


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
        row("--config FILE", "TOML file: [common], [up], and a table per service"),
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
