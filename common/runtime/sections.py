"""Who reads which settings: the services and `penstock up`, each with a table of its own in the file.

A service's settings are the Struct in `services/<role>/config.py`. They are looked up by that name when they are needed:
`penstock up` offers every service's settings as flags, and a variable that a service does not know may be another one's.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Mapping
from typing import get_args

import msgspec

from common.protocol.handles import Role
from common.runtime.fields import ENV_PREFIX, Field, fields_of
from common.runtime.settings import ModelSettings, ServiceConfig

ROLES: tuple[Role, ...] = get_args(Role)
UP = "up"
SECTIONS = ("common", *ROLES, UP)
WORKERS_OF_A_MODEL: tuple[Role, ...] = ("prefill", "decode", "draft")
"""Those of which each serves one model."""

OTHER_VARIABLES = frozenset(
    ENV_PREFIX + name
    for name in (
        "CONFIG",  # the file
        "HOME",  # where models are kept
        "KERNEL_CACHE",  # where compiled kernels are kept
        "PARENT_PID",  # a supervisor tells its children
        "DEMO",  # marks the processes of a demo
        "URL",  # examples: where the gateway is
        "HISTORIES",  # tests: how many random histories are tried
        # compose.yaml: read by docker compose on the host
        "IMAGE",
        "IMAGE_MODEL",
        "MODELS",
        "MODELS_FILE",
        "KVSTORES",
        "PYTHON_IMAGE",
        "FIRST_MODEL",
        "SECOND_MODEL",
        "SHM_SIZE",
        "TORCH_INDEX",
    )
)
"""Variables that are read but are not settings."""

_KUBERNETES = re.compile(r"\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")
"""What Kubernetes sets in every container for each Service of the namespace, here for one named penstock-something."""
_KUBERNETES_VALUE = re.compile(r"(tcp|udp|sctp)://.*")


@functools.cache
def config_type(role: str) -> type[ServiceConfig]:
    """The Struct with a service's settings."""
    module = importlib.import_module(f"services.{role}.config")
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, ServiceConfig) and value.__module__ == module.__name__:
            return value
    raise TypeError(f"{module.__name__} defines no settings")


@functools.cache
def service_fields(role: str) -> Mapping[str, Field]:
    return fields_of(config_type(role))


@functools.cache
def up_fields() -> Mapping[str, Field]:
    """The settings of `penstock up` itself."""
    kind: type[msgspec.Struct] = importlib.import_module("common.cli.up_config").UpConfig
    return fields_of(kind)


@functools.cache
def model_fields() -> Mapping[str, Field]:
    """What a `[[models]]` table may say: what the model is, all settings of the workers that are one model's but those that
    every process has, what a gateway has for each model, and how many workers `penstock up` starts."""
    found = {
        name: field
        for role in ROLES
        for name, field in service_fields(role).items()
        if field.owner is ModelSettings or field.per_model or (role in WORKERS_OF_A_MODEL and field.owner is not ServiceConfig)
    }
    return found | {name: up_fields()[name] for name in WORKERS_OF_A_MODEL}


def other_tables(name: str, table: str) -> str:
    """Return in which tables besides `table` the setting may stand, for people; empty for what is no setting."""
    of_roles = [f"[{role}]" for role in ROLES if name in service_fields(role)]
    found = [*of_roles, f"[{UP}]"] if of_roles or name in up_fields() else []  # `up` passes on what is the services'
    found = [other for other in found if other != f"[{table}]"]
    return " or ".join(filter(None, (", ".join(found[:-1]), *found[-1:])))


def unknown_variables(environ: Mapping[str, str], known: Mapping[str, Field]) -> list[str]:
    """Return the variables with our prefix that are neither a setting (in `known`, of any service, of `penstock up`) nor in
    `OTHER_VARIABLES`."""
    mine = {field.variable for field in known.values()}
    left = sorted(name for name in environ if name.startswith(ENV_PREFIX) and name not in mine | OTHER_VARIABLES)
    if not left:
        return []
    others = all_variables()
    return [name for name in left if name not in others and not _set_by_kubernetes(name, environ[name])]


def all_variables() -> frozenset[str]:
    """Return every variable that Penstock reads."""
    sections = [*(service_fields(role) for role in ROLES), up_fields()]
    return OTHER_VARIABLES | {field.variable for fields in sections for field in fields.values()}


def _set_by_kubernetes(name: str, value: str) -> bool:
    return _KUBERNETES.fullmatch(name) is not None and (
        not name.endswith("_PORT") or name.endswith("_SERVICE_PORT") or _KUBERNETES_VALUE.fullmatch(value) is not None
    )
