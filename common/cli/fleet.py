"""Which processes `penstock up` starts, with which flags, on which GPU. Pure: no process is started here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from common.cli.supervisor import stage_reserve_s
from common.cli.up_config import MAX_THREADS, UpConfig
from common.engine.settings import EngineServiceConfig
from common.protocol import subjects
from common.protocol.errors import ConfigError
from common.protocol.handles import Role
from common.runtime.fields import Field
from common.runtime.sections import config_type, service_fields
from common.runtime.settings import ServiceConfig

Passed = Mapping[Role, Mapping[str, str]]
"""Settings that a role's processes are given, by name, as they are written in a flag."""

Services = Mapping[Role, ServiceConfig]
"""The settings of a role's processes."""

MAX_TAG_CHARS = 40


class ModelFleet(msgspec.Struct, frozen=True, kw_only=True):
    """The workers of one model: how many in `config`, what they are given as flags, and what their settings are. `aliases`: its
    further names; `gpus`: those that its engines may have."""

    config: UpConfig
    aliases: Sequence[str] = ()
    passed: Passed = {}
    services: Services = {}
    gpus: Sequence[int] = ()

    @property
    def num_engines(self) -> int:
        return (self.config.prefill or 0) + self.config.decode + self.num_draft_engines

    @property
    def num_draft_engines(self) -> int:
        """Draft workers with a model."""
        return self.config.draft if getattr(self.services.get("draft"), "draft_model", "") else 0


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One process: `python -m module arguments`, with `environment` over that of `penstock up`: what nobody else may read.
    `threads`: what its engine computes with, 0 where there is none."""

    name: str
    role: Role
    module: str
    arguments: list[str]
    environment: dict[str, str] = {}
    threads: int = 0


def threads_per_worker(cores: int, num_engines: int) -> int:
    """CPU threads of each prefill and decode worker that computes with a library whose threads wait by spinning, or slowly: the
    cores shared out, one kept for the rest when there are many. 8-bit kernels may have every core.

    >>> threads_per_worker(2, 2), threads_per_worker(8, 2), threads_per_worker(16, 3), threads_per_worker(2, 5)
    (1, 3, 5, 1)
    """
    spare = 1 if cores > 4 else 0
    return max(1, min(MAX_THREADS, (cores - spare) // max(1, num_engines)))


class Placement(msgspec.Struct, frozen=True):
    """Where an engine runs; `share` of a GPU's memory is its own."""

    device: str
    share: float = 0.0


def placements(allowed: Sequence[Sequence[int]]) -> list[Placement]:
    """Where each engine runs: on the GPU with the fewest engines of those that it may have, or, where it may have none,
    wherever its own settings say.

    >>> [(place.device, place.share) for place in placements([[0, 1], [0, 1], [0, 1], []])]
    [('cuda:0', 0.45), ('cuda:1', 0.9), ('cuda:0', 0.45), ('', 0.0)]
    """
    chosen: list[int | None] = []
    for gpus in allowed:
        chosen.append(min(gpus, key=chosen.count) if gpus else None)
    return [Placement("") if gpu is None else Placement(f"cuda:{gpu}", int(90 / chosen.count(gpu)) / 100) for gpu in chosen]


def settled(config: UpConfig, num_gpus: int, cores: int) -> UpConfig:
    """Return `config` with the default size of each pool: what is fastest on a machine of this size (docs/performance/cpu.md).

    Two engines help where each has a GPU, or a full team of cores, of its own. Where they would share one, prompts and answers
    slow each other down, and a decode worker that computes both is faster at either.
    """
    apart = num_gpus > 1 or (not num_gpus and cores >= 2 * MAX_THREADS)
    prefill = int(apart)
    return msgspec.structs.replace(
        config,
        prefill=prefill if config.prefill is None else config.prefill,
        kvstore=int(not num_gpus and not config.zero_retention) if config.kvstore is None else config.kvstore,
    )


def processes(
    config: UpConfig,
    *,
    cores: int,
    gpus: Sequence[int] = (),
    passed: Passed | None = None,
    services: Services | None = None,
    fleets: Sequence[ModelFleet] = (),
    config_file: str = "",
    run_id: str = "",
    credentials: Path | None = None,
) -> list[ProcessSpec]:
    """Every process, the gateway first. `config` is `settled`, and its ports and the bus's URL are real ones by now.

    `passed`: the settings that each role's processes are given. `services`: what a role's settings are, these included.
    `fleets`: the workers of each model, by default those of the one that `config` names. `run_id`: part of each worker's id,
    which a process keeps when it is started again, so that gateways remember its failures. `credentials`: a folder with a file
    for each role to log in to the bus with.
    """
    fleets = fleets or [ModelFleet(config=config, passed=passed or {}, services=services or {}, gpus=gpus)]
    start = _Start(config=config, config_file=config_file, run_id=run_id, credentials=credentials)
    places = iter(placements([fleet.gpus for fleet in fleets for _ in range(fleet.num_engines)]))
    num_engines = sum(fleet.num_engines for fleet in fleets)
    tags = _tags([fleet.config.served_name for fleet in fleets])
    models = [fleet.config.model for fleet in fleets]
    common = {"model": models[0]} if len(fleets) == 1 else {}  # gateways and KV stores find several in the file

    def shared(role: Role, index: int, **own: str) -> ProcessSpec:
        return start.process(role, f"{role}-{index}", common | own, (passed or {}).get(role, {}))

    def worker(fleet: ModelFleet, tag: str, role: Role, index: int) -> ProcessSpec:
        own = {"model": fleet.config.model}
        if role != "draft" or fleet.num_draft_engines:
            place, settings = next(places), fleet.services.get(role) or config_type(role)()
            assert isinstance(settings, EngineServiceConfig)
            own["threads"] = str(settings.threads or threads_of(settings, cores, num_engines))
            if place.device:
                own |= {"device": place.device, "gpu_memory_utilization": str(place.share)}
            elif fleet.config.device == "cpu":
                own["device"] = "cpu"
        return start.process(role, f"{role}-{tag}{index}", own, fleet.passed.get(role, {}))

    shared_port = {"http_reuse_port": "true"} if config.gateway > 1 else {}
    return [
        *(shared("gateway", index, **shared_port) for index in range(config.gateway)),
        *(
            worker(fleet, tag, role, index)
            for fleet, tag in zip(fleets, tags, strict=True)
            for role, count in _counts(fleet.config).items()
            for index in range(count)
        ),
        *(shared("kvstore", index) for index in range(config.kvstore or 0)),
    ]


class _Start(msgspec.Struct, frozen=True, kw_only=True):
    """What all processes of one `penstock up` have in common; see `processes`."""

    config: UpConfig
    config_file: str
    run_id: str
    credentials: Path | None

    def process(self, role: Role, name: str, own: Mapping[str, str], passed: Mapping[str, str]) -> ProcessSpec:
        config = self.config
        given = ({"config": self.config_file} if self.config_file else {}) | {"http_port": "0", **own, **passed}
        if self.run_id:
            given["worker_id"] = f"{name}-{self.run_id}"
        if self.credentials is not None:
            given["nats_credentials_file"] = str(self.credentials / f"{role}.json")
        if role == "gateway":
            given |= {"http_host": config.http_host, "http_port": str(config.http_port)}
            given["drain_timeout_s"] = f"{gateway_drain_s(config.drain_timeout_s):g}"
        fields = service_fields(role)
        secret = {setting for setting in given if setting in fields and fields[setting].secret}
        return ProcessSpec(
            name=name,
            role=role,
            module=f"services.{role}",
            arguments=_flags(fields, {key: value for key, value in given.items() if key not in secret}),
            environment={fields["nats_url"].variable: config.nats_url} | {fields[key].variable: given[key] for key in secret},
            threads=int(given.get("threads", 0)),
        )


def check_disk(config: UpConfig, services: Services) -> None:
    """`config` is `settled`.

    :raises ConfigError: there is a folder for a KV store's blocks, and no KV store that could use it, or several; or one of
        both is asked for, and nothing may be kept.
    """
    folder = getattr(services.get("kvstore"), "kv_disk", "")
    if config.zero_retention and (folder or config.kvstore):
        setting = "--kv-disk" if folder else f"--kvstore {config.kvstore}"
        raise ConfigError(f"{setting} keeps KV after its request, and --zero-retention forbids that: leave one out")
    if folder and config.kvstore != 1:
        raise ConfigError(
            f"--kv-disk {folder} is for one KV store, and {config.kvstore or 'none'} would be started: say --kvstore 1",
            param="kv_disk",
        )


def _counts(config: UpConfig) -> dict[Role, int]:
    return {"prefill": config.prefill or 0, "decode": config.decode, "draft": config.draft}


def _tags(names: Sequence[str]) -> list[str]:
    """What stands in the names of each model's workers; nothing where there is one model.

    >>> _tags(["Org/A"]), _tags(["Org/A", "b"])
    ([''], ['org-a-', 'b-'])
    """
    if len(names) == 1:
        return [""]
    short = [subjects.slug(name)[:MAX_TAG_CHARS].strip("-") for name in names]
    return [f"{tag}-" if short.count(tag) == 1 else f"{tag}-m{number}-" for number, tag in enumerate(short)]


def gateway_drain_s(drain_timeout_s: float) -> float:
    """What a gateway, which is stopped first, may take of the time in which all must have ended.

    >>> gateway_drain_s(30.0), gateway_drain_s(0.0)
    (26.0, 0.0)
    """
    return max(0.0, drain_timeout_s - 2 * stage_reserve_s(drain_timeout_s))


def threads_of(settings: EngineServiceConfig, cores: int, num_engines: int) -> int:
    """Return the CPU threads of an engine whose settings name no number."""
    int8 = settings.dtype == "auto" and settings.quantization == "auto"
    return min(cores, MAX_THREADS) if int8 or settings.quantization == "int8" else threads_per_worker(cores, num_engines)


def _flags(fields: Mapping[str, Field], given: Mapping[str, str]) -> list[str]:
    """Return settings as flags: `--name value`, or `--name=value` for switches and for values that begin with `--`."""
    argv: list[str] = []
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        joined = (name in fields and fields[name].is_bool) or value.startswith("--")
        argv += [f"{flag}={value}"] if joined else [flag, value]
    return argv
