"""Which processes `penstock up` starts, with which flags, on which GPU. Pure: no process is started here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from common.cli.supervisor import stage_reserve_s
from common.engine.settings import EngineServiceConfig
from common.protocol.handles import Role
from common.runtime.fields import SECRET, Field
from common.runtime.sections import config_type, service_fields
from common.runtime.settings import ServiceConfig

MAX_THREADS = 8
"""Decoding is bound by memory: more threads than this make a small model slower, not faster."""

Passed = Mapping[Role, Mapping[str, str]]
"""Settings that a role's processes are given, by name, as they are written in a flag."""

_Count = Annotated[int, Meta(ge=0, le=256)]


class UpConfig(ServiceConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is started. The settings of `penstock up` itself; its help has the first sentence as a heading."""

    gateway: Annotated[int, Meta(ge=1, le=64, description="gateways; several share the port")] = 1
    prefill: Annotated[
        _Count | None,
        Meta(description=f"prefill workers; by default 1 if there are two GPUs, or {2 * MAX_THREADS} cores and none, else 0"),
    ] = None
    decode: Annotated[int, Meta(ge=0, le=256, description="decode workers; they compute prompts too")] = 1
    draft: Annotated[int, Meta(ge=0, le=256, description="draft workers, which guess tokens from the text so far")] = 0
    kvstore: Annotated[_Count | None, Meta(description="KV stores; by default 1, where KV is on GPUs 0")] = None
    device: Annotated[str, Meta(description="auto: GPUs if there are any; cpu; cuda: every GPU; cuda:N: that one")] = "auto"
    http_host: Annotated[str, Meta(description="address of the OpenAI API")] = "127.0.0.1"
    http_port: Annotated[int, Meta(ge=0, le=65535, description="port of the OpenAI API; 0: any free one")] = 8000
    nats_url: Annotated[str, Meta(description="a bus that runs already; empty: start one", extra=SECRET)] = ""
    nats_port: Annotated[int, Meta(ge=0, le=65535, description="port of the bus that is started; 0: any free one")] = 4222
    nats_clients: Annotated[
        tuple[str, ...], Meta(description="further users of the bus that is started, who may send requests, each with a file")
    ] = ()
    log_dir: Annotated[str, Meta(description="folder for the processes' logs; empty: one of /tmp, removed in the end")] = ""


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


def placements(count: int, gpus: list[int]) -> list[Placement]:
    """`count` engines over `gpus`, in turns; without GPUs wherever their own settings say.

    >>> [(place.device, place.share) for place in placements(3, [0, 1])]
    [('cuda:0', 0.45), ('cuda:1', 0.9), ('cuda:0', 0.45)]
    """
    if not gpus:
        return [Placement("")] * count
    chosen = [gpus[index % len(gpus)] for index in range(count)]
    return [Placement(f"cuda:{gpu}", int(90 / chosen.count(gpu)) / 100) for gpu in chosen]


def settled(config: UpConfig, num_gpus: int, cores: int) -> UpConfig:
    """Return `config` with the default size of each pool: what is fastest on a machine of this size (docs/performance.md).

    Two engines help where each has a GPU, or a full team of cores, of its own. Where they would share one, prompts and answers
    slow each other down, and a decode worker that computes both is faster at either.
    """
    apart = num_gpus > 1 or (not num_gpus and cores >= 2 * MAX_THREADS)
    prefill = int(apart)
    return msgspec.structs.replace(
        config,
        prefill=prefill if config.prefill is None else config.prefill,
        kvstore=int(not num_gpus) if config.kvstore is None else config.kvstore,
    )


def processes(
    config: UpConfig,
    *,
    cores: int,
    gpus: Sequence[int] = (),
    passed: Passed | None = None,
    services: Mapping[Role, ServiceConfig] | None = None,
    config_file: str = "",
    run_id: str = "",
    credentials: Path | None = None,
) -> list[ProcessSpec]:
    """Every process, the gateway first. `config` is `settled`, and its ports and the bus's URL are real ones by now.

    `passed`: the settings that each role's processes are given. `services`: what a role's settings are, these included.
    `run_id`: part of each worker's id, which a process keeps when it is started again, so that gateways remember its failures.
    `credentials`: a folder with a file for each role to log in to the bus with.
    """
    passed, services = passed or {}, services or {}
    prefill, kvstore = config.prefill or 0, config.kvstore or 0
    places = iter(placements(prefill + config.decode, list(gpus)))
    common = {"model": config.model} | ({"config": config_file} if config_file else {})

    def process(role: Role, index: int, **own: str) -> ProcessSpec:
        name = f"{role}-{index}"
        given = {"http_port": "0", **own, **passed.get(role, {})}
        if run_id:
            given["worker_id"] = f"{name}-{run_id}"
        if credentials is not None:
            given["nats_credentials_file"] = str(credentials / f"{role}.json")
        if role == "gateway":
            given |= {"http_host": config.http_host, "http_port": str(config.http_port)}
            given["drain_timeout_s"] = f"{gateway_drain_s(config.drain_timeout_s):g}"
        fields = service_fields(role)
        secret = {setting for setting in given if fields[setting].secret}
        return ProcessSpec(
            name=name,
            role=role,
            module=f"services.{role}",
            arguments=_flags(fields, {**common, **{key: value for key, value in given.items() if key not in secret}}),
            environment={fields["nats_url"].variable: config.nats_url} | {fields[key].variable: given[key] for key in secret},
            threads=int(given.get("threads", 0)),
        )

    def engine(role: Role, index: int) -> ProcessSpec:
        place, settings = next(places), services.get(role) or config_type(role)()
        assert isinstance(settings, EngineServiceConfig)
        own = {"threads": str(settings.threads or threads_of(settings, cores, prefill + config.decode))}
        if place.device:
            own |= {"device": place.device, "gpu_memory_utilization": str(place.share)}
        elif config.device == "cpu":
            own["device"] = "cpu"
        return process(role, index, **own)

    shared_port = {"http_reuse_port": "true"} if config.gateway > 1 else {}
    return [
        *(process("gateway", index, **shared_port) for index in range(config.gateway)),
        *(engine("prefill", index) for index in range(prefill)),
        *(engine("decode", index) for index in range(config.decode)),
        *(process("draft", index) for index in range(config.draft)),
        *(process("kvstore", index) for index in range(kvstore)),
    ]


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
